"""The straggler is the rank that the others wait for, by steps that all of them reported."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from tests.node_agent.support.records import part
from tests.node_agent.support.records import step as committed

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.straggler import LOOK_STEPS, StragglerWatch, same_step, straggler_of, waits


def steps(*busy: float, waiting: Sequence[float] = (), count: int = 1) -> dict[int, list[m.RankStep]]:
    """Steps of ranks that are busy for so many seconds, in backward but for a tenth; by default they wait for the
    slowest."""
    idle = waiting or [max(busy) - seconds for seconds in busy]
    return {
        rank: [_part(1 + at, rank, seconds, idle[rank]) for at in range(count)] for rank, seconds in enumerate(busy)
    }


def _part(step: int, rank: int, busy: float, sync: float) -> m.RankStep:
    phases = m.Phases(0.0, 0.1 * busy, 0.9 * busy, sync, 0.0, 0.0)
    return msgspec.structs.replace(part(step, rank), node="abc"[rank], phases=phases)


def test_it_is_named_with_its_phase_and_what_the_others_wait() -> None:
    named = straggler_of(steps(0.3, 0.26, 0.4, count=3))
    assert named is not None and (named.rank, named.node, named.phase) == (2, "c", "backward")
    assert named.waited_seconds == pytest.approx(0.4 - 0.28)
    assert named.excess_seconds == pytest.approx(0.9 * (0.4 - 0.28))
    assert straggler_of(steps(0.3)) is None


def test_a_rank_that_itself_waits_is_no_straggler_and_one_that_is_stays_so_until_it_is_clearly_none() -> None:
    assert straggler_of(steps(1.0, 0.8, 0.8, waiting=(0.3, 0.1, 0.1))) is None
    named = straggler_of(steps(1.0, 1.0, 0.6))
    assert named is not None
    for busy in ((1.0, 1.01, 0.6), (1.01, 1.0, 0.6)):
        again = straggler_of(steps(*busy), named)
        assert again is not None and again.rank == named.rank, "equals don't take turns"
    fading = steps(1.0, 0.93, 0.93)
    assert straggler_of(fading) is None and straggler_of(fading, named) is not None
    assert straggler_of(steps(1.0, 0.98, 0.98), named) is None


def watched(watch: StragglerWatch, first: int, count: int, busy: Mapping[int, float], plan: int = 1) -> list[str]:
    """The straggler's node after each of these steps; empty for none."""
    named = []
    for step in range(first, first + count):
        done = msgspec.structs.replace(committed(step), plan_version=plan)
        for rank, seconds in busy.items():
            watch.add(_part(step, rank, seconds, max(busy.values()) - seconds), done, busy.keys())
        named.append(watch.named.node if watch.named else "")
    return named


def test_a_lead_names_it_after_a_few_steps_of_a_plan_and_tells_it_again_only_if_its_figures_change() -> None:
    watch = StragglerWatch()
    assert watched(watch, 1, LOOK_STEPS, {0: 0.3, 1: 0.5}) == ["", "", "", "b"]
    named = watch.named
    assert watched(watch, 5, 20, {0: 0.3, 1: 0.52})[-1] == "b" and watch.named is named
    watched(watch, 25, 20, {0: 0.3, 1: 0.9})
    assert watch.named is not named and watch.named is not None and watch.named.waited_seconds == pytest.approx(0.6)
    assert watched(watch, 45, 7, {0: 0.3, 1: 0.31}, plan=2) == ["b"] * 3 + [""] * 4


def test_it_waits_for_the_reports_of_all() -> None:
    watch = StragglerWatch()
    for step in range(1, 9):
        watch.add(_part(step, 1, 0.5, 0.0), committed(step), (0, 1))
    assert watch.named is None


def test_a_wait_for_others_is_what_is_over_the_least() -> None:
    parts = {rank: own[-1] for rank, own in steps(0.3, 0.26, 0.4, waiting=(0.11, 0.15, 0.01)).items()}
    assert waits(parts) == pytest.approx({0: 0.1, 1: 0.14, 2: 0.0})
    assert waits({0: parts[0]}) == {0: 0.0}, "nobody to wait for"
    late = parts | {1: msgspec.structs.replace(parts[1], step=7)}
    assert waits(late) == {}, "not known before all have reported"
    views = [m.RankView(rank, "abc"[rank], "run", 0.0, 4, 2) for rank in parts]
    assert same_step(views, parts.values()) == parts and same_step(views, late.values()) == {}
