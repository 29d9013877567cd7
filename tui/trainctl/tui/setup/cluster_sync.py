"""`trainctl cluster sync`: a run's model and data copied to its other nodes by rsync, one node after another."""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from trainctl.protocol.config import addresses, names, run_file
from trainctl.protocol.config.cluster_file import Cluster, NodeEntry, default_path
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.tui.commands.targets import ClusterFile
from trainctl.tui.doctor.findings import Asset
from trainctl.tui.setup import rsync, sync_files
from trainctl.tui.setup.remote_install import HOME
from trainctl.tui.setup.rsync import Ssh, SshTarget, said
from trainctl.tui.setup.sync_files import NodeFiles, SourceFiles, Target, gigabytes

HASH_SECONDS = 7200.0
"""Seconds for an answer: hundreds of gigabytes may have to be read there."""
SHOWN_FILES = 3
_RUN = f"""
agent=$(command -v trainctl-agent)
for python in ${{1:+"$1"}} "$HOME/{HOME}/venv/bin/python" "${{agent%/*}}/python"; do
  if [ -x "$python" ]; then exec "$python" -m trainctl.tui.setup.sync_files; fi
done
echo "no trainctl there (looked for ${{1:-$HOME/{HOME}/venv}}); run trainctl cluster add, or give --python" >&2
exit 3
"""
State = Literal["complete", "copied", "to-copy", "failed"]
_LEVELS: dict[State, str] = {"complete": "ok", "copied": "done", "to-copy": "copy", "failed": "fail"}


@dataclass(frozen=True)
class SyncRequest:
    """A call of the command, as its options say."""

    file: Path
    overrides: dict[str, str]
    only: tuple[str, ...] = ()  # nodes; empty: all
    ssh: tuple[str, ...] = ()  # NODE=USER@HOST
    here: str | None = None  # this machine's node; None: by its host name
    ssh_config: Path | None = None
    python: str = ""  # there; empty: where trainctl cluster add installs it
    dry_run: bool = False
    megabytes_per_second: float | None = None
    interactive: bool = True


@dataclass(frozen=True)
class SyncResult:
    """The outcome for a node's model or data."""

    what: Asset | Literal[""]  # empty: all of them
    state: State  # to-copy: by --dry-run
    folder: str = ""  # there
    files: int = 0  # that it lacked
    bytes: int = 0  # of those files
    sent_bytes: int = 0  # without what an earlier call had already sent
    problem: str = ""  # failed: why, and what to do

    @property
    def text(self) -> str:
        """The outcome in words, without the node."""
        what = f"{self.what}: " if self.what else ""
        files = f"{self.files} file{'s' if self.files != 1 else ''}, {gigabytes(self.bytes)}"
        match self.state:
            case "complete":
                return f"{what}already in {self.folder}"
            case "to-copy":
                return f"{what}would copy {files}, to {self.folder}"
            case "copied":
                kept = self.bytes - self.sent_bytes
                already = f"; {gigabytes(kept)} of it was already there" if kept > 0 else ""
                return f"{what}copied {files}, to {self.folder}; hashes match{already}"
            case "failed":
                return f"{what}{self.problem}"


class SyncReport:
    """Shows results by `say`, failures by `complain`, and progress on standard error if it is a terminal; nothing with
    `quiet`."""

    def __init__(self, say: Callable[[str], None], complain: Callable[[str], None], *, quiet: bool) -> None:
        self._say, self._complain, self._quiet = say, complain, quiet
        self._shown = ""

    def progress(self, line: str) -> None:
        """Replace the line of progress; an empty line removes it."""
        if line != self._shown and not self._quiet and sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._shown = line

    def result(self, node: str, result: SyncResult) -> None:
        """Print one line in place of the progress."""
        self.progress("")
        if self._quiet:
            return
        if result.state == "failed":
            self._complain(f"{node}: {result.text}")
        else:
            self._say(f"{_LEVELS[result.state]:<4}  {node}: {result.text}")


def copy(request: SyncRequest, cluster: ClusterFile | None, report: SyncReport) -> dict[str, list[SyncResult]]:
    """Return the results by node, failures too. Raises InvalidInputError for what is wrong here, before anything is
    copied."""
    if cluster is None:
        raise InvalidInputError(str(default_path()), "no nodes: add one with trainctl cluster add, or give --cluster")
    config = run_file.read(request.file, request.overrides)
    if request.here is not None and request.here not in cluster.nodes:
        problem = f"no node {request.here!r} in {cluster.path}; the nodes are {', '.join(cluster.nodes)}"
        raise InvalidInputError("--here", problem)
    own = {address.address.partition("%")[0] for each in psutil.net_if_addrs().values() for address in each}
    here, others = hosts(
        [*config.nodes] or [*cluster.nodes],
        cluster.cluster,
        request.here or names.node_name(),
        ssh_names(request.ssh, cluster.cluster.nodes),
        own,
    )
    others = chosen(here, others, request.only)
    if not others:
        return {}
    program = rsync.check(rsync.usable())
    run_file.check_paths(config, str(request.file), here)
    try:
        sources = sync_files.sources(run_file.on_node(config, here))
    except OSError as error:
        raise RefusedError(f"{error.filename or request.file}: {error.strerror or error}") from None
    nodes = {
        node: _NodeSync(node, SshTarget(host, request.ssh_config), program, request, report.progress)
        for node, host in others.items()
    }
    results: dict[str, list[SyncResult]] = {}
    for node, sync in nodes.items():
        results[node] = sync.carry_out(sources, run_file.on_node(config, node))
        for result in results[node]:
            report.result(node, result)
    return results


# ---------------------------------------------------------------- the nodes, and how ssh reaches them


def hosts(
    nodes: Sequence[str], cluster: Cluster, here: str, by_ssh: Mapping[str, str], own: Collection[str]
) -> tuple[str, dict[str, str]]:
    """Return this machine's node (empty: none of the run's), and user@host of the other nodes.

    `here` is this machine's name as a node, `by_ssh` hosts from the command line by node, `own` the IP addresses of
    this machine. An address of this machine may be a port that is forwarded to another one, so a node with a host isn't
    this machine. Raises InvalidInputError for a node that isn't in the cluster, or whose host isn't known.
    """
    unknown = next((node for node in nodes if node not in cluster.nodes), None)
    if unknown is not None:
        raise InvalidInputError(f"nodes.{unknown}", f"no such node; the cluster's are {_listed(cluster.nodes)}")
    kept = {node: by_ssh.get(node) or cluster.nodes[node].ssh for node in nodes}
    is_here = {node: not kept[node] and (node == here or _is_own(cluster.nodes[node], own)) for node in nodes}
    first = here if is_here.get(here) else next((node for node in nodes if is_here[node]), "")
    others = {node: kept[node] or addresses.host(cluster.nodes[node].address) for node in nodes if not is_here[node]}
    return first, others


def _is_own(entry: NodeEntry, own: Collection[str]) -> bool:
    return addresses.is_near(entry.address) or addresses.host(entry.address) in own


def chosen(here: str, others: Mapping[str, str], only: Sequence[str]) -> dict[str, str]:
    """Return the other machines, or those of them that are asked for. Raises InvalidInputError for another one."""
    for node in only:
        if node == here:
            raise InvalidInputError("--node", f"{node} is this machine; give a node to copy to")
        if node not in others:
            raise InvalidInputError("--node", f"no node {node!r} on another machine; give {_listed(others)}")
    return {node: host for node, host in others.items() if not only or node in only}


def ssh_names(options: Sequence[str], nodes: Mapping[str, object]) -> dict[str, str]:
    """Return `NODE=USER@HOST` options by node. Raises InvalidInputError for another form or an unknown node."""
    by_node = {}
    for text in options:
        node, equals, host = text.partition("=")
        if not (node and equals and host):
            raise InvalidInputError("--ssh", f"{text!r} must have the form NODE=USER@HOST")
        if node not in nodes:
            raise InvalidInputError("--ssh", f"no node {node!r}; the nodes are {_listed(nodes)}")
        by_node[node] = host
    return by_node


def _listed(nodes: Collection[str]) -> str:
    return ", ".join(nodes) or "none"


# ---------------------------------------------------------------- one node


@dataclass(frozen=True)
class _Copy:
    """A model or data, and what a node lacks of it."""

    source: SourceFiles
    target: Target
    answer: NodeFiles
    rsync: rsync.Rsync
    lacking: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(self.source.sizes[name] for name in self.lacking)

    @property
    def is_complete(self) -> bool:
        return not self.lacking and self.answer.current

    def result(self, state: State, sent: int = 0, problem: str = "") -> SyncResult:
        return SyncResult(self.source.what, state, self.answer.root, len(self.lacking), self.bytes, sent, problem)


class _NodeSync:
    """A node, and the ssh connection over which files are copied to it."""

    def __init__(
        self, node: str, host: SshTarget, program: str, request: SyncRequest, progress: Callable[[str], None]
    ) -> None:
        self._node, self._program, self._request, self._progress = node, program, request, progress
        self._ssh = Ssh(host, interactive=request.interactive)

    def carry_out(self, sources: Sequence[SourceFiles], config: RunFile) -> list[SyncResult]:
        """Copy what the node lacks, by the run file as it is for the node. A problem with one of the sources doesn't
        stop the others."""
        results: list[SyncResult] = []
        try:
            with self._ssh:
                for result in self._results(sources, config):  # what is done is kept if the connection is lost
                    results.append(result)  # noqa: PERF402
        except (TrainctlError, OSError) as error:  # the connection, or ssh itself
            results.append(SyncResult("", "failed", problem=str(error)))
        order = [*(source.what for source in sources), ""]
        return sorted(results, key=lambda result: order.index(result.what))

    def _results(self, sources: Sequence[SourceFiles], config: RunFile) -> Iterator[SyncResult]:
        targets: list[tuple[SourceFiles, Target]] = []
        for source in sources:
            try:
                targets.append((source, sync_files.target(source, config, self._node)))
            except TrainctlError as error:
                yield SyncResult(source.what, "failed", problem=str(error))
        answers = self._asked([target for _, target in targets])
        copies: list[_Copy] = []
        for (source, target), answer in zip(targets, answers, strict=True):
            if answer.problem:
                yield SyncResult(source.what, "failed", problem=answer.problem)
                continue
            there, host, folder = rsync.check(answer.rsync), self._ssh.target.words, answer.root
            transfer = rsync.Rsync(self._program, self._ssh.options(), there, source.root, host, folder)
            try:
                copies.append(_Copy(source, target, answer, transfer, tuple(transfer.differing(source.sizes))))
            except RefusedError as error:
                yield SyncResult(source.what, "failed", folder, problem=f"{folder}: {error}")
        full = sync_files.without_room((each.answer, each.bytes) for each in copies)
        for each in copies:
            try:
                yield self._result(each, full.get(each.answer.disk, ""))
            except (RefusedError, InvalidInputError, OSError) as error:
                yield each.result("failed", problem=f"{each.answer.root}: {error}")

    def _result(self, item: _Copy, full: str) -> SyncResult:
        root, problem, sent = item.answer.root, "", 0
        if not item.is_complete:
            if full:
                return item.result("failed", problem=f"{root}: {full}")
            if self._request.dry_run:
                return item.result("to-copy")
            if item.lacking:
                line = f"{self._node}: {item.source.what}: {{}} % of {gigabytes(item.bytes)}"
                limit = self._request.megabytes_per_second
                sent = item.rsync.copy(item.lacking, lambda percent: self._progress(line.format(percent)), limit)
            (answer,) = self._asked([msgspec.structs.replace(item.target, digests=item.source.digests)])
            problem = answer.problem
            if answer.differing:
                problem = f"{_some(answer.differing)} in {root} differs from this machine's file after copying: did it "
                problem += "change meanwhile? Run this again"
        if item.answer.extra and not problem:
            problem = f"{_some(item.answer.extra)} in {root} isn't on this machine: move it away, or copy it here"
        state: State = "failed" if problem else "complete" if item.is_complete else "copied"
        return item.result(state, sent, problem)

    def _asked(self, targets: Sequence[Target]) -> list[NodeFiles]:
        """Return what the node says about each target. Raises RefusedError with what it said, UnreachableError."""
        if not targets:
            return []
        words = ["sh", "-c", _RUN, "sh", self._request.python]
        question = json.dumps(msgspec.to_builtins(targets)).encode()
        status, out, err = self._ssh.try_run(words, given=question, seconds=HASH_SECONDS, step="ssh")
        if status and "No module named" in err:
            raise RefusedError(f"its trainctl can't do this: {said(err)}; update it with trainctl cluster add")
        if status:
            raise RefusedError(said(err) or f"exit status {status}")
        try:
            return msgspec.convert(json.loads(out.strip().splitlines()[-1]), list[NodeFiles])
        except (ValueError, IndexError):  # msgspec.ValidationError is a ValueError
            raise RefusedError(f"unexpected answer: {out[:200]!r}") from None


def _some(files: Sequence[str]) -> str:
    more = f" and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
    return ", ".join(files[:SHOWN_FILES]) + more
