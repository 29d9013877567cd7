"""A rule: a row of data with a cause, what shows it, what it explains, how it is checked and what to do."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trainctl.protocol.analysis.diagnosis.situation import Situation
from trainctl.protocol.messages import FindingSeverity, WhatIf


@dataclass(frozen=True)
class Found:
    """The cause is there."""

    title: str
    evidence: tuple[str, ...]
    node: str = ""  # empty: the whole run
    rank: int | None = None
    what_if: WhatIf | None = None
    severity: FindingSeverity = "warning"
    values: Mapping[str, Any] = field(default_factory=dict)  # for the texts and commands of remedies


@dataclass(frozen=True)
class Clear:
    """The cause isn't there, by these figures."""

    text: str
    node: str = ""  # empty: the whole run


@dataclass(frozen=True)
class Unknown:
    """It can't be judged."""

    text: str  # what is missing
    node: str = ""


Verdict = Found | Clear | Unknown
NO_STEPS: Final = Unknown("enough steps of the present plan")


def _always(_: Situation, __: Found) -> bool:
    return True


@dataclass(frozen=True)
class Rung:
    """One remedy of a ladder. A text or command with a value in braces that isn't known isn't offered."""

    text: str
    command: str = ""  # as typed in a shell
    fits: Callable[[Situation, Found], bool] = _always
    """Return whether it can help here: what is set already isn't offered again."""


@dataclass(frozen=True)
class Rule:
    """One cause."""

    cause: str
    title: str  # of the cause in docs
    sign: str  # what shows it, for docs
    check: Callable[[Situation], Iterable[Verdict]]
    explains: tuple[str, ...] = ()  # later causes on the same node that follow from it
    ladder: tuple[Rung, ...] = ()
