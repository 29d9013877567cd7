"""The learning rate over the steps of a run."""

from typing import Literal

import pytest

from trainctl.node_agent.planning.lr_schedule import base_rate
from trainctl.protocol.config.run_tables import OptimizerTable


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_warmup_ratio_is_the_warmup_of_as_many_steps(schedule: Literal["cosine", "linear", "constant"]) -> None:
    by_ratio = OptimizerTable(learning_rate=1.0, schedule=schedule, warmup_ratio=0.07)
    by_steps = OptimizerTable(learning_rate=1.0, schedule=schedule, warmup_steps=7)
    rates = [base_rate(by_ratio, 100, step) for step in range(1, 101)]
    assert rates == [base_rate(by_steps, 100, step) for step in range(1, 101)]
    assert rates[6] == max(rates) == 1.0


def test_the_rate_warms_up_in_a_line_and_decays_to_its_final_fraction_at_the_last_step() -> None:
    """The decay is from a peak of 1 to 0.1: with 3/4, 1/2 and 1/4 of it left, the rate is 0.775, 0.55 and 0.325."""
    table = {"learning_rate": 1.0, "warmup_steps": 10, "final_fraction": 0.1}
    cosine = OptimizerTable(schedule="cosine", **table)
    linear = OptimizerTable(schedule="linear", **table)
    constant = OptimizerTable(schedule="constant", **table)
    for schedule in (cosine, linear, constant):
        assert [base_rate(schedule, 110, step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert [base_rate(linear, 110, step) for step in (35, 60, 85, 110)] == pytest.approx([0.775, 0.55, 0.325, 0.1])
    # The cosine of a third and two thirds of a half turn is 1/2 and -1/2, so 3/4 and 1/4 are left there.
    steps = [10 + 300, 10 + 450, 10 + 600, 10 + 900]
    assert [base_rate(cosine, 910, step) for step in steps] == pytest.approx([0.775, 0.55, 0.325, 0.1])
    assert base_rate(constant, 110, 110) == 1.0
