"""Nodes that must leave: what a lead does for them, which runs it takes up from others, and when an agent may exit."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from tests.node_agent.support.simulation import config

from trainctl.node_agent.planning.durable import Durable, RankSetting, Rollback, Settings
from trainctl.node_agent.roles import drains
from trainctl.node_agent.roles.drains import Action, NodeDrain, Situation, awaited_seconds, decide
from trainctl.node_agent.roles.role import AgentRole, OwnDrain
from trainctl.node_agent.roles.transfer import Adoption
from trainctl.node_agent.runs import restore
from trainctl.node_agent.runs.launch import Launch
from trainctl.node_agent.trainers.rank_ports import Ending
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Generation
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.protocol.record.paths import RunPaths

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


def recorded(
    paths: RunPaths, *written: tuple[str, int], rollback: int | None = None, out: Literal["", "drained"] = ""
) -> None:
    """The record of a run of ranks on b and c, with checkpoints by node and step; `out`: why b's takes no part."""
    settings = Settings(1, 24, {0: RankSetting("b", 0 if out else 12, 4, out), 1: RankSetting("c", 12, 4)})
    nodes = {"b": {"backend": "torch"}, "c": {"backend": "torch"}}
    with restore.make_directory(paths, config(100, 24, nodes=nodes)) as recorder:
        for node, step in written:
            recorder.event(float(step), CheckpointWritten(step), "good", node, step=step)
        back = None if rollback is None else Rollback(rollback)
        restore._keep(recorder, Durable(settings, Generation(1, 1), 40, rollback=back))


def adoption(**leaving: str) -> Adoption:
    """Return the adoption of an agent a that is in touch with b and c; `leaving`: why they are."""
    context: Any = SimpleNamespace(node="a", db=None)
    line = SimpleNamespace(open=True)
    links = {node: SimpleNamespace(line=line, leaving=leaving.get(node, "")) for node in ("b", "c")}
    peers: Any = SimpleNamespace(links=links, is_open=lambda node: node == "c")
    return Adoption(context, context, peers, Launch(context, peers, lambda run: None))


def test_a_run_that_is_to_go_back_needs_no_later_checkpoint(tmp_path: Path) -> None:
    """The newest one is on an unreachable node, that of the rollback isn't."""
    paths = RunPaths(tmp_path / "run-1")
    recorded(paths, ("c", 20), ("b", 30), rollback=20)
    row: Any = SimpleNamespace(run="run-1", directory=paths.directory)
    assert asyncio.run(adoption()._check_reach(row, {"b"}, old_lead_is_off=False)) == ""


def test_a_run_resumes_without_nodes_that_are_leaving(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run-1")
    recorded(paths, ("b", 30), ("c", 30))
    assert asyncio.run(adoption()._leaving(paths)) == {}
    assert asyncio.run(adoption(c="a spot notice")._leaving(paths)) == {"c": "a spot notice"}


@pytest.mark.parametrize(
    ("leaving", "out", "problem"),
    [
        (
            {"b": "a spot notice"}, set(),
            "b has the newest checkpoint, step-30, and is leaving (a spot notice); resume when b is back",
        ),
        (
            {"b": "a spot notice", "c": "SIGTERM"}, set(),
            "b is leaving: a spot notice, c is leaving: SIGTERM; no other node has a rank that trains",
        ),
        ({"b": "a spot notice"}, {"c"}, "b is leaving: a spot notice; no other node has a rank that trains"),
    ],
)  # fmt: skip
def test_a_run_waits_for_nodes_that_only_they_can_continue(tmp_path, leaving, out, problem):
    paths = RunPaths(tmp_path / "run-1")
    recorded(paths, ("c", 20), ("b", 30))
    with pytest.raises(InvalidInputError) as refusal:
        asyncio.run(adoption(**leaving)._leaving(paths, out))
    assert str(refusal.value) == f"resume: {problem}"


def drain(*, ended: bool = True, reported: bool = True, in_group: bool = False) -> tuple[NodeDrain, AgentRole]:
    """Return the drain of a node that follows a run."""
    ending = Ending(clean=True, why="exited") if ended else None
    followed: Any = SimpleNamespace(ending=ending, told_ending=reported, is_in_group=in_group)
    role = AgentRole()
    role.follow(followed)
    return NodeDrain(role, 15.0, lambda: False), role


def test_a_follower_has_left_when_its_lead_knows_that_its_trainer_ended():
    assert drain()[0].has_left
    assert not drain(ended=False)[0].has_left
    assert not drain(reported=False)[0].has_left


def test_one_whose_run_ends_as_a_whole_records_that_first(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(drains.time, "monotonic", lambda: now)
    waits, _ = drain(in_group=True)
    assert not waits.has_left
    now += drains.RUN_END_SECONDS - 1.0
    assert not waits.has_left
    now += 2.0  # its lead is gone
    assert waits.has_left
    ends, role = drain(in_group=True)
    assert not ends.has_left
    role.let_go()
    assert ends.has_left


async def test_an_agent_stays_while_a_checkpoint_is_copied() -> None:
    is_copying = True
    leaving = NodeDrain(AgentRole(), 600.0, lambda: is_copying)
    leaving.begin("a test", exits=True)
    serving = asyncio.create_task(leaving.serve())
    done, _ = await asyncio.wait([serving], timeout=3 * drains.FAREWELL_SECONDS)
    assert not done, "the machine may end with the agent, and the copy with the machine"
    is_copying = False
    await asyncio.wait_for(serving, 60)


async def test_a_copy_that_takes_longer_than_the_grace_makes_no_failure(caplog):
    leaving = NodeDrain(AgentRole(), 0.2, lambda: True)
    leaving.begin("a test", exits=True)
    await asyncio.wait_for(leaving.serve(), 60)
    assert "still being copied after the grace of 0.2 s" in caplog.text
