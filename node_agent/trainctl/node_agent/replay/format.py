"""The recording format, a real run in one small file: measurements of each step, events, and trainers' logs.

Kept as zlib over msgpack; durations are whole microseconds, which half the size and lose nothing that is shown.
"""

import zlib
from pathlib import Path

import msgspec

from trainctl.protocol.messages import CommandState, Severity
from trainctl.protocol.messages.events import AnyEvent


class Part(msgspec.Struct, array_like=True, frozen=True):
    """One rank's part of a step; durations in microseconds."""

    rank: int
    samples: int
    micro_batch: int
    tokens: int
    step: int
    data: int
    forward: int
    backward: int
    sync: int
    optimizer: int
    wait: int
    memory_bytes: int | None = None


class Step(msgspec.Struct, array_like=True, frozen=True):
    """One committed step."""

    loss: float  # nats per token
    grad_norm: float
    learning_rate: float
    step_us: int  # from the commit before it
    plan_version: int
    parts: tuple[Part, ...]


class RecordedEvent(msgspec.Struct, array_like=True, frozen=True):
    """An event, without its time of day."""

    step: int
    severity: Severity
    by: str
    data: AnyEvent
    verb: str | None = None
    outcome: CommandState | None = None


class RecordedRank(msgspec.Struct, array_like=True, frozen=True):
    """Who a rank was."""

    node: str
    backend: str | None
    device: str | None
    log: str  # the end of what its trainer wrote


class RecordedMachine(msgspec.Struct, array_like=True, frozen=True):
    """One reading of the machine."""

    cpu_percent: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    disk_free_bytes: int | None
    load_1min: float | None


class Recording(msgspec.Struct, frozen=True):
    """All of it. `steps` and what is in them begin with step 1."""

    version: int
    name: str
    engine: str
    mixed: bool
    samples: int | None  # of one epoch
    global_batch: int
    memory_cap_bytes: int | None
    ranks: tuple[RecordedRank, ...]
    steps: tuple[Step, ...]
    evaluations: tuple[tuple[int, float], ...]  # (step, loss)
    events: tuple[RecordedEvent, ...]
    machines: tuple[RecordedMachine, ...]


def shipped() -> Recording:
    """Return the recording that comes with the program."""
    body = (Path(__file__).parent / "eight-ranks.recording").read_bytes()
    return msgspec.msgpack.decode(zlib.decompress(body), type=Recording)
