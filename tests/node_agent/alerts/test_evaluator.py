"""The alerts' evaluator: stalls and lost nodes, restarts, acknowledgements, and that it never flaps or grows."""

import itertools
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory_values import memory
from tests.node_agent.support.alert_world import CALM, NODES, World

from trainctl.node_agent.alerts.evaluator import Cleared, Evaluator, Hysteresis, Raised, Rule
from trainctl.protocol.config.alert_rules import KINDS


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
    world.rank_states[1], world.silent = "drained", {"mbp": "no message from tcp://mbp:7474"}
    for _ in range(20):
        world.look(5)
    assert world.told[-1] == "cleared node-lost:mbp:1", "a drained node may be silent"


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
    world.steps(60)
    world.steps(40, 0.9)
    world.step(math.inf)
    open_alerts = tuple(world.evaluator.open.values())
    again = World(open_alerts=open_alerts, references=world.evaluator.references)
    again.steps(40, 0.9)
    assert again.told == ["cleared nonfinite"]
    assert again.evaluator.open["throughput:mbp:1"].raised_at == open_alerts[0].raised_at
    again.steps(40)
    assert again.told[-1] == "cleared throughput:mbp:1"


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
            world.part(backward=one, values=memory(other, None, 100))
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
