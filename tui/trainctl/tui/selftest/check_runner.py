"""Runs checks one after another, each with a limit of its own and all within one; a failure ends only its own check."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.check_outcome import CheckOutcome, failed
from trainctl.tui.demo.agents import StartError
from trainctl.tui.selftest.report import CheckResult

TOTAL_SECONDS: Final = 300.0
"""Time for all checks, unless another is asked for; a check's own limit is longer or shorter in proportion."""
_FAILURES: Final = (TrainctlError, StartError, OSError, ValueError, RuntimeError, LookupError)


class Check(NamedTuple):
    """One check. `run` gets what checks share, and may be cancelled: then it must leave nothing behind."""

    name: str
    covers: str
    seconds: float  # its limit
    run: Callable[[Any], Awaitable[CheckOutcome]]


async def run_checks(
    checks: Sequence[Check], shared: Any, total_seconds: float = TOTAL_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[CheckResult]:  # fmt: skip
    """The result of each check as it ends. After `total_seconds`, the rest fail without being run."""
    ends = clock() + total_seconds
    for check in checks:
        begun = clock()
        limit = min(check.seconds * total_seconds / TOTAL_SECONDS, ends - begun)
        outcome = await _limited(check, shared, limit)
        yield CheckResult(check.name, check.covers, outcome, clock() - begun, max(0.0, limit))


async def _limited(check: Check, shared: Any, limit: float) -> CheckOutcome:
    if limit <= 0:
        return failed("not run: the checks before it took all the time; give more with --seconds")
    timeout = asyncio.timeout(limit)
    try:
        async with timeout:
            return await check.run(shared)
    except TimeoutError as error:
        if timeout.expired():
            return failed(f"not finished within {limit:.1f} s; give more time with --seconds")
        return failed(f"a wait took too long: {error}".removesuffix(": "))
    except _FAILURES as error:
        return failed(f"{type(error).__name__}: {' '.join(str(error).split())}")
