"""Dry runs in words: what a command would do, and what isn't known is said to be so."""

import msgspec
import pytest

from trainctl.protocol.messages import DryRun, RankForecast
from trainctl.tui.commands.forecast import forecast

GB = 1e9


def rank(number: int = 0, share: tuple[int | None, int | None] = (16, 16), micro: tuple[int, int] = (4, 4)):
    return RankForecast(
        rank=number,
        node=f"n{number}",
        share_before=share[0],
        share=share[1],
        micro_before=micro[0],
        micro=micro[1],
    )


def with_memory(used: float, *, is_bound: bool = False) -> RankForecast:
    sizes = {"memory_bytes": used * GB, "memory_is_bound": is_bound, "memory_cap_bytes": 24 * GB}
    return msgspec.structs.replace(rank(micro=(4, 8)), **sizes)


def found(verb: str = "resize-batch", *ranks: RankForecast, **fields: object) -> str:
    return forecast(DryRun(rid="r", run="run", verb=verb, ranks=ranks, **fields))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            found("resize-batch", with_memory(20), step=120, step_seconds_before=3.06, step_seconds=2.99),
            "n0 4×4 → 8×2; predicted 3.06 → 2.99 s; predicted memory 20 of 24 GB; at step 120; curve unchanged",
        ),
        (
            found("rebalance", rank(0, (16, 17)), rank(1, (8, 7)), advising=("rebalance",)),
            "n0 16 → 17, n1 8 → 7; step time isn't known yet; curve unchanged; policy rebalance will only advise",
        ),
        (found("drain", rank(0, (4, None)), rank(1, (4, 8))), "n0 4 → 0, n1 4 → 8; step time isn't known yet"),
        (found("set-lr", before="1e-3", after="5e-4 scaled", step=7), "lr 1e-3 → 5e-4 scaled; at step 7; changes the"),
        (found("set-lr", before="1e-3", after="1e-3"), "lr 1e-3 → 1e-3; changes the curve"),
        (found("resize-batch", before="4", after="4"), "no change: already set; curve unchanged"),
        (found("rollback", after="the run will go back"), "the run will go back; changes the curve"),
        (found(refused="99 is over the share", field="micro"), "micro: 99 is over the share"),
        (found(refused="the run is stopping", field="run"), "the run is stopping"),
    ],
)
def test_a_dry_run_is_said_in_one_line(said: str, expected: str) -> None:
    assert said.startswith(expected)


def test_who_would_not_fit_is_named() -> None:
    assert "n0 is over its memory: 28 of 24 GB" in found("resize-batch", with_memory(28))
    assert "n0 may be over its memory: at most 32 of 24 GB" in found("resize-batch", with_memory(32, is_bound=True))
    assert "; fits; " in found("resize-batch", with_memory(20), with_memory(21))
    assert "fits" not in found("resize-batch", rank(micro=(4, 8)))
