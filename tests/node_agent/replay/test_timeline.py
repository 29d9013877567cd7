"""The shipped recording as a timeline: the same each time, for any number of nodes, its faults where they belong."""

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from tools.protocol_docs import examples

from trainctl.node_agent.replay import format as r
from trainctl.node_agent.replay.alerts import PlayedAlerts
from trainctl.node_agent.replay.readings import reading
from trainctl.node_agent.replay.timeline import Timeline
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages.events import AlertRaised, AnyEvent

VIEW = next(item for item in examples.EXAMPLES["published by an agent"].values() if isinstance(item, m.RunView))


@pytest.fixture(scope="module")
def recorded() -> r.Recording:
    return r.read(r.shipped())


def test_what_ships_is_small_and_of_eight_ranks(recorded: r.Recording) -> None:
    assert r.shipped().stat().st_size < 300_000
    assert len(recorded.ranks) == 8
    assert len(recorded.steps) == 300
    assert {"rebalance", "resize-batch"} <= {event.verb for event in recorded.events}


def test_without_faults_it_is_what_was_recorded(recorded: r.Recording) -> None:
    timeline = Timeline(recorded, "run", 8, faults=False)
    for number in (1, 150, 300):
        played_step, step = timeline.played_step(number, 0.0), recorded.steps[number - 1]
        assert played_step.step.loss == step.loss
        for part, kept in zip(played_step.parts, step.parts, strict=True):
            assert part.phases.backward == pytest.approx(kept.backward * 1e-6)
            assert (part.samples, part.micro_batch, part.tokens) == (kept.samples, kept.micro_batch, kept.tokens)


def test_the_same_seed_gives_the_same_story(recorded: r.Recording) -> None:
    one, other = (Timeline(recorded, "run", 64, seed=seed).played_step(77, 1.0) for seed in (3, 3))
    assert one == other
    assert one.parts != Timeline(recorded, "run", 64, seed=4).played_step(77, 1.0).parts


@pytest.mark.parametrize("nodes", [1, 3, 8, 64])
def test_each_step_is_whole(recorded: r.Recording, nodes: int) -> None:
    timeline = Timeline(recorded, "run", nodes)
    before = timeline.played_step(1, 0.0).step
    for number in (*range(2, 301, 7), 450):
        step, parts, *_ = timeline.played_step(number, 0.0)
        assert sum(part.samples for part in parts) == step.global_batch == before.global_batch
        assert sum(part.tokens for part in parts) == pytest.approx(step.weight)
        for part in parts:
            phases = part.phases
            assert phases.busy + phases.sync + phases.optimizer + phases.wait == pytest.approx(part.step_seconds)
            assert phases.sync >= 0
        shown = {view.rank: view.share for view in timeline.ranks(number, 0.0) if view.state == "run"}
        assert shown == {part.rank: part.samples for part in parts}


def test_a_node_is_lost_and_comes_back_in_another_generation(recorded: r.Recording) -> None:
    timeline = Timeline(recorded, "run", 8)
    states = [timeline.ranks(step, 0.0)[7].state for step in range(1, 301)]
    changes = [states[0], *(after for before, after in pairwise(states) if after != before)]
    assert changes == ["run", "lost", "rejoining", "run"]
    assert timeline.generation(300).n == timeline.generation(1).n + 2


def test_the_hot_rank_is_slow_in_backward_with_a_lower_clock(recorded: r.Recording) -> None:
    timeline, step = Timeline(recorded, "run", 8), 87
    rank = timeline.script.hot_rank
    assert rank is not None
    slow, calm = (
        timeline.played_step(step, 0.0).parts[rank],
        Timeline(recorded, "run", 8, faults=False).played_step(step, 0.0).parts[rank],
    )
    assert slow.phases.backward == pytest.approx(2.6 * calm.phases.backward)
    assert slow.phases.forward == pytest.approx(calm.phases.forward)
    hot, cool = (reading(recorded, timeline.script, "n", of, 5, step, 0.0).gpus[0] for of in (rank, 0))
    assert hot.temperature_celsius is not None and cool.temperature_celsius is not None
    assert hot.clock_mhz is not None and cool.clock_mhz is not None
    assert hot.temperature_celsius > cool.temperature_celsius + 20
    assert hot.clock_mhz < cool.clock_mhz - 300


def test_the_loss_jumps_once(recorded: r.Recording) -> None:
    timeline = Timeline(recorded, "run", 8)
    much = [timeline.played_step(step, 0.0).step.loss / timeline.recorded(step).loss for step in range(1, 301)]
    assert max(much) > 2
    assert 5 <= sum(factor > 1.01 for factor in much) <= 15


@pytest.mark.parametrize("body", [b"", b"no recording", b"x\x9c\x03\x00\x00\x00\x00\x01"])
def test_what_is_no_recording_is_refused_in_one_line(tmp_path: Path, body: bytes) -> None:
    file = tmp_path / "some.recording"
    file.write_bytes(body)
    with pytest.raises(InvalidInputError, match="not a recording"):
        r.read(file)


@pytest.mark.parametrize("nodes", [2, 8])
def test_each_fault_raises_its_alert_once_and_it_ends(recorded: r.Recording, nodes: int) -> None:
    """By the agent's own rules, at the recording's own pace, whatever the rebalance at the fault's beginning does."""
    timeline, told = Timeline(recorded, "run", nodes), dict[tuple[str, str], AnyEvent]()
    alerts, hot = PlayedAlerts(timeline), min(2, nodes - 1)
    for step in (step for step in range(1, timeline.length + 1) if not timeline.script.is_away(step)):
        silent = {node: "gone" for rank, node in enumerate(timeline.nodes) if timeline.script.is_lost(rank, step)}
        view = msgspec.structs.replace(
            VIEW, step=step, generation=timeline.generation(step), ranks=timeline.ranks(step, 0.0)
        )  # fmt: skip
        for event in alerts.take(timeline.played_step(step, step), view, silent, step):
            assert told.setdefault((event.data.id, event.severity), event.data) == event.data
    clock, lost = f"clock:{timeline.nodes[hot]}:{hot}", f"node-lost:{timeline.nodes[-1]}:{nodes - 1}"
    raised = {(clock, "warning"), (lost, "error"), ("loss-spike", "warning")}
    assert told.keys() == raised | {(id, "good") for id, _ in raised}
    alert = told[clock, "warning"]
    assert isinstance(alert, AlertRaised) and alert.node == timeline.nodes[hot]
    assert alert.text.startswith("+") and alert.text.endswith(" ms in backward: 92 °C, 1.61→1.16 GHz")
    assert alerts.view.alerts == ()
