"""How often, how soon and from where a run whose ranks were all lost is taken up again."""

import pytest

from trainctl.node_agent.records.run_db import RunRecorder
from trainctl.node_agent.runs import checkpoint_source
from trainctl.node_agent.runs.checkpoint_source import Source
from trainctl.node_agent.runs.recovery import Way, WayBack, absent
from trainctl.protocol.record.paths import RunPaths

WAY = Way({0: "a", 1: "b", 2: "c"}, Source(40, "b"), 300.0)


def test_with_all_nodes_in_reach_nobody_is_waited_for():
    assert absent(WAY, {"x": 5000.0}) == ({}, "", "")


def test_one_that_has_no_newest_checkpoint_can_be_done_without():
    assert absent(WAY, {"c": 0.0}) == ({2: "c"}, "", "")


@pytest.mark.parametrize("seconds", [0.0, 299.0])
def test_the_node_with_the_newest_checkpoint_is_waited_for(seconds):
    wanted = "b, which has the newest checkpoint, until it has been out of reach for 300 s"
    assert absent(WAY, {"b": seconds, "c": 900.0}) == ({1: "b", 2: "c"}, wanted, "")


def test_and_not_without_end():
    given_up = "b, which has the newest checkpoint, has been out of reach for 301 s"
    assert absent(WAY, {"b": 301.0}) == ({1: "b"}, "", given_up)


def test_where_no_node_is_in_reach_nothing_else_can_be_done():
    assert absent(WAY, {"a": 900.0, "b": 900.0, "c": 900.0}) == ({0: "a", 1: "b", 2: "c"}, "a, b, c", "")


# ---------------------------------------------------------------- which checkpoint


def written(tmp_path, *by: tuple[str, int]) -> RunPaths:
    """The record of a run whose nodes have written checkpoints of these steps, in this order."""
    paths = RunPaths(tmp_path / "run-1")
    paths.directory.mkdir()
    recorder = RunRecorder(paths)
    for node, step in by:
        recorder.event(float(step), "checkpoint", "good", node, f"checkpoint step-{step}", step=step)
    recorder.close()
    return paths


def test_the_newest_of_those_in_reach(tmp_path):
    paths = written(tmp_path, ("b", 20), ("c", 20), ("b", 40))
    assert checkpoint_source.find(paths, "a") == Source(40, "b")
    assert checkpoint_source.find(paths, "a", {"b"}) == Source(20, "c")
    assert checkpoint_source.find(paths, "a", {"b", "c"}) == Source()


def test_none_of_a_history_that_the_run_has_gone_back_behind(tmp_path):
    paths = written(tmp_path, ("b", 40), ("c", 30))
    assert checkpoint_source.find(paths, "a") == Source(30, "c")
    assert checkpoint_source.find(paths, "a", {"c"}) == Source()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def waited(way: WayBack, clock: Clock) -> float:
    """Until the run is due."""
    begun = clock.now
    while way.due() is None:
        clock.now += 0.5
    return clock.now - begun


def test_the_wait_doubles_until_it_is_given_up():
    way = WayBack(clock := Clock())
    waits = []
    while way.take("run-1", 40, "killed"):
        waits.append(waited(way, clock))
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert way.run is None


def test_a_run_that_got_further_begins_to_count_anew():
    way = WayBack(clock := Clock())
    for step in (40, 40, 40, 41):
        assert way.take("run-1", step, "killed")
        last = waited(way, clock)
    assert last == 1.0


def test_one_that_cannot_be_taken_up_is_tried_again():
    way = WayBack(clock := Clock())
    assert way.take("run-1", 40, "killed")
    tries = 0
    while way.run is not None:
        waited(way, clock)
        tries += 1
        way.again()
    assert tries == 5
    assert way.run is None


def test_it_is_handed_out_once_and_forgotten_for_another_run():
    way = WayBack(clock := Clock())
    way.take("run-1", 40, "killed")
    assert way.due() is None
    clock.now = 1.0
    assert (way.due(), way.due()) == ("run-1", None)
    way.take("run-1", 40, "killed")
    assert way.forget() == "run-1"
    assert (way.forget(), way.run) == (None, None)


def test_waiting_for_nodes_is_no_try():
    way = WayBack(clock := Clock())
    assert way.take("run-1", 40, "killed")
    waited(way, clock)
    assert way.held_seconds == 0.0
    for _ in range(30):
        way.hold("run-1")
        assert waited(way, clock) == 1.0
    assert way.held_seconds == 30.0
    assert way.again()
    assert (waited(way, clock), way.held_seconds) == (2.0, 0.0)
