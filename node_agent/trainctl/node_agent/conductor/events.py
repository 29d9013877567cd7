"""Events into the conductor and decisions out of it: plain values, no sockets, files or clocks."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import msgspec

from trainctl.node_agent.planning.durable import Durable
from trainctl.protocol import messages
from trainctl.protocol.messages import event_prose, verbs
from trainctl.protocol.messages.events import AnyEvent, Change

# ---------------------------------------------------------------- events in


@dataclasses.dataclass(frozen=True)
class Commanded:
    """A command was journaled; it will end."""

    id: str
    verb: str
    args: verbs.AnyArgs
    by: str
    node: str | None
    if_plan: int | None
    expires: float  # by the conductor's clock
    again: bool = False  # journaled before a restart: what it asked for may have been begun
    reason: str = ""  # why, if a policy sent it


@dataclasses.dataclass(frozen=True)
class RankEnded:
    """A rank's process is gone."""

    rank: int
    clean: bool
    why: str
    memory: str = ""  # what says that it died of lack of memory; empty: nothing does


@dataclasses.dataclass(frozen=True)
class RankSilent:
    """A rank whose process may live has been silent for too long; `why` says what is known of it."""

    rank: int
    why: str
    seconds: float = 0.0  # for how long, as far as it was listened for
    in_touch: bool = True  # whether its node can be asked to end it
    alone: bool = False  # no other rank's node is reachable either


@dataclasses.dataclass(frozen=True)
class RankReturned:
    """A rank that was attached speaks over a new connection: what was under way on the old one may be lost."""

    rank: int


@dataclasses.dataclass(frozen=True)
class Departing:
    """The ranks whose nodes shut down, each with the reason: they leave at the next boundary. No others do."""

    why: Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class NodeReturned:
    """The node of a rank that had left is there again."""

    rank: int


@dataclasses.dataclass(frozen=True)
class Computing:
    """A rank that has not loaded yet computes the reference. If it ends, the others' work is not lost."""

    rank: int


@dataclasses.dataclass(frozen=True)
class Quorum:
    """Reachable nodes are enough for the run to continue if `lacking` is empty; else it says what is missing."""

    lacking: str


@dataclasses.dataclass(frozen=True)
class Ticked:
    """Time has passed."""


Said = (
    messages.Ready
    | messages.Alive
    | messages.Sealed
    | messages.Soon
    | messages.CheckpointProgress
    | messages.Checkpointed
    | messages.CheckpointCopy
    | messages.ProfileWritten
    | messages.Report
    | messages.Fenced
    | messages.Offered
    | messages.Formed
    | messages.GroupFailed
    | messages.TrainerFailed
)
Input = (
    Said | Commanded | RankEnded | RankSilent | RankReturned | Departing | NodeReturned | Computing | Quorum | Ticked
)

# ---------------------------------------------------------------- decisions out; what each step has is a struct, which
# takes less time to make than a dataclass


def caused(change: Change, why: str) -> Change:
    """A change with the reason that no person's command gives; those without a place for one stay as they are."""
    has_place = why and "cause" in type(change).__struct_fields__
    return msgspec.structs.replace(change, cause=why) if has_place else change


@dataclasses.dataclass(frozen=True)
class Tell:
    """Send to one rank."""

    rank: int
    message: messages.Offer | messages.Form | messages.Fence | messages.Leave


@dataclasses.dataclass(frozen=True)
class Start:
    """Have a rank's node start its trainer again."""

    rank: int


@dataclasses.dataclass(frozen=True)
class Kill:
    """End a rank's process at once, if its node can be reached: it hangs."""

    rank: int


class Issue(msgspec.Struct, frozen=True):
    """Journal the durable state, then the plan, then send the plan to its ranks (unless `held`).

    Killed between the two, the settings are of a step that has no plan yet: its plan is made again from them.
    """

    plan: messages.StepPlan
    durable: Durable
    held: bool = False


class Persist(msgspec.Struct, frozen=True):
    """Journal the durable state."""

    durable: Durable


class Commit(msgspec.Struct, frozen=True):
    """A step is committed; `first` is the part of the rank that reported it first."""

    step: messages.StepCommitted
    first: messages.RankStep


@dataclasses.dataclass(frozen=True)
class Retract:
    """The newest step was committed by lost ranks alone: it is undone in the record, and will be made again."""

    step: int


class RankDone(msgspec.Struct, frozen=True):
    """Another rank's part of a step that is committed; the next step may be by then."""

    part: messages.RankStep
    step: messages.StepCommitted


@dataclasses.dataclass(frozen=True)
class Evaluated:
    step: int
    loss: float
    weight: float
    seconds: float
    values: dict[str, float]  # metrics beside the loss, by name
    pairs: tuple[messages.EvaluatedPair, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sampled:
    """An answer of the model, for the record and for clients."""

    sample: messages.Sample


@dataclasses.dataclass(frozen=True)
class Drifted:
    """Ranks' parameters were this far from those given to all after `step`: largest difference over overall RMS."""

    step: int
    by_rank: dict[int, float]


CommandOutcome = Literal["applied", "rejected", "expired", "failed"]


@dataclasses.dataclass(frozen=True)
class CommandEnded:
    """A command's outcome, final."""

    id: str
    state: CommandOutcome
    step: int | None = None
    reason: str = ""
    field: str | None = None
    made: AnyEvent | None = None  # what it changed or did, if it was applied
    plan_version: int | None = None

    @property
    def before(self) -> str | None:
        """Return what it found, in words."""
        return event_prose.result(self.made)[0] if self.made is not None else None

    @property
    def after(self) -> str | None:
        """Return what it left, in words."""
        return event_prose.result(self.made)[1] if self.made is not None else None


@dataclasses.dataclass(frozen=True)
class Happened:
    """Something for the run's events."""

    data: AnyEvent
    severity: messages.Severity
    by: str
    step: int | None  # None: it is of none, such as a command that was refused
    verb: str | None = None
    command: str | None = None
    outcome: messages.CommandState | None = None
    undoes: str | None = None


@dataclasses.dataclass(frozen=True)
class Proposed:
    """A policy sends a command: it is journaled and comes back as any other does."""

    id: str
    verb: str
    args: verbs.Args
    by: str
    node: str | None
    if_plan: int | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """The run is over and no rank of it is left."""

    state: Literal["finished", "stopped", "failed"]
    reason: str


ToRanks = Tell | Start | Kill | Issue
ToRecord = Persist | Commit | Retract | RankDone | Evaluated | Sampled | Drifted | CommandEnded | Happened | Proposed
Decision = ToRanks | ToRecord | Ended
