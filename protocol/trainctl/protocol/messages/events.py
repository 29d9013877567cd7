"""What an event of a run says, as data: a closed union of kinds, each with fields of its own.

`event_prose` makes text of them, for every reader; no program has to read that text back.
"""

from typing import ClassVar, Literal

import msgspec

from trainctl.protocol.config.policies import PolicyMode
from trainctl.protocol.messages.base import Count, Generation

Category = Literal[
    "command", "run", "rank", "checkpoint", "evaluation", "probe", "agent", "alert", "note", "record"
]  # fmt: skip
"""Kinds of events grouped as filters and tables show them."""
Pairs = tuple[tuple[str, Count], ...]
"""A number for each rank, by its node; a node with several ranks has several."""


class EventData(msgspec.Struct, frozen=True, tag_field="kind"):
    """What happened. The event around it says when, to which run, at which step and by whom."""

    category: ClassVar[Category] = "run"


# ---------------------------------------------------------------- what was changed


class SharesChanged(EventData, tag="shares-changed", frozen=True):
    """Samples of the global batch were dealt anew, by a command or because a node left or came."""

    category: ClassVar[Category] = "rank"
    before: dict[str, Count]  # by node, in the order of ranks; 0: it took no part
    after: dict[str, Count]  # the same once it was done
    cause: str = ""  # why, where no command asked for it
    node: str = ""  # the one drained or admitted
    lost: str = ""  # the rank that was lost, as people name it: a node, or node:rank
    refused: bool = False  # whether the lost one failed its probe
    returned: str = ""  # the rank that takes part again by itself


class MicroBatchChanged(EventData, tag="micro-batch-changed", frozen=True):
    """Ranks take a share in pieces of another size."""

    category: ClassVar[Category] = "rank"
    before: Pairs  # by the rank's node
    after: Pairs  # the same once it was done
    cause: str = ""  # why, where no command asked for it


class LearningRateChanged(EventData, tag="learning-rate-changed", frozen=True):
    """The learning rate is another from a step on."""

    before: float  # at the step it was set at
    after: float  # from that step on
    schedule: Literal["set", "scale"]  # constant from here on; or the rest of the schedule scaled by the same factor
    was_constant: bool = False  # whether it was set to stay as it is before
    cause: str = ""  # why, where no person asked for it


class GlobalBatchChanged(EventData, tag="global-batch-changed", frozen=True):
    """A step takes another number of samples."""

    before: Count  # samples
    after: Count  # samples
    schedule: Literal["set", "scale"]  # the learning rate stays as it is; or is scaled by the same factor
    cause: str = ""  # why, where no person asked for it


class LeadChanged(EventData, tag="lead-changed", frozen=True):
    """Another node's agent conducts the run."""

    category: ClassVar[Category] = "agent"
    before: str  # the node that conducted it
    after: str  # the node that conducts it from here on
    term: Count = 0  # 0: not known yet


class RunStateChanged(EventData, tag="run-state-changed", frozen=True):
    """The run pauses, goes on, stops, ends or goes back to a checkpoint."""

    before: str  # empty: not said
    after: str  # a run's state, or "going back" (to a checkpoint) or "resumed" (from one)
    reason: str = ""  # why, if there is more to say
    step: Count | None = None  # the last one committed, of a run that is over


class NodeStateChanged(EventData, tag="node-state-changed", frozen=True):
    """A node that took no part is out for another reason."""

    category: ClassVar[Category] = "rank"
    node: str  # the node
    before: str  # lost, failed or drained
    after: str  # drained


class PolicyModeChanged(EventData, tag="policy-mode-changed", frozen=True):
    """A policy acts, advises or does nothing from here on."""

    name: str  # the policy
    before: PolicyMode
    after: PolicyMode
    cause: str = ""  # why, where no command asked for it


class PolicyAdvised(EventData, tag="policy-advised", frozen=True):
    """What a policy would do if it were on."""

    name: str  # the policy
    command: str  # that would do it, as a person types it
    reason: str  # with the figures it rests on


# ---------------------------------------------------------------- commands


class CommandApplied(EventData, tag="command-applied", frozen=True):
    """A command that changed nothing which has a kind of its own."""

    category: ClassVar[Category] = "command"
    node: str = ""  # that it was for; empty: the run
    result: str = ""  # what it did, in a few words


class CommandFailed(EventData, tag="command-failed", frozen=True):
    """A command that was refused, expired or failed; the event's `outcome` says which."""

    category: ClassVar[Category] = "command"
    reason: str  # why, on one line
    field: str = ""  # the argument at fault
    node: str = ""  # that it was for; empty: the run


class NoteWritten(EventData, tag="note", frozen=True):
    """A line that a person or program wrote."""

    category: ClassVar[Category] = "note"
    text: str  # what it says


# ---------------------------------------------------------------- generations and steps


class GenerationFormed(EventData, tag="generation-formed", frozen=True):
    """Ranks have joined into a group that makes steps together."""

    generation: Generation  # the new one
    count: Count  # of its ranks
    ranks: tuple[Count, ...] = ()  # empty: a record of protocol 1 doesn't say which
    engine: str = "none"  # of its collective: none, gloo or ring
    behind: tuple[str, ...] = ()  # nodes whose ranks were given another's state
    source: str = ""  # the node that had it
    waited_seconds: float | None = None  # since the generation before it was left


class GenerationLeft(EventData, tag="generation-left", frozen=True):
    """A group is given up, and another one will be formed."""

    generation: Generation  # the one given up
    reason: str  # why


class StepSkipped(EventData, tag="step-skipped", frozen=True):
    """A step left the parameters as they were."""

    step: Count
    reason: str  # nan or overflow


class StepRetracted(EventData, tag="step-retracted", frozen=True):
    """Only ranks that are lost had made the step: it is made again."""

    step: Count


class StepsStopped(EventData, tag="steps-stopped", frozen=True):
    """Too few nodes are in reach for the run to make steps, or enough again."""

    lacking: str  # what is missing; empty: nothing any more


class StateShared(EventData, tag="state-shared", frozen=True):
    """All ranks were given one rank's parameters; how far theirs had been from those."""

    source: str  # node
    drift: float  # the largest difference, relative
    rank: str = ""  # where that was, as people name it


class ProbePassed(EventData, tag="probe-passed", frozen=True):
    """Two ranks gave the probe's tokens the same log-probabilities."""

    category: ClassVar[Category] = "probe"
    rank: str  # as people name it: a node, or node and rank
    other: str  # the one it was compared with
    difference: float  # of a token's log-probability, the largest
    tolerance: float  # the most that they may differ by
    tokens: Count  # that were compared
    seconds: float  # that it took


class Evaluated(EventData, tag="evaluated", frozen=True):
    """The loss over the held-out samples."""

    category: ClassVar[Category] = "evaluation"
    loss: float  # nats per unit of weight
    seconds: float | None = None  # that it took; null: not known


class CheckpointWritten(EventData, tag="checkpoint-written", frozen=True):
    """A node has a copy of a step's state on its disk."""

    category: ClassVar[Category] = "checkpoint"
    step: Count  # whose state it is
    size_bytes: Count | None = None  # of all its files; null: not known
    loop_seconds: float | None = None  # for which training stood still


class CheckpointFailed(EventData, tag="checkpoint-failed", frozen=True):
    """A node has no copy of a step's state."""

    category: ClassVar[Category] = "checkpoint"
    node: str  # the node
    reason: str  # why


# ---------------------------------------------------------------- ranks, nodes and agents


class RankChanged(EventData, tag="rank-changed", frozen=True):
    """A trainer was started again, hangs, was given up, or keeps the others waiting."""

    category: ClassVar[Category] = "rank"
    ranks: tuple[str, ...]  # as people name them: a node, or node:rank
    state: Literal[
        "restarted", "failed", "hung", "slow", "waited-for", "not-admitted", "ended", "out-of-memory"
    ]  # what became of them
    detail: str  # for a person, on one line


class SharesUnmeasured(EventData, tag="shares-unmeasured", frozen=True):
    """First shares stay even, for the rate of some node could not be measured."""

    category: ClassVar[Category] = "rank"
    nodes: tuple[str, ...]  # those without a rate


class NodeState(EventData, tag="node-state", frozen=True):
    """What became of another node's agent, as the lead's sees it."""

    category: ClassVar[Category] = "agent"
    node: str  # the node, or node and rank
    state: Literal["silent", "in-touch", "moved", "trainer-back"]  # what became of it
    detail: str = ""  # why it is silent, or its new address


# ---------------------------------------------------------------- alerts and the record


class AlertRaised(EventData, tag="alert-raised", frozen=True):
    """Something wants a person's attention."""

    category: ClassVar[Category] = "alert"
    id: str  # the alert's
    node: str  # empty: the run as a whole
    text: str  # what is wrong


class AlertCleared(EventData, tag="alert-cleared", frozen=True):
    """An alert's cause is gone."""

    category: ClassVar[Category] = "alert"
    id: str  # the alert's
    node: str  # empty: the run as a whole
    alert: str  # its kind
    seconds: float | None = None  # for how long it was open


class AlertFailed(EventData, tag="alert-failed", frozen=True):
    """An alert that goes on after the run's end, or a hook that could not be called."""

    category: ClassVar[Category] = "alert"
    text: str  # for a person, on one line
    id: str = ""  # the alert's; empty: a hook failed


class RecordState(EventData, tag="record-state", frozen=True):
    """The disk refuses the run's record, or takes it again."""

    category: ClassVar[Category] = "record"
    problem: str  # empty: there is none any more


class Notice(EventData, tag="notice", frozen=True):
    """What has no kind of its own; also what a record of protocol 1 tells in words that are not known."""

    text: str  # for a person, on one line
    of: Category = "run"  # the group that it is shown in


AnyEvent = (
    SharesChanged | MicroBatchChanged | LearningRateChanged | GlobalBatchChanged | LeadChanged | RunStateChanged
    | NodeStateChanged | PolicyModeChanged | PolicyAdvised | CommandApplied | CommandFailed | NoteWritten
    | GenerationFormed | GenerationLeft | StepSkipped | StepRetracted | StepsStopped | StateShared | ProbePassed
    | Evaluated | CheckpointWritten | CheckpointFailed | RankChanged | SharesUnmeasured | NodeState | AlertRaised
    | AlertCleared | AlertFailed | RecordState | Notice
)  # fmt: skip
"""The closed union."""
Change = (
    SharesChanged | MicroBatchChanged | LearningRateChanged | GlobalBatchChanged | LeadChanged | RunStateChanged
    | NodeStateChanged | PolicyModeChanged
)  # fmt: skip
"""What has a state before and one after it."""


def nodes_of(data: AnyEvent) -> frozenset[str]:
    """The nodes that an event is about; it is of the whole run where there are none."""
    match data:
        case SharesChanged():
            found = {*data.before, *data.after, data.node, data.lost, data.returned}
        case MicroBatchChanged():
            found = {node for node, _ in (*data.before, *data.after)}
        case LeadChanged():
            found = {data.before, data.after}
        case GenerationFormed():
            found = {*data.behind, data.source}
        case StateShared():
            found = {data.source, data.rank}
        case ProbePassed():
            found = {data.rank, data.other}
        case RankChanged():
            found = {*data.ranks}
        case SharesUnmeasured():
            found = {*data.nodes}
        case (
            NodeStateChanged() | CommandApplied() | CommandFailed() | CheckpointFailed() | NodeState() | AlertRaised()
            | AlertCleared()
        ):  # fmt: skip
            found = {data.node}
        case _:
            found = set()
    return frozenset(map(_node_of, found)) - {""}


def _node_of(rank: str) -> str:
    """Of a rank as people name it: a node, or node:rank."""
    node, _, number = rank.rpartition(":")
    return node if number.isdigit() and node else rank
