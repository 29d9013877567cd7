"""Copies a run's model and data from this machine to the run's other nodes, one node after another."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from trainctl.protocol.config import names, run_file
from trainctl.protocol.config.cluster_file import default_path
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.tui.commands.targets import ClusterFile
from trainctl.tui.doctor.findings import Asset
from trainctl.tui.setup.ssh import SshTarget
from trainctl.tui.setup.sync import hosts, plan, rsync
from trainctl.tui.setup.sync.node_sync import NodeSync, State, SyncOptions, SyncResult, words_of
from trainctl.tui.setup.sync.plan import gigabytes
from trainctl.tui.setup.sync.rsync import TransferProgress


class SyncRequest(NamedTuple):
    """As the command line has it."""

    file: Path
    overrides: dict[str, str]
    only: tuple[str, ...]  # nodes; empty: all
    ssh: tuple[str, ...]  # NODE=USER@HOST
    here: str | None  # this machine's node; None: by its host name
    ssh_config: Path | None
    options: SyncOptions


class SyncListener(Protocol):
    """Hears what happens."""

    def progress(self, node: str, what: Asset, progress: rsync.TransferProgress, total: int) -> None:
        """Of one node's model or data; `total`: bytes."""

    def result(self, node: str, result: SyncResult) -> None:
        """One is done or has failed."""


def copy(wanted: SyncRequest, cluster: ClusterFile | None, listener: SyncListener) -> dict[str, list[SyncResult]]:
    """By node. What fails on a node is in its results. Raises InvalidInputError for what is wrong here, before
    anything is copied."""
    if cluster is None:
        raise InvalidInputError(str(default_path()), "no nodes: add one with trainctl cluster add, or give --cluster")
    config = run_file.read(wanted.file, wanted.overrides)
    here = _here(wanted.here, cluster)
    given = hosts.ssh_names(wanted.ssh, cluster.cluster.nodes)
    found = hosts.hosts([*config.nodes] or [*cluster.nodes], cluster.cluster, here, given, _own_addresses())
    chosen = hosts.chosen(found, wanted.only)
    if not chosen:
        return {}
    if not wanted.options.dry_run:
        rsync.find()
    run_file.check_paths(config, str(wanted.file), found.here)
    try:
        files = plan.sources(run_file.on_node(config, found.here))
    except OSError as error:
        raise RefusedError(f"{error.filename or wanted.file}: {error.strerror or error}") from None
    nodes = {
        node: NodeSync(node, SshTarget(host, wanted.ssh_config), wanted.options, listener.progress)
        for node, host in chosen.items()
    }
    results: dict[str, list[SyncResult]] = {}
    for node, sync in nodes.items():
        results[node] = sync.carry_out(files, run_file.on_node(config, node))
        for result in results[node]:
            listener.result(node, result)
    return results


def _here(given: str | None, cluster: ClusterFile) -> str:
    if given is not None and given not in cluster.nodes:
        raise InvalidInputError(
            "--here", f"no node {given!r} in {cluster.path}; the nodes are {', '.join(cluster.nodes)}"
        )
    return given or names.node_name()


def _own_addresses() -> frozenset[str]:
    return frozenset(one.address.partition("%")[0] for every in psutil.net_if_addrs().values() for one in every)


_LEVELS: dict[State, str] = {"complete": "ok", "copied": "done", "to-copy": "copy", "failed": "fail"}


class SyncReport:
    """A `SyncListener`: lines go to `say`, failures to `complain`; progress to standard error if it is a terminal."""

    def __init__(self, say: Callable[[str], None], complain: Callable[[str], None]) -> None:
        self._say, self._complain = say, complain
        self._shown = ""

    def progress(self, node: str, what: Asset, progress: TransferProgress, total: int) -> None:
        """Replace the line of progress."""
        line = f"{node}: {what}: {progress.percent} % of {gigabytes(total)}"
        if sys.stderr.isatty() and line != self._shown:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._shown = line

    def result(self, node: str, result: SyncResult) -> None:
        """One line in place of the progress."""
        self.clear()
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


class NoReport:
    """A `SyncListener` that shows nothing."""

    def progress(self, node: str, what: Asset, progress: TransferProgress, total: int) -> None:
        """Nothing."""

    def result(self, node: str, result: SyncResult) -> None:
        """Nothing."""
