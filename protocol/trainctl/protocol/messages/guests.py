"""What a program that trains a run by itself says of it: its ranks, and the steps that it has made."""

from typing import Annotated

import msgspec
from msgspec import Meta

from trainctl.protocol.messages.base import MAX_COUNT, Count, Values
from trainctl.protocol.messages.trainer import Phases

MOST_GUEST_RANKS = 256
"""Most ranks of one such run."""


class GuestRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of such a run."""

    rank: Count
    node: Annotated[str, Meta(max_length=64)] = ""  # where it runs; empty: the agent's node
    micro_batch: Count | None = None
    backend: Annotated[str, Meta(max_length=64)] | None = None
    device: Annotated[str, Meta(max_length=64)] | None = None
    pid: Count | None = None


class GuestPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of a step."""

    rank: Count
    tokens: Annotated[float, Meta(ge=0)] = 0.0  # processed: with those that have no loss, without padding
    weight: Annotated[float, Meta(ge=0)] | None = None  # of its samples
    samples: Count = 0
    micro_batch: Count | None = None
    step_seconds: Annotated[float, Meta(ge=0)] = 0.0
    phases: Phases = Phases()
    values: Values = msgspec.field(default_factory=dict)  # metrics by name


class GuestStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step that is done; what the program does not know of it is None. Losses and metrics may be NaN."""

    step: Annotated[int, Meta(ge=1, le=MAX_COUNT)]
    committed_at: float  # Unix seconds
    step_seconds: Annotated[float, Meta(ge=0)]  # since the step before, pauses excluded
    samples: Count = 0
    tokens: Count | None = None  # processed by all ranks
    weight: Annotated[float, Meta(ge=0)] | None = None  # what the loss is divided by, in the run's `weight_unit`
    loss: float | None = None  # mean per unit of weight
    learning_rate: float | None = None
    grad_norm: float | None = None  # before clipping
    global_batch: Count | None = None
    values: Values = msgspec.field(default_factory=dict)  # metrics of the run by name
    parts: Annotated[tuple[GuestPart, ...], Meta(max_length=MOST_GUEST_RANKS)] = ()
