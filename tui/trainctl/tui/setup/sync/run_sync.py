"""Copies a run's model and data from this machine to the run's other nodes, one node after another, and shows it."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from trainctl.protocol.config import addresses, names, run_file
from trainctl.protocol.config.cluster_file import Cluster, NodeEntry, default_path
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.tui.commands.targets import ClusterFile
from trainctl.tui.doctor.findings import Asset
from trainctl.tui.setup.ssh import SshTarget
from trainctl.tui.setup.sync import plan, rsync
from trainctl.tui.setup.sync.node_sync import NodeSync, State, SyncOptions, SyncResult
from trainctl.tui.setup.sync.plan import gigabytes

_LEVELS: dict[State, str] = {"complete": "ok", "copied": "done", "to-copy": "copy", "failed": "fail"}


class SyncRequest(NamedTuple):
    """As the command line has it."""

    file: Path
    overrides: dict[str, str]
    only: tuple[str, ...]  # nodes; empty: all
    ssh: tuple[str, ...]  # NODE=USER@HOST
    here: str | None  # this machine's node; None: by its host name
    ssh_config: Path | None
    options: SyncOptions


class SyncReport:
    """Shows results by `say`, failures by `complain`, and progress on standard error if it is a terminal; nothing with
    `quiet`."""

    def __init__(self, say: Callable[[str], None], complain: Callable[[str], None], *, quiet: bool) -> None:
        self._say, self._complain, self._quiet = say, complain, quiet
        self._shown = ""

    def progress(self, node: str, what: Asset, progress: rsync.TransferProgress, total: int) -> None:
        """Replace the line of progress."""
        line = f"{node}: {what}: {progress.percent} % of {gigabytes(total)}"
        if not self._quiet and sys.stderr.isatty() and line != self._shown:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._shown = line

    def result(self, node: str, result: SyncResult) -> None:
        """One line in place of the progress."""
        self.clear()
        if self._quiet:
            return
        if result.state == "failed":
            self._complain(f"{node}: {words_of(result)}")
        else:
            self._say(f"{_LEVELS[result.state]:<4}  {node}: {words_of(result)}")

    def clear(self) -> None:
        """Remove the line of progress."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


def words_of(result: SyncResult) -> str:
    """Return what is said of a result, without the node."""
    what = f"{result.what}: " if result.what else ""
    files = f"{result.files} file{'s' if result.files != 1 else ''}, {gigabytes(result.bytes)}"
    match result.state:
        case "complete":
            return f"{what}already in {result.folder}"
        case "to-copy":
            return f"{what}would copy {files}, to {result.folder}"
        case "copied":
            kept = result.bytes - result.sent_bytes
            already = f"; {gigabytes(kept)} of it was already there" if kept > 0 else ""
            return f"{what}copied {files}, to {result.folder}; hashes match{already}"
        case "failed":
            return f"{what}{result.problem}"


def copy(wanted: SyncRequest, cluster: ClusterFile | None, report: SyncReport) -> dict[str, list[SyncResult]]:
    """Return the results by node, failures too. Raises InvalidInputError for what is wrong here, before anything is
    copied."""
    if cluster is None:
        raise InvalidInputError(str(default_path()), "no nodes: add one with trainctl cluster add, or give --cluster")
    config = run_file.read(wanted.file, wanted.overrides)
    here = _here(wanted.here, cluster)
    given = ssh_names(wanted.ssh, cluster.cluster.nodes)
    found = hosts([*config.nodes] or [*cluster.nodes], cluster.cluster, here, given, _own_addresses())
    wanted_nodes = chosen(found, wanted.only)
    if not wanted_nodes:
        return {}
    if not wanted.options.dry_run:
        rsync.check(rsync.usable())
    run_file.check_paths(config, str(wanted.file), found.here)
    try:
        files = plan.sources(run_file.on_node(config, found.here))
    except OSError as error:
        raise RefusedError(f"{error.filename or wanted.file}: {error.strerror or error}") from None
    nodes = {
        node: NodeSync(node, SshTarget(host, wanted.ssh_config), wanted.options, report.progress)
        for node, host in wanted_nodes.items()
    }
    results: dict[str, list[SyncResult]] = {}
    for node, sync in nodes.items():
        results[node] = sync.carry_out(files, run_file.on_node(config, node))
        for result in results[node]:
            report.result(node, result)
    return results


def _here(given: str | None, cluster: ClusterFile) -> str:
    if given is not None and given not in cluster.nodes:
        raise InvalidInputError(
            "--here", f"no node {given!r} in {cluster.path}; the nodes are {', '.join(cluster.nodes)}"
        )
    return given or names.node_name()


def _own_addresses() -> frozenset[str]:
    return frozenset(one.address.partition("%")[0] for every in psutil.net_if_addrs().values() for one in every)


# ---------------------------------------------------------------- the nodes, and how ssh reaches them


class SyncHosts(NamedTuple):
    """The nodes of a run, as this machine reaches them."""

    here: str  # this machine's node; empty: none of the run's
    there: dict[str, str]  # of the other nodes, what ssh gets: user@host


def hosts(
    nodes: Sequence[str], cluster: Cluster, here: str, given: Mapping[str, str], own: Collection[str]
) -> SyncHosts:
    """`here`: this machine's name as a node. `given`: hosts from the command line by node. `own`: IP addresses of this
    machine. Raises InvalidInputError for a node that isn't in the cluster, or whose host isn't known.

    An address of this machine may be a port that is forwarded to another one, so a node with a host isn't this machine.
    """
    unknown = next((node for node in nodes if node not in cluster.nodes), None)
    if unknown is not None:
        raise InvalidInputError(f"nodes.{unknown}", f"no such node; the cluster's are {_listed(cluster.nodes)}")
    kept = {node: given.get(node) or cluster.nodes[node].ssh for node in nodes}
    is_here = {node: not kept[node] and (node == here or _is_own(cluster.nodes[node], own)) for node in nodes}
    first = here if is_here.get(here) else next((node for node in nodes if is_here[node]), "")
    return SyncHosts(first, {node: kept[node] or _host(cluster.nodes[node]) for node in nodes if not is_here[node]})


def _is_own(entry: NodeEntry, own: Collection[str]) -> bool:
    return addresses.is_near(entry.address) or _host(entry) in own


def _host(entry: NodeEntry) -> str:
    return addresses.host(entry.address)


def chosen(found: SyncHosts, only: Sequence[str]) -> dict[str, str]:
    """The other machines, or those of them that are asked for. Raises InvalidInputError for another one."""
    for node in only:
        if node == found.here:
            raise InvalidInputError("--node", f"{node} is this machine; give a node to copy to")
        if node not in found.there:
            raise InvalidInputError("--node", f"no node {node!r} on another machine; give {_listed(found.there)}")
    return {node: host for node, host in found.there.items() if not only or node in only}


def ssh_names(given: Sequence[str], nodes: Mapping[str, object]) -> dict[str, str]:
    """`NODE=USER@HOST` options by node. Raises InvalidInputError for another form, or a node that isn't known."""
    found = {}
    for text in given:
        node, equals, host = text.partition("=")
        if not (node and equals and host):
            raise InvalidInputError("--ssh", f"{text!r} must have the form NODE=USER@HOST")
        if node not in nodes:
            raise InvalidInputError("--ssh", f"no node {node!r}; the nodes are {_listed(nodes)}")
        found[node] = host
    return found


def _listed(nodes: Collection[str]) -> str:
    return ", ".join(nodes) or "none"
