"""The building blocks of all messages: numbers, names, states, generations, and the base of every message."""

from typing import Annotated, Final, Literal, Self

import msgspec
from msgspec import Meta

PROTOCOL_VERSION: Final = 2
"""Increases when a message changes incompatibly; peers with different versions refuse each other.
docs/protocol.md lists what each number added, with its date."""
MAX_COUNT = 2**63 - 1
"""Largest integer that the record can hold."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
MetricName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_.:/-]{0,63}\Z")]
"""Name of a metric; names that a caller chooses begin with `user:`."""
Values = Annotated[dict[MetricName, float], Meta(max_length=128)]
"""Metrics by name; unknown ones are absent."""
RunState = Literal["starting", "running", "pausing", "paused", "stopping", "stopped", "finished", "failed"]
RankState = Literal[
    "starting", "ready", "run", "paused", "late", "hung", "lost", "rejoining", "draining", "drained", "failed", "done"
]
RunKind = Literal["hosted", "guest", "exec"]
CommandState = Literal["accepted", "applied", "rejected", "expired", "failed", "conflict"]
Severity = Literal["info", "good", "warning", "error"]
PlanKind = Literal["train", "evaluate", "checkpoint", "sync", "measure", "probe", "sample", "defragment", "profile"]
Engine = Literal["gloo", "ring"]
WorkKind = Literal["log-probabilities", "answers"]
WorkState = Literal["receiving", "running", "finished", "cancelled", "failed"]
ReferenceName = Annotated[str, Meta(pattern=r"^reference-[0-9a-f]{32}\Z")]
"""Name of the folder that keeps the values in each node's caches."""
WorkId = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{3,63}\Z")]

ACTIVE_RUN_STATES: frozenset[str] = frozenset({"starting", "running", "pausing", "paused", "stopping"})
FINAL_COMMAND_STATES: frozenset[str] = frozenset({"applied", "rejected", "expired", "failed", "conflict"})


class Generation(msgspec.Struct, array_like=True, frozen=True, order=True, kw_only=False):
    """One formation of the group of ranks. Generations are ordered by (term, n)."""

    term: Count  # term; it grows only when the lead changes
    n: Count  # number; it grows with each fence, failed formation and resume

    def next(self) -> "Generation":
        return Generation(self.term, self.n + 1)

    def __str__(self) -> str:
        return f"g{self.term}.{self.n}"


class Range(msgspec.Struct, array_like=True, frozen=True, order=True):
    """Positions from `start` to `start + count - 1`."""

    start: Count
    count: Annotated[int, Meta(ge=1)]

    @property
    def stop(self) -> int:
        return self.start + self.count


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """The base of every message; `v` is the sender's protocol version."""

    v: int = PROTOCOL_VERSION

    def __deepcopy__(self, memo: object) -> Self:
        """Return the message itself: no message is ever changed."""
        return self
