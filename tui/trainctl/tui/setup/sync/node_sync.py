"""Copies a run's model and data to one node that lacks them, over one ssh connection; a failure is in the result."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.tui.doctor.findings import Asset
from trainctl.tui.setup.remote_install import HOME
from trainctl.tui.setup.ssh import Ssh, SshTarget, said
from trainctl.tui.setup.sync import plan, rsync
from trainctl.tui.setup.sync.plan import NodeFiles, SourceFiles, Target

HASH_SECONDS = 7200.0
"""Hundreds of gigabytes may have to be read there."""
SHOWN_FILES = 3
_THERE = "trainctl.tui.setup.sync.remote"
_RUN = f"""
agent=$(command -v trainctl-agent)
for python in ${{1:+"$1"}} "$HOME/{HOME}/venv/bin/python" "${{agent%/*}}/python"; do
  if [ -x "$python" ]; then exec "$python" -m {_THERE} "$2"; fi
done
echo "no trainctl there (looked for ${{1:-$HOME/{HOME}/venv}}); run trainctl cluster add, or give --python" >&2
exit 3
"""
State = Literal["complete", "copied", "to-copy", "failed"]


class SyncResult(NamedTuple):
    """What came of a node's model or data."""

    what: Asset | Literal[""]  # empty: of all of them
    state: State  # to-copy: by --dry-run
    folder: str = ""  # there
    files: int = 0  # that it lacked
    bytes: int = 0  # of those files
    sent_bytes: int = 0  # without what an earlier call had already sent
    problem: str = ""  # failed: why, and what to do


class SyncOptions(NamedTuple):
    """How nodes are reached and what is done."""

    python: str = ""  # there; empty: where trainctl cluster add installs it
    dry_run: bool = False
    megabytes_per_second: float | None = None
    interactive: bool = True


class _Item(NamedTuple):
    source: SourceFiles
    target: Target
    answer: NodeFiles

    @property
    def bytes(self) -> int:
        """Bytes to copy."""
        return sum(self.source.sizes[name] for name in self.answer.lacking)

    @property
    def is_wanted(self) -> bool:
        """Whether anything is missing there."""
        return bool(self.answer.lacking) or not self.answer.current

    def result(self, state: State, sent: int = 0, problem: str = "") -> SyncResult:
        return SyncResult(
            self.source.what, state, self.answer.root, len(self.answer.lacking), self.bytes, sent, problem
        )


Report = Callable[[str, Asset, rsync.TransferProgress, int], None]
"""Hears of a node which of its files are copied now, how far, and the bytes of all of them."""


class NodeSync:
    """One node, and how to copy to it."""

    def __init__(self, node: str, host: SshTarget, options: SyncOptions, report: Report) -> None:
        self._node, self._options, self._report = node, options, report
        self._ssh = Ssh(host, interactive=options.interactive)

    def carry_out(self, found: Sequence[SourceFiles], config: RunFile) -> list[SyncResult]:
        """`config`: as it is for the node. A problem with one of them doesn't stop the others."""
        results: list[SyncResult] = []
        try:
            with self._ssh:
                for result in self._results(found, config):  # what is done is kept if the connection is lost
                    results.append(result)  # noqa: PERF402
        except (TrainctlError, OSError) as error:  # the connection, or ssh itself
            results.append(SyncResult("", "failed", problem=str(error)))
        order = [source.what for source in found]
        return sorted(results, key=lambda result: order.index(result.what) if result.what else len(order))

    def _results(self, found: Sequence[SourceFiles], config: RunFile) -> Iterator[SyncResult]:
        targets: list[tuple[SourceFiles, Target]] = []
        for source in found:
            try:
                targets.append((source, plan.target(source, config, self._node)))
            except TrainctlError as error:
                yield SyncResult(source.what, "failed", problem=str(error))
        items = []
        for (source, target), answer in zip(targets, self._asked("look", targets), strict=True):
            if isinstance(answer, str):
                yield SyncResult(source.what, "failed", problem=answer)
            else:
                items.append(_Item(source, target, answer))
        full = plan.without_room((item.answer, item.bytes) for item in items)
        for item in items:
            if not item.is_wanted:
                yield self._checked(item, item.answer, "complete", 0)
            elif item.answer.disk in full:
                yield item.result("failed", problem=f"{item.answer.root}: {full[item.answer.disk]}")
            elif self._options.dry_run:
                yield item.result("to-copy")
        if not self._options.dry_run:
            yield from self._copied([one for one in items if one.is_wanted and one.answer.disk not in full])

    def _copied(self, items: Sequence[_Item]) -> Iterator[SyncResult]:
        """Copy, and compare: with one question to the node for all of them."""
        sent: list[tuple[_Item, int]] = []
        for item in items:
            try:
                sent.append((item, self._sent(item) if item.answer.lacking else 0))
            except (RefusedError, InvalidInputError, OSError) as error:
                yield item.result("failed", problem=f"{item.answer.root}: {error}")
        answers = self._asked("verify", [(item.source, item.target) for item, _ in sent])
        for (item, count), answer in zip(sent, answers, strict=True):
            if isinstance(answer, str):
                yield item.result("failed", count, answer)
            else:
                yield self._checked(item, answer, "copied", count)

    def _sent(self, item: _Item) -> int:
        total, what = item.bytes, item.source.what
        transfer = rsync.Transfer(
            rsync.check(rsync.usable()), self._ssh.options(), rsync.check(item.answer.rsync), item.source.root,
            self._ssh.target.words, item.answer.root, item.answer.lacking, self._options.megabytes_per_second,
        )  # fmt: skip
        return transfer.carry_out(lambda progress: self._report(self._node, what, progress, total))

    def _checked(self, item: _Item, answer: NodeFiles, state: State, sent: int) -> SyncResult:
        """What the node has after all, compared with what is here."""
        if answer.lacking:
            problem = (
                f"{_listed(answer.lacking)} in {answer.root} differs from this machine's file after copying: did it "
                "change meanwhile? Run this again"
            )
            return item.result("failed", sent, problem)
        if answer.extra:
            problem = f"{_listed(answer.extra)} in {answer.root} isn't on this machine: move it away, or copy it here"
            return item.result("failed", sent, problem)
        return item.result(state, sent)

    def _asked(self, verb: str, targets: Sequence[tuple[SourceFiles, Target]]) -> list[NodeFiles | str]:
        """What the node has of each, or what is wrong there."""
        told = self._call(verb, [target.request(source) for source, target in targets])
        return [one.get("problem") or _answer(one) for one in told]

    def _call(self, verb: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What remote.py answers there, for each item. Raises RefusedError with what it said, UnreachableError."""
        if not items:
            return []
        words = ["sh", "-c", _RUN, "sh", self._options.python, verb]
        given = json.dumps(items).encode()
        status, out, err = self._ssh.try_run(words, given=given, seconds=HASH_SECONDS, step="ssh")
        if status and "No module named" in err:
            raise RefusedError(f"its trainctl can't do this: {said(err)}; update it with trainctl cluster add")
        if status:
            raise RefusedError(said(err) or f"exit status {status}")
        try:
            found: list[dict[str, Any]] = json.loads(out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            raise RefusedError(f"unexpected answer: {out[:200]!r}") from None
        return found


def _answer(told: dict[str, Any]) -> NodeFiles:
    return NodeFiles(**{**told, "lacking": tuple(told["lacking"]), "extra": tuple(told["extra"])})


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    return ", ".join(names[:SHOWN_FILES]) + more
