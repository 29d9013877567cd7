"""Calibrations of one machine's nodes at once: what each may begin, and how they end."""

import asyncio
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
from tests.protocol.support.profiles import profile_of

from trainctl.protocol import messages as m
from trainctl.protocol.errors import NotConnectedError, RefusedError, UnreachableError
from trainctl.tui.setup.calibration_request import CalibrationTarget, may_begin, measured, measured_together


class Node:
    """An agent's node that is ready for each stage after some looks."""

    def __init__(self, looks=1, problem=""):
        self.looks, self.problem, self.reached, self.asked = looks, problem, 0, Counter()
        self.seen, self.cancelled, self.others = [], False, None

    async def ask(self, request, id, config, lead, *, beside, stage, cancel):
        self.asked[stage] += 1
        self.seen.append((stage, self.others() if self.others else None))
        self.cancelled, self.reached = self.cancelled or cancel, max(self.reached, stage)
        if self.problem and stage:
            return m.Calibration(rid="1", state="failed", problem=self.problem)
        if self.asked[3] > self.looks:
            return m.Calibration(rid="1", state="finished", profile=profile_of(beside=beside))
        is_ready = self.reached == 3 or self.asked[self.reached] > self.looks
        return m.Calibration(rid="1", state="running", waits=min(3, self.reached + is_ready))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("trainctl.tui.setup.calibration_request.AGAIN_SECONDS", 0.0)


def test_a_stage_begins_when_all_are_ready_and_the_last_one_on_one_node_after_another():
    assert may_begin({"a": 0, "b": 0}) == {"a": 0, "b": 0}
    assert may_begin({"a": 2, "b": 1}) == {"a": 1, "b": 1}
    assert may_begin({"a": 2, "b": 3}) == {"a": 2, "b": 2}
    assert may_begin({"a": 3, "b": 3}) == {"a": 3, "b": 2}
    assert may_begin({"b": 3}) == {"b": 3}


async def test_nodes_of_a_machine_go_through_the_stages_together():
    a, b, c = Node(1), Node(3), Node(2, problem="no space")
    a.others = lambda: {one.reached for one in (b,)}
    said = []
    ended = await measured_together(
        CalibrationTarget({}, "b"), lambda *line: said.append(line), {"a": a, "b": b, "c": c}
    )
    assert ended["a"].profile.beside == ("b", "c")
    assert ended["b"].profile.beside == ("a", "c")
    assert isinstance(ended["c"], RefusedError)
    assert min(stage for stage, of_b in a.seen if of_b == {3}) == 2
    assert a.asked[3], "after b, the lead's node"


class Silent(Node):
    """An agent's node that answers again after some unanswered looks."""

    def __init__(self, error, unanswered):
        super().__init__()
        self.error, self.left = error, unanswered

    async def ask(self, *asked, **options):
        self.left -= 1
        if self.left >= 0:
            raise self.error
        return await super().ask(*asked, **options)


@pytest.mark.parametrize(
    "error, is_lost", [(UnreachableError("no answer"), False), (NotConnectedError("no agent"), True)]
)
async def test_an_agent_that_is_slow_to_answer_is_waited_for_and_one_without_a_connection_is_lost(
    monkeypatch, error, is_lost
):
    clock = itertools.count(0.0, 10.0)
    module = "trainctl.tui.setup.calibration_request"
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: next(clock)))
    said, nodes = list[tuple[str, str]](), {"a": Node(), "b": Silent(error, 12)}
    ended = await measured_together(CalibrationTarget({}, None), lambda *line: said.append(line), nodes)
    assert isinstance(ended["a"], m.Calibration)
    assert (ended["b"] is error) == is_lost
    if not is_lost:
        assert isinstance(ended["b"], m.Calibration)
        assert [node for node, line in said if "no answer for" in line] == ["b"]


async def test_an_agent_that_never_answers_again_is_lost_in_the_end(monkeypatch):
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr("trainctl.tui.setup.calibration_request.time", SimpleNamespace(monotonic=lambda: next(clock)))
    error = UnreachableError("no answer")
    ended = await measured_together(CalibrationTarget({}, None), lambda *_: None, {"a": Silent(error, 10**6)})
    assert ended == {"a": error}


@pytest.mark.parametrize("count", [1, 2])
async def test_one_that_is_cancelled_cancels_its_nodes(count):
    nodes = {name: Node(10**9) for name in ("a", "b")[:count]}
    if count == 1:
        task = asyncio.create_task(measured(CalibrationTarget({}, None), lambda _: None, nodes["a"]))
    else:
        task = asyncio.create_task(measured_together(CalibrationTarget({}, None), lambda *_: None, nodes))
    while not all(node.asked[0] for node in nodes.values()):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(node.cancelled for node in nodes.values())
