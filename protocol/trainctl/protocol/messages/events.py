"""Events of a run as data: a closed union of kinds, each with fields of its own.

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
    """Shares changed, by a command or because a node left or came."""

    category: ClassVar[Category] = "rank"
    before: dict[str, Count]  # samples by node, in the order of ranks; 0: it took no part
    after: dict[str, Count]  # the same afterwards
    cause: str = ""  # why, if no command asked for it
    node: str = ""  # the node that was drained or admitted
    lost: str = ""  # the rank that was lost: a node, or node:rank
    refused: bool = False  # whether the lost rank failed its probe
    returned: str = ""  # the rank that came back by itself


class MicroBatchChanged(EventData, tag="micro-batch-changed", frozen=True):
    """Micro-batches of ranks changed."""

    category: ClassVar[Category] = "rank"
    before: Pairs  # samples, each with the rank's node
    after: Pairs  # the same afterwards
    cause: str = ""  # why, if no command asked for it


class LearningRateChanged(EventData, tag="learning-rate-changed", frozen=True):
    """The learning rate changed, from a step on."""

    before: float  # the rate until that step
    after: float  # the rate from that step on
    schedule: Literal["set", "scale"]  # set: constant from here on; scale: the rest of the schedule is scaled
    was_constant: bool = False  # whether it was constant before
    cause: str = ""  # why, if no person asked for it


class GlobalBatchChanged(EventData, tag="global-batch-changed", frozen=True):
    """The global batch changed."""

    before: Count  # samples per step
    after: Count  # samples per step
    schedule: Literal["set", "scale"]  # set: the learning rate stays; scale: it is scaled by the same factor
    cause: str = ""  # why, if no person asked for it


class LeadChanged(EventData, tag="lead-changed", frozen=True):
    """Another node leads the run."""

    category: ClassVar[Category] = "agent"
    before: str  # the node that led it
    after: str  # the node that leads it from here on
    term: Count = 0  # the new term; 0: not known yet


class RunStateChanged(EventData, tag="run-state-changed", frozen=True):
    """The run pauses, continues, stops, ends or goes back to a checkpoint."""

    before: str  # its state before; empty: not known
    after: str  # its state, or `going back` (to a checkpoint), or `resumed` (from one)
    reason: str = ""  # why, if there is a reason
    step: Count | None = None  # last committed step of a run that has ended


class NodeStateChanged(EventData, tag="node-state-changed", frozen=True):
    """A node that took no part has another reason to be out."""

    category: ClassVar[Category] = "rank"
    node: str  # the node
    before: str  # lost, failed or drained
    after: str  # drained


class PolicyModeChanged(EventData, tag="policy-mode-changed", frozen=True):
    """A policy acts, advises or does nothing from here on."""

    name: str  # the policy
    before: PolicyMode
    after: PolicyMode
    cause: str = ""  # why, if no command asked for it


class PolicyAdvised(EventData, tag="policy-advised", frozen=True):
    """What a policy would do if it were on."""

    name: str  # the policy
    command: str  # the command that would do it, as a person types it
    reason: str  # why, with figures


# ---------------------------------------------------------------- commands


class CommandApplied(EventData, tag="command-applied", frozen=True):
    """A command took effect that has no event of its own kind."""

    category: ClassVar[Category] = "command"
    node: str = ""  # the node it was for; empty: the run
    result: str = ""  # what it did, in a few words


class CommandFailed(EventData, tag="command-failed", frozen=True):
    """A command that was refused, expired or failed; the event's `outcome` says which."""

    category: ClassVar[Category] = "command"
    reason: str  # why, on one line
    field: str = ""  # the argument at fault
    node: str = ""  # the node it was for; empty: the run


class NoteWritten(EventData, tag="note", frozen=True):
    """A line that a person or program wrote."""

    category: ClassVar[Category] = "note"
    text: str  # what it says


# ---------------------------------------------------------------- generations and steps


class GenerationFormed(EventData, tag="generation-formed", frozen=True):
    """Ranks have formed a group that makes steps together."""

    generation: Generation  # the new one
    count: Count  # number of its ranks
    ranks: tuple[Count, ...] = ()  # their numbers; empty: not known, in a record of version 1
    engine: str = "none"  # what sums the gradients: none, gloo or ring
    behind: tuple[str, ...] = ()  # nodes whose ranks received another rank's state
    source: str = ""  # the node that the state came from
    waited_seconds: float | None = None  # since the generation before it was left


class GenerationLeft(EventData, tag="generation-left", frozen=True):
    """A group is given up, and another one will be formed."""

    generation: Generation  # the one given up
    reason: str  # why


class StepSkipped(EventData, tag="step-skipped", frozen=True):
    """A step did not update the parameters."""

    step: Count
    reason: str  # nan or overflow


class StepRetracted(EventData, tag="step-retracted", frozen=True):
    """A step that only lost ranks had made is retracted, and made again."""

    step: Count


class StepsStopped(EventData, tag="steps-stopped", frozen=True):
    """Too few nodes are in reach for the run to make steps, or enough are again."""

    lacking: str  # what is missing; empty: nothing is missing now


class StateShared(EventData, tag="state-shared", frozen=True):
    """All ranks received one rank's parameters."""

    source: str  # the node that they came from
    drift: float  # the largest difference, relative
    rank: str = ""  # the rank with that difference: a node, or node:rank


class ProbePassed(EventData, tag="probe-passed", frozen=True):
    """Two ranks gave the probe's tokens the same log-probabilities."""

    category: ClassVar[Category] = "probe"
    rank: str  # a node, or node and rank
    other: str  # the rank it was compared with
    difference: float  # largest difference of a token's log-probability
    tolerance: float  # largest difference allowed
    tokens: Count  # tokens compared
    seconds: float  # how long it took


class Evaluated(EventData, tag="evaluated", frozen=True):
    """The loss over the held-out samples."""

    category: ClassVar[Category] = "evaluation"
    loss: float  # nats per unit of weight
    seconds: float | None = None  # how long it took; None: not known


class CheckpointWritten(EventData, tag="checkpoint-written", frozen=True):
    """A node has a copy of a step's state on its disk."""

    category: ClassVar[Category] = "checkpoint"
    step: Count  # whose state it is
    size_bytes: Count | None = None  # size of all its files; None: not known
    loop_seconds: float | None = None  # how long training stood still for it


class CheckpointFailed(EventData, tag="checkpoint-failed", frozen=True):
    """A node could not write a copy of a step's state."""

    category: ClassVar[Category] = "checkpoint"
    node: str  # the node
    reason: str  # why


# ---------------------------------------------------------------- ranks, nodes and agents


class RankChanged(EventData, tag="rank-changed", frozen=True):
    """A trainer was restarted, hangs, was given up, or keeps the others waiting."""

    category: ClassVar[Category] = "rank"
    ranks: tuple[str, ...]  # each a node, or node:rank
    state: Literal[
        "restarted", "failed", "hung", "slow", "waited-for", "not-admitted", "ended", "out-of-memory"
    ]  # what became of them
    detail: str  # for a person, on one line


class SharesUnmeasured(EventData, tag="shares-unmeasured", frozen=True):
    """First shares stay even, because some node's rate could not be measured."""

    category: ClassVar[Category] = "rank"
    nodes: tuple[str, ...]  # nodes without a measured rate


class NodeState(EventData, tag="node-state", frozen=True):
    """The state of another node's agent changed, as the lead sees it."""

    category: ClassVar[Category] = "agent"
    node: str  # the node, or node and rank
    state: Literal["silent", "in-touch", "moved", "trainer-back"]  # what became of it
    detail: str = ""  # why it is silent, or its new address


# ---------------------------------------------------------------- alerts and the record


class AlertRaised(EventData, tag="alert-raised", frozen=True):
    """An alert was raised: something needs a person's attention."""

    category: ClassVar[Category] = "alert"
    id: str  # id of the alert
    node: str  # the node it is about; empty: the whole run
    text: str  # what is wrong


class AlertCleared(EventData, tag="alert-cleared", frozen=True):
    """An alert's cause is gone."""

    category: ClassVar[Category] = "alert"
    id: str  # id of the alert
    node: str  # the node it is about; empty: the whole run
    alert: str  # kind of the alert
    seconds: float | None = None  # how long it was open


class AlertFailed(EventData, tag="alert-failed", frozen=True):
    """An alert is still open at the run's end, or a hook could not be called."""

    category: ClassVar[Category] = "alert"
    text: str  # for a person, on one line
    id: str = ""  # id of the alert; empty: a hook failed


class RecordState(EventData, tag="record-state", frozen=True):
    """The run's record can't be written, or can again."""

    category: ClassVar[Category] = "record"
    problem: str  # what is wrong; empty: nothing any more


class Notice(EventData, tag="notice", frozen=True):
    """An event without a kind of its own, also from a record of protocol 1 whose text is not known."""

    text: str  # for a person, on one line
    of: Category = "run"  # the group in which it is shown


AnyEvent = (
    SharesChanged | MicroBatchChanged | LearningRateChanged | GlobalBatchChanged | LeadChanged | RunStateChanged
    | NodeStateChanged | PolicyModeChanged | PolicyAdvised | CommandApplied | CommandFailed | NoteWritten
    | GenerationFormed | GenerationLeft | StepSkipped | StepRetracted | StepsStopped | StateShared | ProbePassed
    | Evaluated | CheckpointWritten | CheckpointFailed | RankChanged | SharesUnmeasured | NodeState | AlertRaised
    | AlertCleared | AlertFailed | RecordState | Notice
)  # fmt: skip
"""The closed union of events."""
Change = (
    SharesChanged | MicroBatchChanged | LearningRateChanged | GlobalBatchChanged | LeadChanged | RunStateChanged
    | NodeStateChanged | PolicyModeChanged
)  # fmt: skip
"""Events that have a state before and one after."""


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
