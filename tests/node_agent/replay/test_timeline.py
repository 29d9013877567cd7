"""The shipped recording as a timeline: each step is whole for any number of nodes, and each fault raises its alert."""

from itertools import pairwise

import msgspec
import pytest
from tools.protocol_docs import examples

from trainctl.node_agent.replay import format as recordings
from trainctl.node_agent.replay.alerts import PlayedAlerts
from trainctl.node_agent.replay.timeline import Timeline
from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import AnyEvent

VIEW = next(item for item in examples.EXAMPLES["published by an agent"].values() if isinstance(item, m.RunView))


@pytest.fixture(scope="module")
def recorded() -> recordings.Recording:
    return recordings.shipped()


@pytest.mark.parametrize("nodes", [1, 8])
def test_each_step_is_whole(recorded: recordings.Recording, nodes: int) -> None:
    timeline = Timeline(recorded, "run", nodes)
    before = timeline.played_step(1, 0.0).step
    for number in (*range(2, 301, 14), 450):
        step, parts, *_ = timeline.played_step(number, 0.0)
        assert sum(part.samples for part in parts) == step.global_batch == before.global_batch
        assert sum(part.tokens for part in parts) == pytest.approx(step.weight)
        for part in parts:
            phases = part.phases
            assert phases.busy + phases.sync + phases.optimizer + phases.wait == pytest.approx(part.step_seconds)
        shown = {view.rank: view.share for view in timeline.ranks(number, 0.0) if view.state == "run"}
        assert shown == {part.rank: part.samples for part in parts}


def test_a_node_is_lost_and_comes_back_in_another_generation(recorded: recordings.Recording) -> None:
    timeline = Timeline(recorded, "run", 8)
    states = [timeline.ranks(step, 0.0)[7].state for step in range(1, 301)]
    changes = [states[0], *(after for before, after in pairwise(states) if after != before)]
    assert changes == ["run", "lost", "rejoining", "run"]
    assert timeline.generation(300).n == timeline.generation(1).n + 2


def test_each_fault_raises_its_alert_once_and_it_ends(recorded: recordings.Recording) -> None:
    """By the agent's own rules, at the recording's own pace, whatever the rebalance at the fault's beginning does."""
    timeline, told = Timeline(recorded, "run", 2), dict[tuple[str, str], AnyEvent]()
    alerts = PlayedAlerts(timeline)
    for step in (step for step in range(1, timeline.length + 1) if not timeline.script.is_away(step)):
        silent = {node: "gone" for rank, node in enumerate(timeline.nodes) if timeline.script.is_lost(rank, step)}
        ranks = timeline.ranks(step, 0.0)
        view = msgspec.structs.replace(VIEW, step=step, generation=timeline.generation(step), ranks=ranks)
        for event in alerts.take(timeline.played_step(step, step), view, silent, step):
            assert told.setdefault((event.data.id, event.severity), event.data) == event.data
    node = timeline.nodes[1]
    raised = {(f"clock:{node}:1", "warning"), (f"node-lost:{node}:1", "error"), ("loss-spike", "warning")}
    assert told.keys() == raised | {(id, "good") for id, _ in raised}
    assert alerts.view.alerts == ()
