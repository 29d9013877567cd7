"""Alerts of slow ranks, with noise: who slows by a tenth is reported, and no other."""

import random
from collections.abc import Callable

import pytest
from tests.tiers import scale

from trainctl.node_agent.alerts.evaluator import Change, Evaluator, Raised
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

SEEDS = scale("slow ranks")
NODES = ("studio", "mbp", "forge")
NOISE = 0.02


def changes(seed: int, steps: int, backward: Callable[[int, int], float], noise: float = NOISE) -> list[Change]:
    """Alerts of three ranks; `backward`: seconds by rank and step, without noise."""
    chance, evaluator, found = random.Random(seed), Evaluator(AlertsTable(), 0.0), list[Change]()
    for step in range(1, steps + 1):
        for rank, node in enumerate(NODES):
            seconds = max(backward(rank, step) * (1 + chance.gauss(0, noise)), 0.01)
            part = m.RankStep(
                run="r", generation=m.Generation(1, 1), step=step, rank=rank, node=node, tokens=1000, samples=8,
                micro_batch=4, replays=0, step_seconds=2.0, phases=m.Phases(backward=seconds),
            )  # fmt: skip
            evaluator.heard(part, 2.0 * step)
        found += evaluator.turned(2.0 * step, 1000.0)
    return found


def test_a_rank_that_slows_by_a_tenth_is_reported_and_no_other() -> None:
    told = [changes(seed, 400, lambda rank, step: 1.1 if rank == 1 and step > 300 else 1.0) for seed in range(SEEDS)]
    right = [
        [change.alert.id for change in found if isinstance(change, Raised)] == ["throughput:mbp:1"] for found in told
    ]
    assert sum(right) >= 0.99 * SEEDS, told
    print(f"reported {sum(right)} of {SEEDS}")


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_noise_alone_raises_nothing(noise: float) -> None:
    assert not changes(1, 100_000 if SEEDS >= 100 else 2_000, lambda rank, step: 1.0, noise)


def test_it_is_cleared_once_the_rank_is_as_fast_as_before() -> None:
    found = changes(2, 700, lambda rank, step: 1.2 if rank == 1 and 300 < step <= 400 else 1.0)
    assert [type(change).__name__ for change in found] == ["Raised", "Cleared"]
