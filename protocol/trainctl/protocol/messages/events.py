"""Events of a run as data: a closed union of kinds, each with its own fields.

`event_prose` turns them into text for all readers; no program has to parse that text.
"""

from typing import ClassVar, Literal

import msgspec

from trainctl.protocol.config.policies import PolicyMode
from trainctl.protocol.messages.base import Count, Generation
from trainctl.protocol.messages.trainer import PhaseProfile

Category = Literal[
    "command",
    "run",
    "rank",
    "checkpoint",
    "evaluation",
    "sample",
    "probe",
    "agent",
    "alert",
    "note",
    "record",
    "profile",
]
"""Kinds of events grouped as filters and tables show them."""
Pairs = tuple[tuple[str, Count], ...]
"""A number for each rank, by its node; a node with several ranks has several."""


class EventData(msgspec.Struct, frozen=True, tag_field="kind"):
    """The content of an event. The enclosing Event has the time, the run, the step and the cause."""

    category: ClassVar[Category] = "run"


# ---------------------------------------------------------------- what was changed


class SharesChanged(EventData, tag="shares-changed", frozen=True):
    """Shares changed because of a command, or because a node left or joined."""

    category: ClassVar[Category] = "rank"
    before: dict[str, Count]  # previous samples by node, in rank order; 0: not in the group
    after: dict[str, Count]  # new samples by node, in rank order; 0: not in the group
    cause: str = ""  # reason, unless a command asked for it
    node: str = ""  # node that was drained or admitted
    lost: str = ""  # rank that was lost: a node, or node:rank
    refused: bool = False  # whether the lost rank failed its probe
    returned: str = ""  # rank that rejoined without a command
    micro_before: Pairs = ()  # previous micro-batches of ranks whose own is chosen with the share
    micro_after: Pairs = ()  # new micro-batches of the same ranks


class MicroBatchChanged(EventData, tag="micro-batch-changed", frozen=True):
    """The micro-batches of some ranks changed."""

    category: ClassVar[Category] = "rank"
    before: Pairs  # previous samples per rank, each with the rank's node
    after: Pairs  # new samples per rank, each with the rank's node
    cause: str = ""  # reason, unless a command asked for it


class LearningRateChanged(EventData, tag="learning-rate-changed", frozen=True):
    """The learning rate changed, with effect from a given step."""

    before: float  # rate before that step
    after: float  # rate from that step on
    schedule: Literal["set", "scale"]  # set: constant from now on; scale: scales the rest of the schedule
    was_constant: bool = False  # whether the rate was constant before
    cause: str = ""  # reason, unless a user asked for it


class GlobalBatchChanged(EventData, tag="global-batch-changed", frozen=True):
    """The global batch changed."""

    before: Count  # previous samples per step
    after: Count  # new samples per step
    schedule: Literal["set", "scale"]  # set: keeps the learning rate; scale: scales it by the same factor
    cause: str = ""  # reason, unless a user asked for it


class LeadChanged(EventData, tag="lead-changed", frozen=True):
    """A different node now leads the run."""

    category: ClassVar[Category] = "agent"
    before: str  # node that led the run before
    after: str  # node that leads the run now
    term: Count = 0  # new term; 0: not known yet


class RunStateChanged(EventData, tag="run-state-changed", frozen=True):
    """The run paused, continued, stopped, ended or returned to a checkpoint."""

    before: str  # previous state; empty: unknown
    after: str  # new state, or `going back` (to a checkpoint), or `resumed` (from a checkpoint)
    reason: str = ""  # reason, if there is one
    step: Count | None = None  # last committed step, if the run has ended


class RunBranched(EventData, tag="run-branched", frozen=True):
    """A new run starts from a checkpoint of another one. The new run's record has this event, and the other run's on
    the node that led it."""

    parent: str  # ID of the run that has the checkpoint
    step: Count  # step of the checkpoint
    branch: str  # ID of the new run
    node: str  # node whose copy of the checkpoint it starts from


class SetupChanged(EventData, tag="setup-changed", frozen=True):
    """The run continues a checkpoint on other ranks, another backend, device or precision than made its step."""

    step: Count  # step of the checkpoint
    changes: tuple[str, ...]  # what differs, each in words


class NodeStateChanged(EventData, tag="node-state-changed", frozen=True):
    """The state of a node outside the group changed, for example from lost to drained."""

    category: ClassVar[Category] = "rank"
    node: str  # node name
    before: str  # previous state: lost, failed or drained
    after: str  # new state: drained


class PolicyModeChanged(EventData, tag="policy-mode-changed", frozen=True):
    """A policy's mode changed."""

    name: str  # policy name
    before: PolicyMode
    after: PolicyMode
    cause: str = ""  # reason, unless a command asked for it


class PolicyAdvised(EventData, tag="policy-advised", frozen=True):
    """A policy suggests a command instead of sending it, or reports what no command changes."""

    name: str  # policy name
    command: str  # suggested command, as typed on the command line; empty: none
    reason: str  # reason, with measurements


class PolicyActed(EventData, tag="policy-acted", frozen=True):
    """A policy sends a command whose own event has no place for the reason."""

    name: str  # policy name
    command: str  # command, as typed on the command line
    reason: str  # reason, with measurements


# ---------------------------------------------------------------- commands


class CommandApplied(EventData, tag="command-applied", frozen=True):
    """A command took effect, and no more specific event describes it."""

    category: ClassVar[Category] = "command"
    node: str = ""  # target node; empty: the whole run
    result: str = ""  # short description of the result


class CommandFailed(EventData, tag="command-failed", frozen=True):
    """A command was rejected, expired or failed; the event's `outcome` says which."""

    category: ClassVar[Category] = "command"
    reason: str  # reason, on one line
    field: str = ""  # invalid argument
    node: str = ""  # target node; empty: the whole run


class NoteWritten(EventData, tag="note", frozen=True):
    """A note written by a user or a program."""

    category: ClassVar[Category] = "note"
    text: str  # text of the note


# ---------------------------------------------------------------- generations and steps


class GenerationFormed(EventData, tag="generation-formed", frozen=True):
    """Ranks have formed a group and will train together."""

    generation: Generation  # new generation
    count: Count  # number of ranks
    ranks: tuple[Count, ...] = ()  # rank numbers; empty: unknown
    engine: str = "none"  # engine that sums the gradients: none, gloo or ring
    behind: tuple[str, ...] = ()  # nodes whose ranks received the state
    source: str = ""  # node that sent the state
    waited_seconds: float | None = None  # time since the previous generation ended


class GenerationLeft(EventData, tag="generation-left", frozen=True):
    """A generation ended, and the ranks will form a new one."""

    generation: Generation  # generation that ended
    reason: str  # reason why it ended


class StepSkipped(EventData, tag="step-skipped", frozen=True):
    """A step didn't update the parameters."""

    step: Count
    reason: str  # reason: nan or overflow


class StepRetracted(EventData, tag="step-retracted", frozen=True):
    """A step is retracted and repeated because only lost ranks had completed it."""

    step: Count


class StepsStopped(EventData, tag="steps-stopped", frozen=True):
    """Training stopped because too few nodes are reachable, or continues because enough are."""

    lacking: str  # what is missing; empty: nothing, training continues


class StateShared(EventData, tag="state-shared", frozen=True):
    """All ranks received the parameters of one rank."""

    source: str  # node that sent the parameters
    drift: float  # largest relative difference
    rank: str = ""  # rank with the largest difference: a node, or node:rank


class ProbePassed(EventData, tag="probe-passed", frozen=True):
    """Two ranks computed the same log-probabilities for the probe's tokens."""

    category: ClassVar[Category] = "probe"
    rank: str  # rank: a node, or node:rank
    other: str  # rank that it was compared with
    difference: float  # largest difference in a token's log-probability
    tolerance: float  # largest allowed difference
    tokens: Count  # number of tokens compared
    seconds: float  # duration of the probe


class Evaluated(EventData, tag="evaluated", frozen=True):
    """The loss on the held-out samples was measured."""

    category: ClassVar[Category] = "evaluation"
    loss: float  # mean loss, in nats per unit of weight
    seconds: float | None = None  # duration of the evaluation; None: unknown


class Sampled(EventData, tag="sampled", frozen=True):
    """The model answered prompts."""

    category: ClassVar[Category] = "sample"
    node: str  # node whose rank answered
    prompts: Count  # number of prompts
    tokens: Count  # number of tokens in all answers
    seconds: float  # time that all answers took
    answer: str = ""  # of a command: the answer; of several prompts: each prompt with its answer


class SampleFailed(EventData, tag="sample-failed", frozen=True):
    """The model couldn't answer; training continues."""

    category: ClassVar[Category] = "sample"
    node: str  # node whose rank was asked
    reason: str  # reason for the failure


class CheckpointWritten(EventData, tag="checkpoint-written", frozen=True):
    """A node wrote a checkpoint."""

    category: ClassVar[Category] = "checkpoint"
    step: Count  # step whose state it contains
    size_bytes: Count | None = None  # total size of its files; None: unknown
    loop_seconds: float | None = None  # time that training was stopped for it


class CheckpointFailed(EventData, tag="checkpoint-failed", frozen=True):
    """A node couldn't write a checkpoint."""

    category: ClassVar[Category] = "checkpoint"
    node: str  # node name
    reason: str  # reason for the failure


class CheckpointCopied(EventData, tag="checkpoint-copied", frozen=True):
    """A node copied a checkpoint to another place, or couldn't."""

    category: ClassVar[Category] = "checkpoint"
    node: str  # node name
    step: Count  # step whose state it contains
    to: str  # target: a path, an rsync target or a command
    seconds: float  # time that it took, with all tries
    problem: str = ""  # reason for the failure, on one line; empty: it was copied


class Profiled(EventData, tag="profiled", frozen=True):
    """A rank recorded a profile of some steps; its trace is on its node."""

    category: ClassVar[Category] = "profile"
    node: str  # node of the rank
    rank: Count  # rank number
    first_step: Count  # first profiled step
    last_step: Count  # last profiled step
    file: str  # name of the trace in the run's folder `profiles` on the node
    size_bytes: Count  # size of that file
    digest: str  # SHA-256 digest of that file
    phases: tuple[PhaseProfile, ...]  # phases of the steps, in their order
    loop_seconds: float = 0.0  # time that the training loop was stopped for it
    lacks: str = ""  # what the trace lacks on this device, and why; empty: nothing


class ProfileFailed(EventData, tag="profile-failed", frozen=True):
    """A rank couldn't record a profile; training continues."""

    category: ClassVar[Category] = "profile"
    node: str  # node of the rank
    reason: str  # reason for the failure


# ---------------------------------------------------------------- ranks, nodes and agents


class RankChanged(EventData, tag="rank-changed", frozen=True):
    """A trainer restarted, hung, failed, ended, or kept the other ranks waiting."""

    category: ClassVar[Category] = "rank"
    ranks: tuple[str, ...]  # affected ranks, each a node, or node:rank
    state: Literal[
        "restarted", "failed", "hung", "slow", "waited-for", "not-admitted", "ended", "out-of-memory"
    ]  # what happened to them
    detail: str  # details, on one line


class SharesUnmeasured(EventData, tag="shares-unmeasured", frozen=True):
    """The initial shares stay even because some nodes' rates couldn't be measured."""

    category: ClassVar[Category] = "rank"
    nodes: tuple[str, ...]  # nodes without a measured rate


class NodeState(EventData, tag="node-state", frozen=True):
    """The lead noticed a change in a node's agent, or in its machine."""

    category: ClassVar[Category] = "agent"
    node: str  # node, or node:rank
    state: Literal["silent", "in-touch", "moved", "trainer-back", "slept"]  # new state
    detail: str = ""  # reason for the silence, the new address, or how long the machine slept


# ---------------------------------------------------------------- alerts and the record


class AlertRaised(EventData, tag="alert-raised", frozen=True):
    """An alert was raised: something needs attention."""

    category: ClassVar[Category] = "alert"
    id: str  # alert ID
    node: str  # affected node; empty: the whole run
    text: str  # description of the problem


class AlertCleared(EventData, tag="alert-cleared", frozen=True):
    """An alert cleared because its cause is gone."""

    category: ClassVar[Category] = "alert"
    id: str  # alert ID
    node: str  # affected node; empty: the whole run
    alert: str  # alert kind
    seconds: float | None = None  # time that it was open


class AlertFailed(EventData, tag="alert-failed", frozen=True):
    """An alert was still open when the run ended, or a hook couldn't be called."""

    category: ClassVar[Category] = "alert"
    text: str  # description, on one line
    id: str = ""  # alert ID; empty: a hook failed


class RecordState(EventData, tag="record-state", frozen=True):
    """The run's record became unwritable, or writable again."""

    category: ClassVar[Category] = "record"
    problem: str  # description of the problem; empty: it is solved


class Notice(EventData, tag="notice", frozen=True):
    """An event without a more specific kind, or one that another version recorded, of which only the text is known."""

    text: str  # description, on one line
    of: Category = "run"  # group that shows it


AnyEvent = (
    SharesChanged
    | MicroBatchChanged
    | LearningRateChanged
    | GlobalBatchChanged
    | LeadChanged
    | RunStateChanged
    | RunBranched
    | NodeStateChanged
    | PolicyModeChanged
    | PolicyAdvised
    | PolicyActed
    | CommandApplied
    | CommandFailed
    | NoteWritten
    | GenerationFormed
    | GenerationLeft
    | StepSkipped
    | StepRetracted
    | StepsStopped
    | StateShared
    | ProbePassed
    | Evaluated
    | Sampled
    | SampleFailed
    | CheckpointWritten
    | CheckpointFailed
    | RankChanged
    | SharesUnmeasured
    | NodeState
    | AlertRaised
    | AlertCleared
    | AlertFailed
    | RecordState
    | Notice
    | SetupChanged
    | CheckpointCopied
    | Profiled
    | ProfileFailed
)
"""The closed union of events."""
Change = (
    SharesChanged
    | MicroBatchChanged
    | LearningRateChanged
    | GlobalBatchChanged
    | LeadChanged
    | RunStateChanged
    | NodeStateChanged
    | PolicyModeChanged
)
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
            NodeStateChanged()
            | CommandApplied()
            | CommandFailed()
            | CheckpointFailed()
            | CheckpointCopied()
            | NodeState()
            | AlertRaised()
            | AlertCleared()
            | Sampled()
            | SampleFailed()
            | Profiled()
            | ProfileFailed()
        ):
            found = {data.node}
        case (
            LearningRateChanged()
            | GlobalBatchChanged()
            | RunStateChanged()
            | RunBranched()
            | PolicyModeChanged()
            | PolicyAdvised()
            | PolicyActed()
            | NoteWritten()
            | GenerationLeft()
            | StepSkipped()
            | StepRetracted()
            | StepsStopped()
            | Evaluated()
            | CheckpointWritten()
            | AlertFailed()
            | RecordState()
            | Notice()
            | SetupChanged()
        ):
            found = set()
    return frozenset(map(_node_of, found)) - {""}


def _node_of(rank: str) -> str:
    """Return the node of a rank as people name it: a node, or node:rank."""
    node, _, number = rank.rpartition(":")
    return node if number.isdigit() and node else rank
