"""Checks are run in turn, within their limits; one that fails or hangs ends only itself."""

import asyncio
from typing import Any

import pytest

from trainctl.protocol.errors import RefusedError
from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, passed
from trainctl.tui.selftest.check_runner import TOTAL_SECONDS, Check, run_checks
from trainctl.tui.selftest.report import CheckResult


async def good(_: Any) -> CheckOutcome:
    return passed("fine", watts=3.5)


async def lacking(_: Any) -> CheckOutcome:
    return absent("no such device")


async def refused(_: Any) -> CheckOutcome:
    raise RefusedError("the agent\nrefuses")


async def results(*checks: Check, total: float = TOTAL_SECONDS, shared: Any = None, **more: Any) -> list[CheckResult]:
    return [result async for result in run_checks(checks, shared, total, **more)]


async def test_a_failed_check_does_not_stop_the_others() -> None:
    found = await results(Check("a", "", 9, refused), Check("b", "", 9, lacking), Check("c", "", 9, good))
    assert [one.outcome.status for one in found] == ["failed", "not here", "ok"]
    assert found[0].outcome.evidence == ("RefusedError: the agent refuses",)
    assert found[2].outcome.figures == {"watts": 3.5}


async def test_a_check_that_hangs_is_cancelled_and_cleans_up() -> None:
    left = []

    async def hangs(shared: list[str]) -> CheckOutcome:
        try:
            await asyncio.Event().wait()
        finally:
            shared.append("cleaned up")
        return passed()

    found = await results(Check("a", "", 0.1, hangs), Check("b", "", 9, good), shared=left)
    assert left == ["cleaned up"]
    assert [one.outcome.status for one in found] == ["failed", "ok"]
    assert found[0].outcome.evidence[0].startswith("not finished within 0.1 s")


async def test_a_wait_of_its_own_that_times_out_is_not_the_limit() -> None:
    async def waits(_: Any) -> CheckOutcome:
        raise TimeoutError("no answer")

    (found,) = await results(Check("a", "", 9, waits))
    assert found.outcome.evidence == ("a wait took too long: no answer",)


async def test_the_whole_time_is_a_limit_too() -> None:
    now = iter([0.0, 0.0, 250.0, 250.0, 299.0, 301.0, 301.0])
    ran = []

    async def notes(_: Any) -> CheckOutcome:
        ran.append("ran")
        return passed()

    found = await results(*(Check(name, "", 60, notes) for name in "abc"), clock=lambda: next(now))
    assert [one.outcome.status for one in found] == ["ok", "ok", "failed"]
    assert len(ran) == 2
    assert [one.limit_seconds for one in found] == [60.0, 50.0, 0.0]
    assert "--seconds" in found[2].outcome.evidence[0]


async def test_limits_are_in_proportion_to_the_whole_time() -> None:
    (found,) = await results(Check("a", "", 40, good), total=3 * TOTAL_SECONDS)
    assert found.limit_seconds == 120


async def test_a_cancelled_test_ends_at_once() -> None:
    async def cancels(_: Any) -> CheckOutcome:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await results(Check("a", "", 9, cancels), Check("b", "", 9, good))
