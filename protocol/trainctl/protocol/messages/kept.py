"""Items of a run's record that followers keep."""

from typing import Any

import msgspec

from trainctl.protocol.messages.base import CommandState, Count, Message, Name, Values
from trainctl.protocol.messages.telemetry import Event, HeldOutPairs, RankStep, Sample, StepCommitted
from trainctl.protocol.messages.trainer import StepPlan


class KeptPlan(Message, tag="kept-plan", frozen=True):
    """A plan that gives the node's own rank no work."""

    plan: StepPlan


class KeptStep(Message, tag="kept-step", frozen=True):
    """A committed step."""

    step: StepCommitted


class KeptPart(Message, tag="kept-part", frozen=True):
    """A rank's part of the preceding committed step."""

    part: RankStep


class KeptEvent(Message, tag="kept-event", frozen=True):
    """An event, with the lead's event number."""

    event: Event


class KeptValue(Message, tag="kept-value", frozen=True):
    """One value of a record's `meta` table."""

    key: Name
    value: str


class KeptEvaluation(Message, tag="kept-evaluation", frozen=True):
    """One pass over the held-out samples."""

    step: Count
    at: float
    loss: float  # mean loss, in nats per unit of weight
    weight: float  # weight that divides the loss
    seconds: float
    values: Values = msgspec.field(default_factory=dict)  # metrics beside the loss, by name


class KeptSample(Message, tag="kept-sample", frozen=True):
    """One answer of the model."""

    sample: Sample  # the answer


class KeptPairs(Message, tag="kept-pairs", frozen=True):
    """Held-out pairs of one evaluation."""

    pairs: HeldOutPairs  # pairs with their rewards


class KeptDrifts(Message, tag="kept-drifts", frozen=True):
    """The distance of each rank's parameters from those that it received in a `sync`."""

    step: Count
    at: float
    ranks: tuple[int, ...]
    drifts: tuple[float, ...]  # relative drift of each rank, in the same order

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.drifts):
            raise ValueError("ranks and drifts differ in length")


class KeptRetraction(Message, tag="kept-retraction", frozen=True):
    """Retracts later steps and events: a different lead recorded them, or only lost ranks had completed them."""

    after_step: Count
    after_event: Count | None = None  # last event that remains; None: all remain


class KeptCommand(Message, tag="kept-command", frozen=True):
    """A command from the lead's journal."""

    id: Name
    digest: str
    verb: Name
    args: dict[str, Any]
    by: str
    run: str | None
    node: str | None
    if_plan: Count | None
    received_at: float
    ttl_seconds: float
    state: CommandState
    step: Count | None = None
    reason: str = ""
    field: str | None = None
    before: str | None = None
    after: str | None = None
    ended_at: float | None = None
    plan_version: Count | None = None
    undoes: str | None = None  # ID of the command, or number of the event, that it undoes


Kept = (
    KeptPlan
    | KeptStep
    | KeptPart
    | KeptEvent
    | KeptValue
    | KeptEvaluation
    | KeptSample
    | KeptPairs
    | KeptDrifts
    | KeptRetraction
    | KeptCommand
)
"""The items of `PeerKeep.items`."""
