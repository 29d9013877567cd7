"""Twelve planted causes are named first, and a healthy run has no finding."""

import pytest
from tests.protocol.support import planted_causes as simulated
from tests.tiers import scale

from trainctl.protocol.analysis.diagnosis.diagnose import diagnose

SEEDS = scale("diagnosed runs")
NAMED_FIRST = 0.95
HEALTHY_STEPS = 10_000
MOST_SECONDS = 20
"""Until a cause is named; the screen asks every 3 s."""
LOOK_EVERY_STEPS = 100 if SEEDS == 2 else 10


@pytest.mark.parametrize("cause", simulated.CAUSES)
def test_a_planted_cause_is_named_first(cause: str) -> None:
    first = []
    for seed in range(SEEDS):
        found = diagnose(simulated.planted(cause, seed))
        first.append(found.findings[0].cause if found.findings else "nothing")
    assert first.count(cause) >= NAMED_FIRST * SEEDS, first


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_slow_rank_is_named_soon(seed: int) -> None:
    """Steps of 0.7 to 3 s: not only once 24 of them were slow."""
    made = simulated.cluster(seed)
    simulated.CAUSES["slow-rank"](made)
    began = simulated.STEPS - simulated.PLANTED_STEPS
    kept = simulated.record(made, simulated.STEPS, began)
    named = next(
        step for step in kept.steps[began:]
        if [one.cause for one in diagnose(simulated.facts(made, kept, step.step)).findings] == ["slow-rank"]
    )  # fmt: skip
    assert named.committed_at - kept.steps[began - 1].committed_at <= MOST_SECONDS


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_a_healthy_run_has_no_finding(seed: int) -> None:
    made, kept = simulated.healthy(1000 + seed, HEALTHY_STEPS)
    for last in range(20, HEALTHY_STEPS + 1, LOOK_EVERY_STEPS):
        assert diagnose(simulated.facts(made, kept, last)).findings == (), f"at step {last}"
