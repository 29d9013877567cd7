"""The self-test's report: its checks, as lines for a terminal and as one object for a file. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from trainctl.protocol.machine.check_outcome import CheckOutcome, CheckStatus
from trainctl.tui.selftest.redaction import redacted

FORMAT: Final = 1
"""Version of the file's format."""
_ORDER: Final[tuple[CheckStatus, ...]] = ("ok", "failed", "not here")
_NAME_CELLS: Final = 12


class CheckResult(NamedTuple):
    """One check that was run."""

    name: str
    covers: str
    outcome: CheckOutcome
    seconds: float
    limit_seconds: float


def line(result: CheckResult) -> str:
    """One line for a terminal."""
    said = next(iter(result.outcome.evidence), result.covers)
    return f"{result.outcome.status:<8}  {result.name:<{_NAME_CELLS}}  {result.seconds:6.1f} s  {said}"


def has_failed(results: Sequence[CheckResult]) -> bool:
    """Whether a check failed."""
    return any(result.outcome.status == "failed" for result in results)


def summary(results: Sequence[CheckResult]) -> str:
    """How many checks had each result."""
    counts = Counter(result.outcome.status for result in results)
    return ", ".join(f"{counts[status]} {status}" for status in _ORDER)


def document(
    results: Sequence[CheckResult], facts: dict[str, Any], seconds: float, redact: Callable[[str], str]
) -> dict[str, Any]:
    """The report as one object of JSON. Evidence and figures are redacted. `facts`: of the program and the machine, in
    words that identify no one."""
    counts = Counter(result.outcome.status for result in results)
    checks = [
        {
            "name": result.name, "covers": result.covers, "status": result.outcome.status,
            "seconds": round(result.seconds, 2), "limit_seconds": round(result.limit_seconds, 1),
            "evidence": redacted(result.outcome.evidence, redact), "figures": redacted(result.outcome.figures, redact),
        }
        for result in results
    ]  # fmt: skip
    return {
        "format": FORMAT, **facts, "seconds": round(seconds, 1), "ok": not has_failed(results),
        "counts": {status: counts[status] for status in _ORDER}, "checks": checks,
    }  # fmt: skip
