"""Observations of watches, the findings that they become, and figures in words."""

import dataclasses
from collections.abc import Callable

from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import KINDS, AlertKind
from trainctl.protocol.messages.diagnosis import Finding, Remedy


@dataclasses.dataclass(frozen=True)
class Said:
    """Text of a finding: a line on what is wrong and why, the facts at hand and what to do, a line each."""

    text: str
    facts: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Observation:
    """One condition at one look; `say` is asked only if it becomes a finding."""

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

    @property
    def finding(self) -> Finding:
        """The condition as a finding."""
        said, severity = self.say(), KINDS[self.kind].severity
        remedies = tuple(map(Remedy, said.remedies))
        return Finding(self.kind, said.text, severity, self.node, self.rank, said.facts, remedies=remedies)


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
