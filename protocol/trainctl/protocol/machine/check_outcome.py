"""The result of one check of `trainctl selftest`, as its processes print it."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

CheckStatus = Literal["ok", "failed", "not here"]
_ORDER: Final[tuple[CheckStatus, ...]] = ("failed", "ok", "not here")
"""In which the parts of one check are said."""


class CheckOutcome(msgspec.Struct, frozen=True):
    """What a check found. `not here`: this machine lacks what the check needs."""

    status: CheckStatus
    evidence: tuple[str, ...] = ()  # sentences for people, the most important one first
    figures: dict[str, Any] = {}  # measured values by name, with their unit in the name


def passed(*evidence: str, **figures: Any) -> CheckOutcome:
    """A check that found everything as it must be."""
    return CheckOutcome("ok", evidence, figures)


def failed(*evidence: str, **figures: Any) -> CheckOutcome:
    """A check that found a fault."""
    return CheckOutcome("failed", evidence, figures)


def absent(*evidence: str, **figures: Any) -> CheckOutcome:
    """A check that this machine can't do; the evidence says why."""
    return CheckOutcome("not here", evidence, figures)


def judged(faults: Sequence[str], *evidence: str, **figures: Any) -> CheckOutcome:
    """Failed if there are faults, which come first; else passed."""
    return failed(*faults, *evidence, **figures) if faults else passed(*evidence, **figures)


def combined(outcomes: Sequence[tuple[str, CheckOutcome]]) -> CheckOutcome:
    """The results of several parts, by name, as one: failed if one failed, not here if all are."""
    found = {outcome.status for _, outcome in outcomes}
    status: CheckStatus = "failed" if "failed" in found else "ok" if "ok" in found else "not here"
    order = sorted(outcomes, key=lambda part: _ORDER.index(part[1].status))
    evidence = tuple(
        line if line.startswith(name) else f"{name}: {_missing(outcome, status)}{line}"
        for name, outcome in order
        for line in outcome.evidence
    )
    return CheckOutcome(status, evidence, {name: outcome.figures for name, outcome in outcomes if outcome.figures})


def _missing(part: CheckOutcome, whole: CheckStatus) -> str:
    """What a part that this machine can't do begins with, if others were done."""
    return "not here: " if part.status == "not here" != whole else ""
