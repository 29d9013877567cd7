"""Items of a run's record that followers keep."""

from typing import Any

from trainctl.protocol.messages.base import CommandState, Count, Message, Name
from trainctl.protocol.messages.telemetry import Event, RankStep, StepCommitted
from trainctl.protocol.messages.trainer import StepPlan


class KeptPlan(Message, tag="kept-plan", frozen=True):
    """A plan without work for the node's own rank."""

    plan: StepPlan


class KeptStep(Message, tag="kept-step", frozen=True):
    """A committed step."""

    step: StepCommitted


class KeptPart(Message, tag="kept-part", frozen=True):
    """A rank's part of the committed step before it."""

    part: RankStep


class KeptEvent(Message, tag="kept-event", frozen=True):
    """An event, under the lead's id."""

    event: Event


class KeptValue(Message, tag="kept-value", frozen=True):
    """One value of a record's `meta` table."""

    key: Name
    value: str


class KeptEvaluation(Message, tag="kept-evaluation", frozen=True):
    """One pass over the held-out samples."""

    step: Count
    at: float
    loss: float  # nats per unit of weight
    weight: float  # what the loss was divided by
    seconds: float


class KeptDrifts(Message, tag="kept-drifts", frozen=True):
    """How far each rank's parameters were from those it received at a `sync`."""

    step: Count
    at: float
    ranks: tuple[int, ...]
    drifts: tuple[float, ...]  # relative, in the order of `ranks`


class KeptRetraction(Message, tag="kept-retraction", frozen=True):
    """Steps after a step, and events after an event, are retracted: another lead or only lost ranks made them."""

    after_step: Count
    after_event: Count | None = None  # the last event that stays; None: all stay


class KeptCommand(Message, tag="kept-command", frozen=True):
    """A command as it is in the lead's journal."""

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
    undoes: str | None = None  # the command, or the number of the event, that it undoes


Kept = (
    KeptPlan | KeptStep | KeptPart | KeptEvent | KeptValue | KeptEvaluation | KeptDrifts | KeptRetraction | KeptCommand
)
"""The items of `PeerKeep.items`."""
