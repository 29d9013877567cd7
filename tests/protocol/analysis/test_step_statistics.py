"""Health metrics of steps: nothing before the window is full, and the same after a restart or a step made again."""

import statistics

import msgspec
import pytest
from tests.protocol.support import planted_curves as planted
from tools.protocol_docs import examples

from trainctl.protocol.analysis.slowdown import STATISTICS_STEPS, StepStatistics

EXAMPLE = examples.EXAMPLES["published by an agent"]["step-committed"]
CURVE = planted.healthy(0, 2 * STATISTICS_STEPS)
STEPS = [
    msgspec.structs.replace(EXAMPLE, step=number, loss=loss, grad_norm=norm, values={"clip_scale": 0.5})
    for number, (loss, norm) in enumerate(CURVE, 1)
]
NAMES = {"loss_std", "loss_trend", "loss_z", "grad_norm_trend", "recent_skipped_steps"}


def test_the_metrics_are_those_of_the_newest_steps() -> None:
    rolling = StepStatistics()
    found = [rolling.joined(step).values for step in STEPS]
    full = STATISTICS_STEPS - 1
    assert [values.keys() & NAMES for values in found[:full]] == [set()] * full
    assert found[full].keys() & NAMES == NAMES - {"loss_z"}
    losses, norms = zip(*CURVE[-STATISTICS_STEPS:], strict=True)
    assert found[-1].keys() == NAMES | {"clip_scale"}
    assert found[-1]["loss_std"] == pytest.approx(statistics.stdev(losses))
    for name, values in (("loss_trend", losses), ("grad_norm_trend", norms)):
        assert found[-1][name] == pytest.approx(statistics.linear_regression(range(len(values)), values).slope)
    before = sorted(loss for loss, _ in CURVE[-STATISTICS_STEPS - 1 : -1])
    middle = statistics.median(before)
    mad = statistics.median(abs(loss - middle) for loss in before)
    assert found[-1]["loss_z"] == pytest.approx((CURVE[-1][0] - middle) / (1.4826 * mad))
    # Skipped steps are counted.
    rolling = StepStatistics()
    rows = [msgspec.structs.replace(step, skipped="nan" if step.step % 40 == 0 else None) for step in STEPS]
    found = [rolling.joined(row).values.get("recent_skipped_steps") for row in rows]
    assert found[STATISTICS_STEPS - 1 : STATISTICS_STEPS + 21] == [2.0] * 20 + [3.0] * 2


def test_a_restart_changes_nothing_and_a_step_made_again_only_lacks_the_oldest_step() -> None:
    whole, again = StepStatistics(), StepStatistics(STEPS[50:150])
    found = [whole.joined(step) for step in STEPS]
    assert [again.joined(step) for step in STEPS[150:]] == found[150:]
    made_again = {name: value for name, value in found[-1].values.items() if name != "loss_z"}
    assert whole.joined(STEPS[-1]).values == made_again  # 99 of the 100 steps before are known
    own = msgspec.structs.replace(STEPS[-1], values={"loss_std": 3.0})
    assert StepStatistics(STEPS[:-1]).joined(own).values["loss_std"] == 3.0, "a program's own value stays"
