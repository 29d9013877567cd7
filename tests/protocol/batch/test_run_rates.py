"""How fast a run is, and what isn't known of one that says little."""

from typing import Any

import msgspec
import pytest
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.batch.cost import run_rates

SHOWN = examples.EXAMPLES["published by an agent"]
VIEW, STEP = SHOWN["run-view"], SHOWN["step-committed"]
RUN = msgspec.structs.replace(VIEW, step=40, steps=100, global_batch=24, samples=720, cursor=960)
LAST = msgspec.structs.replace(
    STEP, step=40, step_seconds=0.5, samples=24, tokens_total=96_000.0, weight_total=60_000.0, seconds_total=24.0
)


def rates(view: dict[str, Any] | None = None, last: dict[str, Any] | None = None, **other: Any) -> m.RunRates:
    return run_rates(msgspec.structs.replace(RUN, **view or {}), msgspec.structs.replace(LAST, **last or {}), **other)


def known(found: m.RunRates) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(found).items() if value is not None}


def test_all_of_it() -> None:
    assert rates() == m.RunRates(
        unit="tokens/s", average_per_second=4000.0, steps_per_second=2.0, samples_per_second=48.0,
        seconds_per_sample=0.5 / 24, seconds_per_epoch=pytest.approx(15.0), epochs_left=2.0, seconds_left=30.0,
    )  # fmt: skip


def test_what_a_step_takes_lately_counts_and_the_last_step_is_where_the_run_is() -> None:
    found = rates({"step": 3}, step_seconds=2.0)
    assert (found.steps_per_second, found.seconds_left, found.average_per_second) == (0.5, 120.0, 4000.0)
    past_the_last = rates({"steps": 30})
    assert (past_the_last.epochs_left, past_the_last.seconds_left) == (0.0, 0.0)
    assert rates({"global_batch": None}, {"samples": 12}).samples_per_second == 24.0, "those of the last step"


def test_the_lead_s_own_estimate_counts_while_the_run_is_under_way() -> None:
    values = {"time_left_seconds": 40.0, "time_left_best_seconds": 35.0, "time_left_worst_seconds": 50.0}
    found = rates(last={"values": values})
    assert (found.seconds_left_best, found.seconds_left, found.seconds_left_worst) == (35.0, 40.0, 50.0)
    for state in ("paused", "stopped", "finished"):
        ended = rates({"state": state}, {"values": values})
        assert (ended.seconds_left_best, ended.seconds_left, ended.seconds_left_worst) == (None, None, None)
    # Pairs are averaged where the loss is divided by pairs.
    found = rates({"weight_unit": "pairs", "loss_unit": "nats per pair"})
    assert (found.unit, found.average_per_second) == ("pairs/s", 2500.0)


def test_what_is_unknown_or_no_time_gives_no_rate() -> None:
    for samples in (None, 0):
        found = rates({"samples": samples})
        assert (found.seconds_per_epoch, found.epochs_left) == (None, None)
        assert (found.seconds_left, found.samples_per_second) == (30.0, 48.0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        found = known(rates(last={"step_seconds": seconds, "seconds_total": 0.0}))
        assert found == {"unit": "tokens/s", "epochs_left": 2.0}
    before_the_first_step = known(run_rates(msgspec.structs.replace(RUN, step=0), None))
    assert before_the_first_step == {"unit": "tokens/s", "epochs_left": pytest.approx(100 / 30)}


def test_of_a_run_that_says_little() -> None:
    view = {"kind": "guest", "steps": None, "global_batch": None, "samples": None, "cursor": None}
    found = rates(view, {"weight": None, "tokens": None, "weight_total": None, "seconds_total": None})
    speed = {"steps_per_second": 2.0, "samples_per_second": 48.0, "seconds_per_sample": 0.5 / 24}
    assert known(found) == {"unit": "tokens/s"} | speed
    none = rates(view, {"samples": 0})
    assert (none.samples_per_second, none.seconds_per_sample) == (0.0, None)
