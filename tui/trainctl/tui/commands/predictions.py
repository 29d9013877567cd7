"""What a change would make of the step's length and of each node's memory, from what was measured: pure.

Seconds of a pass lie on a line between two micro-batches that were measured. Memory at a micro-batch that was
in use is the peak of its steps. Beyond the largest it grows with the samples of a pass by what that peak has over what
is held after the step; where those don't differ, no more is known than that it grows at most in proportion. Everything
here is a prediction and is called one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.step_model import StepModel
from trainctl.tui.commands.shares import Seat
from trainctl.tui.state.view_state import Tried
from trainctl.tui.text import formatting as f
from trainctl.tui.text.styled_line import clean

_LEAST_GROWTH = 0.02
"""A peak over what is held by less than this part says nothing about samples."""


def rate_at(tried: Tried, rank: int, micro: int) -> float | None:
    """Samples a second of a rank at a micro-batch, measured or between two others that were; None if unknown."""
    known = {size: size / trial.rate for (of, size), trial in tried.items() if of == rank and trial.rate > 0}
    if micro not in known and len(known) < 2:
        return None
    return PassCurve(tuple(known.items())).samples_per_second(micro)


@dataclass(frozen=True)
class Memory:
    """A node's predicted peak, in bytes; `at_most` where it is a bound, and not an estimate."""

    bytes: float
    cap_bytes: float | None
    at_most: bool

    @property
    def over(self) -> bool:
        """Whether it is more than there is."""
        return self.cap_bytes is not None and self.bytes > self.cap_bytes

    def __str__(self) -> str:
        bound = "at most " if self.at_most else ""
        cap = f" of {f.gigabytes(self.cap_bytes)}" if self.cap_bytes is not None else ""
        return f"{bound}{f.gigabytes(self.bytes)}{cap} GB"


def memory_at(seat: Seat, share: int, micro: int) -> Memory | None:
    """The peak with `share` samples in passes of `micro`; None where none was measured."""
    wanted, cap = min(share, micro), seat.memory_cap_bytes
    enough = min((size for size in seat.peaks if size >= wanted), default=None)
    if enough is not None:
        return Memory(seat.peaks[enough], cap, at_most=wanted < enough)
    if not seat.peaks or seat.memory_bytes is None:
        return None
    largest = max(seat.peaks)
    peak, held, times = seat.peaks[largest], seat.memory_bytes, wanted / max(largest, 1)
    samples = peak - held
    if samples < _LEAST_GROWTH * peak:
        return Memory(peak * times, cap, at_most=True)
    return Memory(held + samples * times, cap, at_most=False)


def fits(seats: Sequence[Seat], shares: Sequence[int], micros: Sequence[int]) -> str:
    """`fits`, or whose memory may not suffice and how much that would be; nothing where no cap is known."""
    found = [
        (seat, memory)
        for seat, share, micro in zip(seats, shares, micros, strict=True)
        if (memory := memory_at(seat, share, micro)) is not None and memory.cap_bytes is not None
    ]
    over = [f"{clean(seat.node)} {'may be' if memory.at_most else 'is'} over its memory: {memory}"
            for seat, memory in found if memory.over]  # fmt: skip
    return over[0] if over else "fits" if found else ""


def with_micro(seat: Seat, micro: int, tried: Tried) -> Seat:
    """The seat at another micro-batch: by its curve, else by the micro-batches that it has left; without a model if
    neither is known."""
    if min(seat.share, seat.micro_batch) == min(seat.share, micro):
        return seat
    if seat.model is not None and not seat.model.is_linear:
        return replace(seat, micro_batch=micro)
    rate = rate_at(tried, seat.rank, micro)
    if seat.model is None or rate is None:
        return replace(seat, model=None)
    return replace(seat, model=StepModel.linear(rate, seat.model.floor_seconds))


def seconds_change(now: float | None, then: float | None, arrow: str) -> str:
    """`predicted 3.06 → 2.99 s`; nothing where one of them isn't known."""
    if now is None or then is None:
        return ""
    before, after = f.seconds(now), f.seconds(then)
    same = before.rpartition(" ")[2] == after.rpartition(" ")[2]
    return f"predicted {before.partition(' ')[0] if same else before} {arrow} {after}"
