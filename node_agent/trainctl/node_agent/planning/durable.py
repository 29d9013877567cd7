"""The conductor's durable state: the settings that plans are made from, the open commands, and terms of leadership."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Literal

import msgspec

from trainctl.node_agent.planning.compatibility import RankSetup, Resumed
from trainctl.protocol.config.policies import PolicyMode
from trainctl.protocol.messages import BranchPoint, Generation
from trainctl.protocol.messages.event_prose import rank_label
from trainctl.protocol.messages.events import AnyEvent
from trainctl.protocol.record.checkpoints import first_of_each

TRACE_STEPS = 200
"""Steps after the last recorded one in which a rank may still write its trace; then its outcome counts as lost."""


class RankSetting(msgspec.Struct, frozen=True):
    """One rank's part in the next plan."""

    node: str
    share: int  # samples of the global batch; 0 while it is out
    micro_batch: int  # samples per forward/backward, as wanted; a smaller share is run in one
    out: Literal["", "drained", "lost", "failed"] = ""  # why it takes no part, empty if it does
    halved_to: int = 0  # what running out of memory has left of micro_batch; 0: none since that was last wanted
    last_share: int = 0  # what it had before the first of those that are lost now was, for its return; 0: an even part
    auto_micro: bool = False  # whether a rebalance chooses micro_batch with the share

    @property
    def micro_in_force(self) -> int:
        """Samples per forward/backward that plans are made with: what is wanted, but for a share that is smaller."""
        return min(self.micro_batch, self.share) if self.share else self.micro_batch


class LrRule(msgspec.Struct, frozen=True):
    """`schedule`: `number` times the run file's curve; `constant`: `number` itself, a learning rate."""

    kind: Literal["schedule", "constant"] = "schedule"
    number: float = 1.0

    def scaled(self, factor: float) -> "LrRule":
        return LrRule(self.kind, self.number * factor)


class Settings(msgspec.Struct, frozen=True, dict=True):
    """All that commands edit; `plan_version` grows with each edit."""

    plan_version: int
    global_batch: int  # G, samples
    ranks: dict[int, RankSetting]  # all of the run's; the shares of the live ones sum to G
    lr: LrRule = LrRule()

    @cached_property
    def live(self) -> Mapping[int, RankSetting]:
        """Return the ranks that take part, in ascending order."""
        return {rank: self.ranks[rank] for rank in sorted(self.ranks) if not self.ranks[rank].out}

    @cached_property
    def shares(self) -> Mapping[int, int]:
        """Samples of the live ranks."""
        return {rank: setting.share for rank, setting in self.live.items()}

    @cached_property
    def micros(self) -> Mapping[int, int]:
        """Samples per forward/backward of the live ranks."""
        return {rank: setting.micro_in_force for rank, setting in self.live.items()}

    def label(self, rank: int) -> str:
        """Return what a person calls the rank: its node, and its number too where the node has several."""
        return rank_label(self.ranks[rank].node, rank, (setting.node for setting in self.ranks.values()))

    def edited(self, **changes: object) -> "Settings":
        return msgspec.structs.replace(self, plan_version=self.plan_version + 1, **changes)


class Carried(msgspec.Struct, frozen=True):
    """A command that a journaled plan carries: it is applied when that step commits."""

    verb: str
    by: str
    step: int
    plan_version: int  # that it made, or that it left alone
    node: str | None = None  # the one it is about
    made: AnyEvent | None = None  # what it changes


class PolicyState(msgspec.Struct, frozen=True):
    """State of one of a run's policies, kept whatever step the run goes back to."""

    mode: PolicyMode | None = None  # as commands left it; None: the run file's
    memory: dict[str, float] = {}  # what the policy itself wants to know the next time
    advised: str = ""  # plan version, verb and node of the newest command that it advised, so that it does so once
    sent: tuple[str, ...] = ()  # ids of its commands that have not ended
    reason: str = ""  # why it sent them
    failures: int = 0  # of its commands, those in a row that failed
    actions: int = 0  # commands that it has sent
    pending: dict[str, float] = {}  # into `memory` once what it has sent is applied


class Rollback(msgspec.Struct, frozen=True):
    """An accepted rollback: the run continues from there."""

    step: int  # of the checkpoint
    skip_batches: int = 0  # global batches whose data the run doesn't train on


class Skipped(msgspec.Struct, frozen=True):
    """Positions that the run doesn't train on, by a command."""

    step: int  # the last one before them
    start: int
    count: int


class Profiling(msgspec.Struct, frozen=True):
    """A profile of one rank that is recorded, or whose trace is written."""

    seq: int  # of its plan
    command: str | None = None
    last_step: int = 0  # the last one to be recorded


class Writing(msgspec.Struct, frozen=True):
    """A checkpoint that ranks write in the background."""

    generation: Generation  # of its plan
    seq: int  # of its plan
    step: int
    ranks: tuple[int, ...]  # writers that have not said how it ended
    commands: tuple[str, ...] = ()  # ids of the commands that it answers
    written: bool = False  # a rank has completed it
    failed: str = ""  # why a rank's copy is missing
    copier: int | None = None  # writer that copies it elsewhere and has not written it; None: none


class Gap(msgspec.Struct, frozen=True):
    """Steps that the record has lost, up to the checkpoint that the run continued from."""

    step: int  # of the checkpoint
    cursor: int  # the first position after it


class Durable(msgspec.Struct, frozen=True):
    """Kept in the run's record beside the plans, so that a conductor can continue from it."""

    settings: Settings
    generation: Generation
    seq: int  # of the last plan journaled
    mode: Literal["running", "paused", "stopping"] = "running"
    divisor: float = 1.0  # D of the plans
    carried: dict[str, Carried] = {}  # by command id
    paused_ids: tuple[str, ...] = ()  # commands applied while paused, for the plan that resumes
    stop_writes_checkpoint: bool = True
    eval_loss: float | None = None
    eval_step: int | None = None
    eval_values: dict[str, float] = {}  # metrics beside the loss, by name
    members: tuple[int, ...] = ()  # ranks of the newest generation that was formed; none before the first
    probed: tuple[int, ...] | None = None  # members whose model was compared; None: by a version without probes
    timed: bool = False  # the first shares have been measured
    retracted: int = 0  # up to this step what was planned is made again just so: lost ranks had made it, or may have
    written: int = 0  # step of the newest checkpoint; 0: there is none to go back to
    policies: dict[str, PolicyState] = {}  # by name; none of a policy that stands as it began
    checkpoints: tuple[int, ...] = ()  # steps of those that are kept, ascending
    writing: Writing | None = None  # the checkpoint that is being written in the background
    owes_checkpoint: bool = False  # the last one is to be written again: its writers, copier or step were lost
    rollback: Rollback | None = None  # until the run has gone back
    skipped: tuple[Skipped, ...] = ()  # by step
    went_back: Generation | None = None  # plans up to this generation are from before the run last went back
    changed_at: int | None = None  # step of the newest command of a policy that changed the plan
    branch: BranchPoint | None = None  # None: the run started at step 0
    setups: dict[int, RankSetup] = {}  # by rank, as it was when it last joined a generation
    profiling: dict[int, Profiling] = {}  # by rank, of profiles whose trace is not written yet
    resumed: Resumed | None = None  # until a generation has formed after the run was resumed
    gap: Gap | None = None  # the newest of the record's losses
    departed: tuple[int, ...] = ()  # lost ranks whose nodes shut down, until those are back

    def is_profiled(self, step: int, rank: int | None = None) -> bool:
        """Return whether a profile of the rank slows a step; of any rank if it is None."""
        profiles = self.profiling.values() if rank is None else filter(None, [self.profiling.get(rank)])
        return any(step <= profile.last_step + TRACE_STEPS for profile in profiles)

    @property
    def first_step(self) -> int:
        """The step that the run started from."""
        return self.branch.step if self.branch is not None else 0

    def kept_for_sure(self, keep_last: int, keep_every: int, *, planned: bool = False) -> tuple[int, ...]:
        """Steps of the checkpoints that a run can go back to, ascending: not of those that the one which is being
        written, or is `planned`, may put an end to. `keep_every` 0: none is kept for that."""
        kept = self.checkpoints
        if self.writing is None and not planned:
            return kept
        newest = kept[-(keep_last - 1) :] if keep_last > 1 else ()
        return tuple(sorted({*newest, *first_of_each(kept, keep_every)}))


def next_term(above: int, node: str, others: Collection[str]) -> int:
    """Return the lowest term above one that is `node`'s to claim.

    Each node of the cluster has every n-th one for itself, as with the ballots of Paxos (Lamport, The Part-Time
    Parliament, 1998): no two can lead in one term, not even where they were parted and an operator's word stood for a
    majority, if all have the same cluster file.
    """
    names = sorted({node, *others})
    return above + 1 + (names.index(node) - above - 1) % len(names)
