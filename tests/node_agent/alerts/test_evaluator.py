"""The alerts' evaluator: what raises and clears each kind, what it says, and that it never flaps or grows."""

import itertools
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.node_agent.support.alert_world import CALM, NODES, World

from trainctl.node_agent.alerts.evaluator import Cleared, Evaluator, Raised
from trainctl.node_agent.alerts.hooks import BURST, PER_SECONDS, Budget
from trainctl.node_agent.alerts.hysteresis import Hysteresis, Rule
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import KINDS, AlertsTable


def test_a_loss_that_is_no_number_is_told_at_once_and_is_over_after_twenty_that_are() -> None:
    world = World()
    world.step(math.nan, skipped="nan")
    assert world.told == ["raised nonfinite"]
    assert world.text("nonfinite") == "loss is nan at step 1; the step was skipped"
    for _ in range(19):
        world.step()
    assert world.told == ["raised nonfinite"]
    world.step()
    assert world.told == ["raised nonfinite", "cleared nonfinite"]


def test_a_loss_that_is_not_given_raises_nothing_and_those_between_still_do() -> None:
    world = World()
    for number in range(240):
        world.step(None if number % 4 else 2.0 + 0.01 * math.sin(number), grad_norm=None)
    assert world.told == []
    for _ in range(3):
        world.step(None, grad_norm=None)
        world.step(9.0, grad_norm=None)
    assert world.told == ["raised loss-spike"]
    world.step(None, grad_norm=math.nan)
    assert world.told == ["raised loss-spike", "raised nonfinite"]
    assert world.text("nonfinite").startswith("gradient norm is nan") and world.facts("nonfinite")[0].startswith(
        "gradient"
    )


def test_an_overflow_now_and_then_is_nothing_and_three_are_told_of() -> None:
    world = World()
    for _ in range(2):
        world.step(skipped="overflow", grad_norm=math.inf)
        world.step()
    assert world.told == []
    world.step(skipped="overflow", grad_norm=math.inf)
    assert world.told == ["raised skipped"]


@pytest.mark.parametrize("slope", [-0.004, 0.0])
def test_a_spike_that_stays_is_told_of_and_one_that_passes_is_not(slope: float) -> None:
    world = World()

    def usual() -> float:
        return 3.0 + slope * world.step_number + 0.02 * math.sin(7 * world.step_number)

    for _ in range(100):
        world.step(usual())
    world.step(usual() + 2)
    world.step(usual())
    assert world.told == []
    for _ in range(3):
        world.step(usual() + 2)
    assert world.told == ["raised loss-spike"]
    assert ", trend " in world.text("loss-spike")
    for _ in range(15):
        world.step(usual())
    assert world.told == ["raised loss-spike", "cleared loss-spike"]


def test_a_run_that_commits_nothing_stalls_unless_it_is_paused() -> None:
    world = World()
    for _ in range(5):
        world.step(seconds=2.0)
    world.look(59)
    assert world.told == []
    world.rank_states[1], world.whys[1] = "late", "step 6 is taking long"
    world.look(2)
    assert world.told == ["raised stall"]
    assert world.text("stall") == "no step in 60 s since step 5: mbp late"
    world.step()
    world.look(5)
    assert world.told[-1] == "cleared stall"
    paused = World()
    paused.step()
    paused.state = "paused"
    paused.look(1000)
    paused.state, paused.reason = "running", "waiting for data: 8 samples sealed, the next step needs 16"
    paused.look(1000)
    paused.reason = ""
    paused.look(30)
    assert paused.told == []


def test_steps_that_take_long_as_a_rule_and_a_checkpoint_get_their_time() -> None:
    world = World()
    for _ in range(5):
        world.step(seconds=20.0)
    world.look(190)
    assert world.told == []
    world.doing = "checkpoint"
    world.look(300)
    assert world.told == []
    world.look(200)
    assert world.text("stall").endswith("checkpoint in progress; all ranks are responding")


def steps(world: World, count: int, backward: float, **part: Any) -> None:
    for _ in range(count):
        world.step()
        world.part(backward=backward, **part)


def test_a_slower_rank_is_told_with_the_phase_that_grew() -> None:
    world = World()
    steps(world, 60, 0.6)
    steps(world, 40, 0.9)
    assert world.told == ["raised throughput:mbp:1"]
    assert world.text("throughput:mbp:1") == "+300 ms in backward, own rate 1,099→826 tok/s (-25 %)"
    steps(world, 40, 0.6)
    assert world.told[-1] == "cleared throughput:mbp:1"


def test_what_slows_all_ranks_alike_is_told_once_and_of_the_one_that_is_slower_still() -> None:
    """A machine that they share is busy: an alert a rank would say nothing of any of them."""
    world = World()

    def both(count: int, first: float, second: float) -> None:
        for _ in range(count):
            world.step()
            world.part(backward=first)
            world.part(backward=second, rank=0)

    both(60, 0.6, 0.6)
    both(80, 0.9, 0.9)
    assert world.told == ["raised throughput"]
    assert world.text("throughput") == "2 of 2 ranks slowed down together; median own rate -25 %"
    assert world.facts("throughput") == (
        "studio rank 0: own rate 1,099→826 tok/s (-25 %)",
        "mbp rank 1: own rate 1,099→826 tok/s (-25 %)",
    )
    both(40, 1.5, 0.9)
    assert world.told[1:] == ["raised throughput:mbp:1"]
    both(80, 0.6, 0.6)
    assert sorted(world.told[2:]) == ["cleared throughput", "cleared throughput:mbp:1"]


def test_one_slower_rank_of_two_is_not_told_of_both() -> None:
    world = World()
    for count, backward in ((60, 0.6), (80, 1.5)):
        for _ in range(count):
            world.step()
            world.part(backward=backward)
            world.part(backward=0.6, rank=0)
    assert world.told == ["raised throughput:mbp:1"]


def test_another_micro_batch_is_compared_with_nothing_before() -> None:
    world = World()
    steps(world, 60, 0.6)
    steps(world, 60, 0.9, micro=2)
    assert world.told == []


@pytest.mark.parametrize(("share", "grew"), [(4, "500 ms"), (12, "1.50 s"), (16, "2.00 s")])
def test_a_rank_that_slows_just_after_a_rebalance_is_told_by_what_it_was(share: int, grew: str) -> None:
    world = World()
    steps(world, 60, 0.6)
    steps(world, 10, 0.6 * share / 8, share=share)
    steps(world, 60, 1.6 * share / 8, share=share)
    assert world.told == ["raised throughput:mbp:1"]
    assert world.text("throughput:mbp:1") == f"+{grew} in backward, own rate 1,099→524 tok/s (-52 %)"
    steps(world, 60, 0.6 * share / 8, share=share)
    assert world.told[-1] == "cleared throughput:mbp:1"


def test_a_share_that_leaves_a_small_last_pass_or_is_another_by_far_is_no_slower_rank() -> None:
    """A pass of one sample may take as long as one of four."""
    world = World()
    steps(world, 60, 0.6)
    steps(world, 60, 0.9, share=9)
    assert world.told == []
    steps(world, 60, 0.6, share=3)
    assert world.told == []


def test_to_and_fro_between_shares_what_is_compared_with_does_not_fade() -> None:
    world = World()
    steps(world, 60, 0.6)
    for _ in range(10):
        steps(world, 5, 0.9, share=9)
        steps(world, 5, 0.6)
    steps(world, 60, 0.9)
    assert world.told == ["raised throughput:mbp:1"]
    assert world.text("throughput:mbp:1") == "+300 ms in backward, own rate 1,099→826 tok/s (-25 %)"


def test_a_lower_clock_is_told_with_what_it_costs_and_instead_of_the_slower_rank() -> None:
    world = World()
    for _ in range(70):
        world.reading()
        world.step()
        world.part()
    for _ in range(60):
        world.reading(mhz=1380.0, celsius=84.0)
        world.step()
        world.part(backward=0.742)
    assert world.told == ["raised clock:mbp:1"]
    assert world.text("clock:mbp:1") == "+142 ms in backward: 84 °C, 1.62→1.38 GHz"
    for _ in range(40):
        world.reading()
        world.step()
        world.part()
    assert world.told == ["raised clock:mbp:1", "cleared clock:mbp:1"]


def test_a_device_without_work_may_slow_down() -> None:
    world = World()
    for mhz, percent in ((1620.0, 98.0), (300.0, 5.0)):
        for _ in range(90):
            world.reading(mhz=mhz, percent=percent)
    assert world.told == []


@pytest.mark.parametrize(
    ("free", "total", "raised"),
    [(50e9, 4000e9, True), (100e9, 4000e9, False), (4.2e9, 8e9, True), (50e9, None, False)],
)
def test_a_disk_is_nearly_full_by_its_share_or_by_bytes(free: float, total: float | None, raised: bool) -> None:
    world = World()
    for _ in range(4):
        world.reading(free=free, total=total)
    assert world.told == (["raised disk:mbp"] if raised else [])
    if raised and total:
        assert f"({100 * free / total:.1f} % of {total / 1e9:.1f} GB) left" in world.text("disk:mbp")
        for _ in range(40):
            world.reading(free=0.029 * total if total > 1e12 else 5.5e9, total=total)  # between the two edges
        assert world.told == ["raised disk:mbp"]
        for _ in range(40):
            world.reading(free=0.8 * total, total=total)
        assert world.told == ["raised disk:mbp", "cleared disk:mbp"]


def test_the_peak_of_a_step_near_the_cap_is_told_however_little_is_held_after_it() -> None:
    world = World()
    for peak in (60, 95, 95, 95, 95):
        world.step()
        world.part(used=40, peak=peak)
    assert world.told == ["raised memory:mbp:1"]
    assert world.text("memory:mbp:1").startswith("memory 95 % of")
    assert "held after the step" in world.facts("memory:mbp:1")[0]
    for _ in range(40):
        world.step()
        world.part(used=40, peak=60)
    assert world.told == ["raised memory:mbp:1", "cleared memory:mbp:1"]


def test_memory_and_disk_have_two_edges() -> None:
    world = World()
    for used in (93, 93, 93, 93):
        world.step()
        world.part(used=used)
    assert world.text("memory:mbp:1").startswith("memory 93 % of")
    for _ in range(20):
        world.step()
        world.part(used=90)
    assert world.told == ["raised memory:mbp:1"]
    for _ in range(10):
        world.step()
        world.part(used=80)
    for _ in range(5):
        world.reading(free=4.2e9)
    assert world.told == ["raised memory:mbp:1", "cleared memory:mbp:1", "raised disk:mbp"]
    assert world.text("disk:mbp") == "4.2 GB left on the disk that holds its runs"


def test_a_lost_rank_is_told_at_once_and_a_silent_one_after_a_while() -> None:
    world = World()
    world.silent = {"mbp": "no message from tcp://mbp:7474"}
    for _ in range(8):
        world.look(1)
    assert world.told == []
    world.look(3)
    assert world.told == ["raised node-silent:mbp:1"]
    world.rank_states[1], world.whys[1] = "lost", "was ended by signal 9"
    world.look(1)
    assert world.text("node-lost:mbp:1") == "lost: was ended by signal 9"
    world.rank_states[1], world.silent = "rejoining", {}
    world.look(60)
    world.look(6)
    assert world.told[-1] == "cleared node-silent:mbp:1"
    world.rank_states[1] = "run"
    world.look(1)
    world.look(6)
    assert world.told[-1] == "cleared node-lost:mbp:1"
    assert world.evaluator.held == 0


def test_a_drained_node_may_be_silent() -> None:
    world = World()
    world.rank_states[1], world.silent = "drained", {"mbp": "no message from tcp://mbp:7474"}
    for _ in range(20):
        world.look(5)
    assert world.told == []


def test_a_follower_tells_of_its_lead() -> None:
    evaluator = Evaluator(CALM, 0.0)
    assert evaluator.lead_silent("mbp", "studio", 3.0, 1.0, 0.0) == []
    (raised,) = evaluator.lead_silent("mbp", "studio", 11.0, 9.0, 0.0)
    assert raised.alert.id == "lead-silent:mbp"
    assert evaluator.lead_silent("mbp", "studio", 0.1, 10.0, 0.0) == []
    (cleared,) = evaluator.lead_silent("mbp", "studio", 0.1, 15.0, 0.0)
    assert isinstance(cleared, Cleared)


def test_after_a_restart_nothing_is_raised_twice_and_all_of_it_can_end() -> None:
    world = World()
    steps(world, 60, 0.6)
    steps(world, 40, 0.9)
    world.step(math.inf)
    open_alerts = tuple(world.evaluator.open.values())
    again = World(open_alerts=open_alerts, references=world.evaluator.references)
    steps(again, 40, 0.9)
    assert again.told == ["cleared nonfinite"]
    assert again.evaluator.open["throughput:mbp:1"].raised_at == open_alerts[0].raised_at
    steps(again, 40, 0.6)
    assert again.told[-1] == "cleared throughput:mbp:1"


def test_kinds_that_are_off_are_not_watched() -> None:
    world = World(AlertsTable(off=("nonfinite",)))
    world.step(math.nan)
    assert world.told == []


def test_an_acknowledged_alert_stays_open() -> None:
    world = World()
    world.step(math.nan)
    assert world.evaluator.acknowledge("stall", "anna") is None
    found = world.evaluator.acknowledge("nonfinite", "anna")
    assert found is not None
    assert found.acknowledged_by == world.evaluator.open["nonfinite"].acknowledged_by == "anna"


def test_every_kind_has_a_rule_and_a_place_on_the_wire() -> None:
    table = AlertsTable()
    from trainctl.node_agent.alerts.hysteresis import rules

    assert set(rules(table)) == set(KINDS) == set(m.AlertKind.__args__)  # type: ignore[attr-defined]
    assert msgspec.convert({"off": list(KINDS)}, AlertsTable).off == tuple(KINDS)


observed = st.tuples(st.booleans(), st.booleans(), st.floats(0, 20))


@given(st.lists(observed, max_size=200), st.integers(1, 5), st.floats(0, 30), st.integers(1, 5), st.floats(0, 30))
def test_a_gate_never_flaps(seen: list[Any], up: int, up_seconds: float, down: int, down_seconds: float) -> None:
    hysteresis, now, turns = Hysteresis(Rule(up, up_seconds, down, down_seconds)), 0.0, [(-math.inf, False)]
    for bad, good, seconds in seen:
        now += seconds
        hysteresis.judge(bad=bad, good=good and not bad, now=now)
        if hysteresis.turn(now):
            turns.append((now, hysteresis.is_open))
    for (before, was), (after, is_open) in itertools.pairwise(turns):
        assert is_open is not was
        assert after - before >= (up_seconds if is_open else down_seconds) - 1e-6


happenings = st.one_of(
    st.tuples(st.just("step"), st.sampled_from([2.0, 2.1, 9.0, math.nan, math.inf]), st.floats(0.01, 200)),
    st.tuples(st.just("part"), st.floats(0.01, 3.0), st.sampled_from([None, 50, 90, 95])),
    st.tuples(st.just("reading"), st.floats(0, 10e9), st.sampled_from([300.0, 1400.0, 1620.0])),
    st.tuples(st.just("look"), st.floats(0, 100), st.sampled_from(["run", "lost", "hung", "rejoining", "drained"])),
    st.tuples(st.just("silent"), st.floats(0, 20), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(happenings, max_size=120))
def test_alerts_alternate_stay_for_a_while_and_memory_is_bounded(happened: list[Any]) -> None:
    world = World()
    for what, one, other in happened:
        if what == "step":
            world.step(one, seconds=other)
        elif what == "part":
            world.part(backward=one, used=other)
        elif what == "reading":
            world.reading(free=one, mhz=other)
        elif what == "look":
            world.rank_states[1] = other
            world.look(one)
        else:
            world.silent = {"mbp": "gone"} if other else {}
            world.look(one)
        assert world.evaluator.held <= len(KINDS) * len(NODES)
    raised_at: dict[str, float] = {}
    for now, change in world.changes:
        id = change.alert.id
        if isinstance(change, Raised):
            assert id not in raised_at
            assert change.alert.text
            raised_at[id] = now
        else:
            assert now - raised_at.pop(id) >= CALM.clear_seconds - 1e-6
    assert set(raised_at) == set(world.evaluator.open)


def test_hooks_are_called_no_more_than_so_often() -> None:
    budget = Budget()
    assert sum(budget.take(now / 10) for now in range(100)) == BURST
    assert budget.take(PER_SECONDS + 1)


def test_a_model_far_from_its_reference_is_told_until_an_evaluation_finds_it_near() -> None:
    world = World(AlertsTable(clear_seconds=5.0, kl_nats=0.3, kl_clear_nats=0.2))
    for kl in (None, 0.25, 0.31, 0.25, math.nan):
        world.kl = kl
        world.look(10.0)
    assert world.told == ["raised kl"]
    (alert,) = world.evaluator.open.values()
    assert alert.text == "KL 0.31 nats per token from the reference, above 0.3"
    world.kl = 0.1
    world.look(1.0)
    world.look(10.0)
    assert world.told == ["raised kl", "cleared kl"]
