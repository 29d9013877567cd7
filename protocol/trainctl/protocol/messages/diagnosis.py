"""Findings: causes with their evidence, what each costs, what to do, and what happens about one by its mode."""

from typing import Literal

import msgspec

from trainctl.protocol.messages.base import Count

FindingSeverity = Literal["info", "warning", "error"]
"""error: the run makes no progress, or trains wrongly; warning: it loses time; info: it could be faster."""
Mode = Literal["off", "alert", "advise", "on"]
"""Mode of what makes findings. Alerts have off and alert, policies off, advise and on; a diagnosis only shows."""
Reaction = Literal["show", "alert", "advise", "act"]
"""Reaction to a finding: a person who asks sees it, or an alert is raised, or an event names the command that
would help, or that command is sent."""
Checked = Literal["found", "follows", "clear", "unknown"]
"""found: it is a cause; follows: an earlier finding explains it; clear: ruled out; unknown: a reading is missing."""


class WhatIf(msgspec.Struct, frozen=True):
    """Seconds of a step as it is, and without the cause."""

    seconds: float  # of a step now
    without: float  # of a step without the cause
    saying: str = ""  # both as a sentence, with what they are of

    @property
    def saved(self) -> float:
        """Seconds of each step that the cause costs."""
        return max(self.seconds - self.without, 0.0)

    @property
    def part(self) -> float:
        """Part of the step's time that the cause costs, 0 to 1."""
        return self.saved / self.seconds if self.seconds > 0 else 0.0


class Remedy(msgspec.Struct, frozen=True):
    """One thing to do. Those of a finding are ordered: try the first one first."""

    text: str  # what to do, and what it changes
    command: str = ""  # as typed in a shell, such as trainctl send rebalance auto=true; empty: none does it
    verb: str = ""  # the verb of that command, whose key opens its dialog; empty: it is no verb


class Finding(msgspec.Struct, frozen=True):
    """One cause that was found."""

    cause: str  # its id, such as slow-disk
    title: str  # what is wrong, with the node or rank
    severity: FindingSeverity
    node: str = ""  # affected node; empty: the whole run
    rank: Count | None = None  # affected rank; None: the whole node or run
    evidence: tuple[str, ...] = ()  # what shows it, one line each, with figures
    ruled_out: tuple[str, ...] = ()  # other causes that were checked and are not it, one line each, with figures
    what_if: WhatIf | None = None  # None: what it costs isn't known
    remedies: tuple[Remedy, ...] = ()

    def reaction(self, mode: Mode) -> Reaction:
        """Return what happens about it in a mode. Only what has a command can be acted on."""
        match mode:
            case "off":
                return "show"
            case "alert":
                return "alert"
            case "on" if self.remedies and self.remedies[0].verb:
                return "act"
            case "advise" | "on":
                return "advise"


class CheckedCause(msgspec.Struct, frozen=True):
    """One cause that was looked for."""

    cause: str
    result: Checked
    text: str  # figures that rule it out, or the reading that is missing


class Diagnosis(msgspec.Struct, frozen=True):
    """All findings, in the order of the rules, and all that was checked."""

    at: float  # Unix seconds of the newest fact
    step: Count  # last committed step
    first_step: Count  # first step of the window that was looked at
    step_seconds: float | None  # median seconds of a step in that window; None: no steps
    findings: tuple[Finding, ...] = ()
    checked: tuple[CheckedCause, ...] = ()
