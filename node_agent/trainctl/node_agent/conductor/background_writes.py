"""The checkpoint that ranks write in the background: its writers, their progress and its outcome.

A checkpoint plan is done when its writers have copied their state; the checkpoint is complete when each has written and
read back its copy, which may be many steps later. Until then no other one is planned. The durable state holds it, so
that the next conductor can match the writers' messages, which they repeat with their heartbeats.
"""

import dataclasses
from collections.abc import Mapping

import msgspec

from trainctl.node_agent.conductor.deadlines import GAP_SECONDS
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.node_agent.planning.durable import Writing
from trainctl.node_agent.planning.rank_models import write_seconds
from trainctl.protocol.messages import (
    WRITING,
    CheckpointCopy,
    Checkpointed,
    CheckpointInfo,
    CheckpointProgress,
    Report,
    StepPlan,
)
from trainctl.protocol.messages.events import CheckpointCopied, CheckpointFailed, CheckpointWritten, Notice

MIN_STALL_SECONDS, STALL_TIMES = 60.0, 30.0
"""A write counts as failed after this many seconds without progress of a rank that is heard from, or this many times
what a slow disk needs for the whole state if that is longer."""


@dataclasses.dataclass(frozen=True)
class _Mark:
    done_bytes: int
    total_bytes: int
    heard: float
    still_seconds: float = 0.0  # without progress


class BackgroundWrites:
    """At most one at a time. Its outcome ends commands and makes events; the conductor then looks for the next plan."""

    def __init__(self, state: ConductorState) -> None:
        self._state = state
        self._marks: dict[int, _Mark] = {}
        self._said: dict[int, Checkpointed] = {}  # the newest; a rank may be done before others have copied
        self.copies: dict[int, CheckpointCopy] = {}  # those under way, by rank
        self.failing = set[int]()  # ranks whose last write failed; others write first
        if state.durable.owes_checkpoint:  # since another conductor's life
            state.pending.scheduled.add("checkpoint")

    @property
    def now(self) -> Writing | None:
        """Return what is being written."""
        return self._state.durable.writing

    @property
    def ranks(self) -> list[int]:
        """Return the writers that have not said how their write ended."""
        return sorted(self.now.ranks) if self.now is not None else []

    @property
    def owes_checkpoint(self) -> bool:
        """Return whether a scheduled one stays wanted when the group goes back to an earlier step."""
        return self.now is not None or self._state.durable.owes_checkpoint

    @property
    def mark(self) -> object:
        """Changes when a write makes progress."""
        done = tuple((rank, self._marks[rank].done_bytes) for rank in self.ranks if rank in self._marks)
        return (self.now.seq, *done) if self.now is not None else None

    @property
    def expected_seconds(self) -> float:
        """Return how long a slow disk needs; 0 if nothing is being written."""
        return write_seconds(self._state.parameters) if self.now is not None else 0.0

    def doing(self, rank: int) -> str:
        """Return how far a rank's write is, in words, or what its node copies elsewhere; empty if neither."""
        if self.now is None or rank not in self.now.ranks:
            copy = self.copies.get(rank)
            return f"copying the checkpoint of step {copy.step} to {copy.to}" if copy is not None else ""
        mark = self._marks.get(rank)
        part = f", {mark.done_bytes / mark.total_bytes:.0%}" if mark is not None and mark.total_bytes else ""
        return f"{WRITING} of step {self.now.step}{part}"

    def begin(self, plan: StepPlan, reports: Mapping[int, Report]) -> None:
        """All ranks have reported a checkpoint plan: take what is known, and wait for the rest."""
        self._marks.clear()
        copier = plan.writers[0] if self._state.config.checkpoint.copy_to else None
        writing = Writing(plan.generation, plan.seq, plan.step, plan.writers, plan.commands, copier=copier)
        self._state.keep(writing=writing, owes_checkpoint=False)
        for rank in plan.writers:
            written, why = reports[rank].checkpoint, reports[rank].skipped
            if written is not None or why is not None:  # else it has copied its state, and reports the rest later
                self.written(rank, written, why or "")
            elif (said := self._said.get(rank)) is not None and _is_of(said, plan):
                self.written(rank, said.checkpoint, said.problem)
        self._state.persist()

    def on_progress(self, said: CheckpointProgress) -> None:
        """Take how far a rank is. An earlier write, which a fence has made obsolete, is ignored."""
        if self.now is None or said.step != self.now.step:
            return
        before = self._marks.get(said.rank)
        still_seconds = 0.0
        if before is not None and before.done_bytes == said.done_bytes:
            still_seconds = before.still_seconds + min(self._state.now - before.heard, GAP_SECONDS)
        self._marks[said.rank] = _Mark(said.done_bytes, said.total_bytes, self._state.now, still_seconds)

    def on_copy(self, said: CheckpointCopy) -> None:
        """The checkpoint itself is complete, whatever becomes of its copy. Its event is not "good": those of its
        category say that a node has a checkpoint of a step that stands."""
        if said.state == "copying":
            self.copies[said.rank] = said
            return
        self.copies.pop(said.rank, None)
        data = CheckpointCopied(self._state.node(said.rank), said.step, said.to, said.seconds, said.problem)
        self._state.happen(data, "error" if said.problem else "info", said.step, by=self._state.node(said.rank))

    def on_checkpointed(self, said: Checkpointed) -> bool:
        """True if it ends a rank's write; repeated messages, and those of an obsolete write, are ignored."""
        if said.seq is None:
            self._on_unplanned(said)
            return False
        writing = self.now
        self._said[said.rank] = said
        if writing is None or said.rank not in writing.ranks or not _is_of(said, writing):
            return False
        self.written(said.rank, said.checkpoint, said.problem)
        self._state.persist()
        return True

    def written(self, rank: int, info: CheckpointInfo | None, problem: str) -> None:
        """A rank's part has ended; the caller persists it."""
        writing, node = self.now, self._state.node(rank)
        assert writing is not None
        left = tuple(other for other in writing.ranks if other != rank)
        if info is None:
            why = problem or "nothing was written"
            self._state.happen(CheckpointFailed(node, why), "error", writing.step, by=node)
            failed = f"no checkpoint on {node}: {why}"
            self.failing.add(rank)
            self._state.keep(writing=msgspec.structs.replace(writing, ranks=left, failed=failed))
        else:
            self.failing.discard(rank)
            note(self._state, rank, info, first=not writing.written)
            copier = writing.copier if writing.copier != rank else None
            self._state.keep(writing=msgspec.structs.replace(writing, ranks=left, written=True, copier=copier))

    def end(self) -> str:
        """End the commands once no rank is waited for. Gives why a copy is missing, else an empty string. A checkpoint
        that isn't copied elsewhere because its first writer failed or is gone is written again, first by one that
        can."""
        writing = self.now
        if writing is None or writing.ranks:
            return ""
        made = None if writing.failed else CheckpointWritten(writing.step)
        for id in [id for id in writing.commands if id in self._state.durable.carried]:
            self._state.end(id, "failed" if writing.failed else "applied", writing.step, writing.failed, made=made)
        if writing.written and writing.copier is not None:
            self._schedule_again()
        self._state.persist(writing=None)
        return writing.failed

    def look(self) -> bool:
        """Give up ranks that are gone or make no progress; True if there was one. A checkpoint that no rank has
        written is planned again."""
        writing = self.now
        if writing is None or self._state.stage in ("leaving", "over"):
            return False
        ranks, settings = self._state.ranks, self._state.settings
        gone = [rank for rank in writing.ranks if ranks[rank].ended or settings.ranks[rank].out in ("lost", "failed")]
        left = tuple(rank for rank in writing.ranks if rank not in gone)
        if gone and (left or writing.written or writing.failed):
            self._state.persist(writing=msgspec.structs.replace(writing, ranks=left))
        elif gone:
            self._plan_again(writing)
        stuck = [rank for rank in self.ranks if self._state.durable.mode != "stopping" and self._is_stuck(rank)]
        for rank in stuck:
            self.written(rank, None, f"the write made no progress for {self._marks[rank].still_seconds:.0f} s")
            self._state.persist()
        return bool(gone or stuck) or not self.ranks  # the latter: the last conductor was ended before it concluded

    def retract(self) -> None:
        """The last step is undone: a checkpoint of it holds another state than the run will have."""
        step, durable = self._state.progress.step, self._state.durable
        if durable.writing is not None and durable.writing.step > step:
            self._plan_again(durable.writing)
        kept = tuple(at for at in durable.checkpoints if at <= step)
        written = durable.written if durable.written <= step else max(kept, default=0)
        if (kept, written) != (durable.checkpoints, durable.written):
            self._state.persist(checkpoints=kept, written=written)

    def _plan_again(self, writing: Writing) -> None:
        for id in writing.commands:
            if id in self._state.durable.carried:
                self._state.put_back(id)
        self._schedule_again()
        self._state.persist(writing=None)

    def _schedule_again(self) -> None:
        self._state.pending.scheduled.add("checkpoint")
        self._state.keep(owes_checkpoint=True)

    def _is_stuck(self, rank: int) -> bool:
        limit_seconds = max(MIN_STALL_SECONDS, STALL_TIMES * self.expected_seconds)
        return rank in self._marks and self._marks[rank].still_seconds >= limit_seconds

    def _on_unplanned(self, said: Checkpointed) -> None:
        """A signal ended the only rank, which has saved its last step."""
        is_only = said.step == self._state.progress.step and self._state.members == {said.rank}
        if said.checkpoint is not None and is_only and said.step not in self._state.durable.checkpoints:
            note(self._state, said.rank, said.checkpoint, first=True)
            self._state.persist()


def note(state: ConductorState, rank: int, info: CheckpointInfo, *, first: bool) -> None:
    """A rank has written a checkpoint of a step that stands. The newest `keep_last` of all are kept, on whichever node
    they are; beyond these, what the first writer of a step says that its node keeps, and then what the next ones say.
    """
    node, durable = state.node(rank), state.durable
    state.happen(CheckpointWritten(info.step, info.size_bytes, info.loop_seconds), "good", info.step, by=node)
    if info.unpruned:
        text = f"{node} couldn't remove older checkpoints: {info.unpruned}; the next one tries again"
        state.happen(Notice(text, "checkpoint"), "warning", info.step, by=node)
    newest = sorted({*durable.checkpoints, info.step})[-state.config.checkpoint.keep_last :]
    kept = {*newest, *(step for step in info.kept if step in durable.checkpoints)}  # none that was retracted
    if not first:
        kept |= set(durable.checkpoints)
    state.keep(written=info.step, checkpoints=tuple(sorted(kept)))


def _is_of(said: Checkpointed, plan: StepPlan | Writing) -> bool:
    return (said.generation, said.seq) == (plan.generation, plan.seq)
