"""Findings of a watch at one observation, and figures in words."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable

from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertKind


@dataclasses.dataclass(frozen=True)
class Said:
    """Text of an alert: a line on what is wrong and why, and the facts at hand, a line each."""

    text: str
    facts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Finding:
    """One condition at one observation; `say` is asked only if it becomes an alert."""

    kind: AlertKind
    bad: bool
    good: bool
    say: Callable[[], Said]
    node: str = ""
    rank: int | None = None

    @property
    def id(self) -> str:
        """The same for the same condition: kind, node and rank."""
        parts = [self.kind, self.node, "" if self.rank is None else str(self.rank)]
        return ":".join(part for part in parts if part)


def seconds(value: float) -> str:
    """`142 ms`, `3.06 s`."""
    return f"{1000 * value:.0f} ms" if abs(value) < 1 else f"{value:.2f} s"


def gigahertz(mhz: float) -> str:
    return f"{mhz / 1000:.2f}"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def number(value: float) -> str:
    """A loss or a norm in four digits."""
    return f"{value:.4g}"


def arrow(before: str, after: str) -> str:
    """`71→84`, or one of them where they are the same."""
    return after if before == after else f"{before}→{after}"


def limited_by(gpu: m.GpuReading | None) -> str:
    """`limited by heat`: what lowers a device's clock, where it says so."""
    words = [m.CLOCK_LIMITED_BY[limit] for limit in gpu.clock_limits] if gpu is not None else []
    return f"limited by {' and '.join(words)}" if words else ""


def median(values: Iterable[float]) -> float:
    return statistics.median(values)
