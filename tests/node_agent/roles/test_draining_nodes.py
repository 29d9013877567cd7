"""What the lead of a run does for nodes that must leave: pure."""

import pytest

from trainctl.node_agent.roles.draining_nodes import Action, Situation, decide

LIVE = {0: "alpha", 1: "beta", 2: "gamma"}
OTHERS = frozenset({"beta", "gamma"})
WHY = "its agent was terminated"


def situation(*leaving: str, live=LIVE, reachable=OTHERS, may_hand_over=True) -> Situation:
    return Situation("alpha", live, dict.fromkeys(leaving, WHY), reachable, may_hand_over)


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


def test_the_run_stops_with_a_checkpoint_when_no_node_stays_or_none_can_lead():
    assert decide(situation("alpha", "beta", "gamma")).kind == "stop"
    assert decide(situation("alpha", live={0: "alpha"})).kind == "stop"
    assert decide(situation("beta", live={1: "beta"})).kind == "stop"  # the lead has no rank
    assert decide(situation("alpha", reachable=frozenset())).kind == "stop"
    assert decide(situation("alpha", may_hand_over=False)).kind == "stop"


def test_a_node_without_a_rank_that_leaves_changes_nothing():
    assert decide(situation("gamma", live={0: "alpha", 1: "beta"})) == Action("drain", {})
