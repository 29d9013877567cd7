"""Items of a run's record that followers keep."""

from typing import Any

from trainctl.protocol.messages.base import CommandState, Count, Message, Name
from trainctl.protocol.messages.telemetry import Event, RankStep, StepCommitted
from trainctl.protocol.messages.trainer import StepPlan


class KeptPlan(Message, tag="kept-plan", frozen=True):
    """A plan that the node's own rank has no work in."""

    plan: StepPlan


class KeptStep(Message, tag="kept-step", frozen=True):
    """A committed step."""

    step: StepCommitted


class KeptPart(Message, tag="kept-part", frozen=True):
    """A rank's part of a step that was kept before it."""

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
    """By how much each rank's parameters differed from those it was given."""

    step: Count
    at: float
    ranks: tuple[int, ...]
    drifts: tuple[float, ...]  # relative, in parallel


class KeptRetraction(Message, tag="kept-retraction", frozen=True):
    """What comes after a step, and after an event, doesn't stand: others made it, or no one that is left."""

    after_step: Count
    after_event: Count | None = None  # None: all events stand


class KeptCommand(Message, tag="kept-command", frozen=True):
    """A command as the lead has it in its journal."""

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
    undoes: str | None = None  # what it takes back


Kept = (
    KeptPlan | KeptStep | KeptPart | KeptEvent | KeptValue | KeptEvaluation | KeptDrifts | KeptRetraction | KeptCommand
)
"""The items of `PeerKeep.items`."""
