"""Data from a program that trains its own run: its ranks and its steps."""

from typing import Annotated

import msgspec
from msgspec import Meta

from trainctl.protocol.messages.base import MAX_COUNT, Count, Values
from trainctl.protocol.messages.trainer import Phases

MOST_GUEST_RANKS = 64
"""Maximum number of ranks in one attached run. A step with all their metrics must fit into one request."""


class GuestRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of an attached run."""

    rank: Count
    node: Annotated[str, Meta(max_length=64)] = ""  # node of the rank; empty: the agent's node
    micro_batch: Count | None = None
    backend: Annotated[str, Meta(max_length=64)] | None = None
    device: Annotated[str, Meta(max_length=64)] | None = None
    pid: Count | None = None


class GuestPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of a step of an attached run."""

    rank: Count
    tokens: Annotated[float, Meta(ge=0)] = 0.0  # tokens processed, without padding; 0: unknown
    weight: Annotated[float, Meta(ge=0)] | None = None  # total weight of its samples
    samples: Count = 0  # number of samples that the rank processed; 0: unknown
    micro_batch: Count | None = None
    step_seconds: Annotated[float, Meta(ge=0)] = 0.0
    phases: Phases = Phases()
    values: Values = msgspec.field(default_factory=dict)  # the rank's metrics, by name


class GuestStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of an attached run. Values that the program doesn't know are None. Losses and metrics may be NaN."""

    step: Annotated[int, Meta(ge=1, le=MAX_COUNT)]
    committed_at: float  # commit time, in Unix seconds
    step_seconds: Annotated[float, Meta(ge=0)]  # time since the previous step, excluding pauses
    samples: Count = 0  # samples in the step, across all ranks; 0: unknown
    tokens: Count | None = None  # tokens processed by all ranks
    weight: Annotated[float, Meta(ge=0)] | None = None  # weight that divides the loss, in the run's `weight_unit`
    loss: float | None = None  # mean loss per unit of weight
    learning_rate: float | None = None
    grad_norm: float | None = None  # gradient norm before clipping
    global_batch: Count | None = None
    values: Values = msgspec.field(default_factory=dict)  # metrics of the run, by name
    parts: Annotated[tuple[GuestPart, ...], Meta(max_length=MOST_GUEST_RANKS)] = ()
