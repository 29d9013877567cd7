"""A rank whose own loss stays apart from the others' is named; chance alone names nobody."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.node_agent.support import records
from tests.tiers import scale

from trainctl.node_agent.alerts.evaluator import Cleared, Evaluator, Raised
from trainctl.node_agent.alerts.loss_curve import OWN_LOSS_STEPS, OwnLossWatch
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

SEEDS = scale("runs with own losses")
TABLE = AlertsTable(clear_seconds=0.0)
SAMPLE_SPREADS = {
    "normal": lambda chance: chance.gauss(0.0, 0.5),
    "skewed": lambda chance: chance.expovariate(1.0) - 1.0,
    "two values": lambda chance: chance.choice((-0.5, 0.5)),
}


def part(step: int, rank: int, loss: float) -> m.RankStep:
    return msgspec.structs.replace(records.part(step, rank), values={"own_loss": loss})


def steps(chance: random.Random, shares: Sequence[int], spread: str = "normal") -> Iterator[list[float]]:
    """Each rank's mean over its samples, whose losses fall together and differ by chance."""
    for step in itertools.count(1):
        level = 2.0 + 3.0 / step
        yield [level + sum(SAMPLE_SPREADS[spread](chance) for _ in range(share)) / share for share in shares]


@settings(max_examples=SEEDS, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 12), min_size=2, max_size=6),
    st.sampled_from(sorted(SAMPLE_SPREADS)),
)
def test_chance_alone_names_nobody(seed: int, shares: list[int], spread: str) -> None:
    watch = OwnLossWatch(TABLE)
    losses = steps(random.Random(seed), shares, spread)
    for number in range(1, 401):
        for rank, loss in enumerate(next(losses)):
            assert not [finding for finding in watch.part(part(number, rank, loss)) if finding.bad]


@pytest.mark.parametrize(("ranks", "by"), [(4, 0.6), (3, -0.6), (2, 0.9)])
def test_a_rank_that_stays_apart_is_named_with_what_to_look_at_until_it_is_back(ranks: int, by: float) -> None:
    losses = steps(random.Random(7), (8,) * ranks)
    evaluator = Evaluator(TABLE, 0.0)
    told = {}
    for number in range(1, 501):
        for rank, loss in enumerate(next(losses)):
            apart = by if rank == 1 and 100 < number <= 250 else 0.0
            evaluator.heard(part(number, rank, loss + apart), float(number))
        for change in evaluator.turned(float(number), 1000.0 + number):
            told[type(change)] = number, change.alert
    (raised_at, alert), (cleared_at, again) = told[Raised], told[Cleared]
    assert alert.id == again.id == "own-loss:node-1:1" and (alert.node, alert.rank) == ("node-1", 1)
    assert 100 + OWN_LOSS_STEPS / 2 < raised_at < 100 + 2 * OWN_LOSS_STEPS
    assert 250 + OWN_LOSS_STEPS / 2 < cleared_at < 250 + 2 * OWN_LOSS_STEPS
    said = re.fullmatch(r"own loss ([\d.]+), ranks' median ([\d.]+)", alert.text)
    assert said is not None and (float(said[1]) > float(said[2])) == (by > 0)
    assert [fact.split()[0] for fact in alert.facts] == ["differs", "check", "if"]


def test_a_step_that_few_report_and_a_run_that_goes_back_are_no_reason() -> None:
    watch = OwnLossWatch(TABLE)
    found = [watch.part(part(number, 0, 9.0 if number % 2 else 1.0)) for number in range(1, 200)]
    assert not any(found), "one rank has nobody to be compared with"
    for number, rank in itertools.product(range(1, 200), (0, 1)):
        assert not OwnLossWatch(TABLE).part(part(number, rank, float("nan") if rank else 2.0))
    for number, rank in itertools.product(range(100, 100 + OWN_LOSS_STEPS - 1), (0, 1, 2)):
        assert not watch.part(part(number, rank, 2.0 + rank)), "what was before it went back is forgotten"
