"""What the lead of a run does for nodes that must leave: pure."""

import pytest

from trainctl.node_agent.roles.draining_nodes import Action, Situation, awaited_seconds, decide
from trainctl.node_agent.roles.role import OwnDrain

LIVE = {0: "alpha", 1: "beta", 2: "gamma"}
OTHERS = frozenset({"beta", "gamma"})
WHY = "its agent was terminated"


def situation(*leaving: str, live=LIVE, reachable=OTHERS, may_hand_over=True, turn=0) -> Situation:
    return Situation("alpha", LIVE | live, live, dict.fromkeys(leaving, WHY), reachable, may_hand_over, turn)


def test_the_end_of_a_run_waits_less_for_a_node_that_leaves_than_the_usual_grace():
    assert awaited_seconds(goes_back=False, leaving=True) == awaited_seconds(goes_back=True, leaving=False) < 15
    assert awaited_seconds(goes_back=False, leaving=False) > 15


def test_nothing_is_done_while_all_stay():
    assert decide(situation()) == Action("none")


@pytest.mark.parametrize(("leaving", "ranks"), [(("beta",), (1,)), (("beta", "gamma"), (1, 2))])
def test_ranks_of_other_nodes_are_drained(leaving, ranks):
    assert decide(situation(*leaving)) == Action("drain", dict.fromkeys(ranks, WHY))


def test_all_ranks_of_a_node_are():
    live = {0: "alpha", 1: "beta", 2: "beta"}
    assert decide(situation("beta", live=live)).ranks == {1: WHY, 2: WHY}


@pytest.mark.parametrize(("leaving", "successor"), [(("alpha",), "beta"), (("alpha", "beta"), "gamma")])
def test_a_lead_that_leaves_hands_over_to_a_node_that_stays_before_its_own_rank_leaves(leaving, successor):
    assert decide(situation(*leaving)) == Action("hand-over", successor=successor)


def test_only_a_node_that_can_be_reached_and_has_a_rank_is_to_lead():
    assert decide(situation("alpha", reachable=frozenset({"gamma"}))).successor == "gamma"
    assert decide(situation("alpha", live={0: "alpha", 2: "gamma"})).successor == "gamma"


def test_a_node_that_does_not_take_over_makes_way_for_the_next_one():
    assert [decide(situation("alpha", turn=turn)).successor for turn in range(3)] == ["beta", "gamma", "beta"]
    live = {0: "alpha", 1: "beta", 2: "beta", 3: "gamma"}
    assert decide(situation("alpha", live=live, turn=1)).successor == "gamma"


def test_nodes_out_of_touch_are_waited_for_while_there_is_time_to_hand_over():
    assert decide(situation("alpha", reachable=frozenset())) == Action("hand-over")
    assert decide(situation("alpha", reachable=frozenset(), may_hand_over=False)) == Action("stop")


@pytest.mark.parametrize(("grace", "seconds"), [(15.0, 2.0), (120.0, 15.0)])
def test_each_node_has_some_time_to_take_over(grace, seconds):
    own = OwnDrain(WHY, 100.0, grace)
    assert [own.turn(100.0 + part * seconds) for part in (0.0, 0.9, 1.1, 2.1)] == [0, 0, 1, 2]
    assert own.may_hand_over(100.0 + 3 * seconds) and not own.may_hand_over(100.0 + 4 * seconds)


def test_the_run_stops_with_a_checkpoint_when_no_node_stays_or_none_can_lead():
    assert decide(situation("alpha", "beta", "gamma")).kind == "stop"
    assert decide(situation("alpha", live={0: "alpha"})).kind == "stop"
    assert decide(situation("beta", live={1: "beta"})).kind == "stop"  # the lead has no rank
    assert decide(situation("alpha", may_hand_over=False)).kind == "stop"


def test_a_rank_outside_the_group_leaves_too():
    assert decide(situation("gamma", live={0: "alpha", 1: "beta"})) == Action("drain", {2: WHY})


def test_a_node_without_a_rank_that_leaves_changes_nothing():
    assert decide(situation("delta")) == Action("drain", {})
