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
