"""What the lead of a run does for nodes that must leave: pure."""

import pytest

from trainctl.node_agent.roles.drains import Action, Situation, awaited_seconds, decide
from trainctl.node_agent.roles.role import OwnDrain

LIVE = {0: "alpha", 1: "beta", 2: "gamma"}
OTHERS = frozenset({"beta", "gamma"})
WHY = "its agent was terminated"


def situation(*leaving: str, live=LIVE, reachable=OTHERS, may_hand_over=True, turn=0) -> Situation:
    return Situation("alpha", LIVE | live, live, dict.fromkeys(leaving, WHY), reachable, may_hand_over, turn)


def test_the_end_of_a_run_waits_less_for_a_node_that_leaves_than_the_usual_grace():
    assert awaited_seconds(goes_back=False, leaving=True) == awaited_seconds(goes_back=True, leaving=False) < 15
    assert awaited_seconds(goes_back=False, leaving=False) > 15


@pytest.mark.parametrize(
    ("leaving", "live", "ranks"),
    [
        (("beta",), LIVE, (1,)),
        (("beta", "gamma"), LIVE, (1, 2)),
        (("beta",), {0: "alpha", 1: "beta", 2: "beta"}, (1, 2)),
        (("gamma",), {0: "alpha", 1: "beta"}, (2,)),  # it is outside the group
        (("delta",), LIVE, ()),  # it has no rank
    ],
)
def test_ranks_of_other_nodes_are_drained(leaving, live, ranks):
    assert decide(situation()) == Action("none"), "while all stay"
    assert decide(situation(*leaving, live=live)) == Action("drain", dict.fromkeys(ranks, WHY))


@pytest.mark.parametrize(
    ("leaving", "facts", "successor"),
    [
        (("alpha",), {}, "beta"),
        (("alpha", "beta"), {}, "gamma"),
        (("alpha",), {"reachable": frozenset({"gamma"})}, "gamma"),
        (("alpha",), {"live": {0: "alpha", 2: "gamma"}}, "gamma"),  # only who has a rank is to lead
        (("alpha",), {"turn": 1}, "gamma"),  # beta did not take over
        (("alpha",), {"turn": 2}, "beta"),
        (("alpha",), {"turn": 1, "live": {0: "alpha", 1: "beta", 2: "beta", 3: "gamma"}}, "gamma"),
        (("alpha",), {"reachable": frozenset()}, None),  # a node in touch is waited for
    ],
)
def test_a_lead_that_leaves_hands_over_before_its_own_rank_leaves(leaving, facts, successor):
    wanted = Action("hand-over") if successor is None else Action("hand-over", successor=successor)
    assert decide(situation(*leaving, **facts)) == wanted


@pytest.mark.parametrize(
    ("leaving", "facts"),
    [
        (("alpha", "beta", "gamma"), {}),
        (("alpha",), {"live": {0: "alpha"}}),
        (("beta",), {"live": {1: "beta"}}),  # the lead has no rank
        (("alpha",), {"may_hand_over": False}),
        (("alpha",), {"may_hand_over": False, "reachable": frozenset()}),
    ],
)
def test_the_run_stops_with_a_checkpoint_when_no_node_stays_or_none_can_lead(leaving, facts):
    assert decide(situation(*leaving, **facts)) == Action("stop")


@pytest.mark.parametrize(("grace", "seconds"), [(15.0, 2.0), (120.0, 15.0)])
def test_each_node_has_some_time_to_take_over(grace, seconds):
    own = OwnDrain(WHY, 100.0, grace)
    assert [own.turn(100.0 + part * seconds) for part in (0.0, 0.9, 1.1, 2.1)] == [0, 0, 1, 2]
    assert own.may_hand_over(100.0 + 3 * seconds) and not own.may_hand_over(100.0 + 4 * seconds)
