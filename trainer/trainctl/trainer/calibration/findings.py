"""What a calibration has measured so far: it moves from one measuring process to the next, as JSON."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.calibration.profile import DataRate, DiskRate, GridPoint, MatmulRate, Pass

Part = Literal["data", "passes", "grid", "forward", "matmul", "memory", "disk"]
PARTS: tuple[Part, ...] = ("data", "passes", "grid", "forward", "matmul", "memory", "disk")
"""In the order in which they are measured. Only `passes` must succeed."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Plain values; None or empty where a part isn't measured yet, or couldn't be."""

    done: tuple[Part, ...] = ()  # not to be measured again, whether they succeeded or not
    backend: str = ""
    device: str = ""
    memory_cap_bytes: int | None = None
    passes: tuple[Pass, ...] = ()  # by micro-batch, ascending
    out_of_memory_micro: int | None = None
    grid: tuple[GridPoint, ...] = ()
    optimizer_seconds: float | None = None
    forward: tuple[Pass, ...] = ()  # forward passes only, by micro-batch, ascending
    matmul: tuple[MatmulRate, ...] = ()
    memory_bytes_per_second: float | None = None
    disk: DiskRate | None = None
    data: DataRate | None = None

    def with_pass(self, one: Pass) -> "Findings":
        """With one more micro-batch, or another measurement of one."""
        others = [other for other in self.passes if other.micro != one.micro]
        passes = tuple(sorted([*others, one], key=lambda found: found.micro))
        return msgspec.structs.replace(self, passes=passes)

    def without_memory_for(self, micro: int) -> "Findings":
        """After a micro-batch ran out of memory: it and larger ones don't count, whatever was measured before."""
        least = micro if self.out_of_memory_micro is None else min(micro, self.out_of_memory_micro)
        passes = tuple(one for one in self.passes if one.micro < least)
        grid = tuple(point for point in self.grid if point.micro < least)
        return msgspec.structs.replace(self, passes=passes, grid=grid, out_of_memory_micro=least)

    def with_done(self, part: Part) -> "Findings":
        """A part is over."""
        return msgspec.structs.replace(self, done=(*self.done, part))


class Trying(msgspec.Struct, frozen=True, tag_field="type", tag="trying"):
    """What is measured next: if the process ends without another line, this is what ended it."""

    part: Part | None = None  # None: the model and data are loaded
    micro: Annotated[int, Meta(ge=1)] | None = None  # micro-batch whose memory may not suffice


class Said(msgspec.Struct, frozen=True, tag_field="type", tag="said"):
    """A line for people."""

    text: str


class Found(msgspec.Struct, frozen=True, tag_field="type", tag="found"):
    """All findings so far."""

    findings: Findings


class OutOfMemory(msgspec.Struct, frozen=True, tag_field="type", tag="out-of-memory"):
    """The library raised an error; the process ends, so that the next one measures with memory as at the start."""

    micro: int


class Waits(msgspec.Struct, frozen=True, tag_field="type", tag="waits"):
    """It is ready for a stage, which other calibrations of the machine aren't; repeated as a sign of life."""

    stage: int


Line = Trying | Said | Found | OutOfMemory | Waits
