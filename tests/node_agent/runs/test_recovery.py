"""Tests of how often, how soon and from where a run whose ranks were all lost is taken up again."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.node_agent.support import records
from tests.node_agent.support.simulation import config

from trainctl.node_agent.planning.durable import Durable, RankSetting, Rollback, Settings
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.checkpoint_source import Source
from trainctl.node_agent.runs.recovery import Absent, Backoff, Recovery, ResumePoint, absent
from trainctl.protocol.messages import Command, Generation
from trainctl.protocol.messages.events import CheckpointWritten, RunStateChanged, StepRetracted
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

WAY = ResumePoint({0: "a", 1: "b", 2: "c"}, Source(40, "b"), 300.0)


@pytest.mark.parametrize(
    ("silent", "ranks", "waits_for", "given_up"),
    [
        ({"x": 5000.0}, {}, "", ""),
        ({"c": 0.0}, {2: "c"}, "", ""),  # it has no newest checkpoint
        (
            {"b": 299.0, "c": 900.0},
            {1: "b", 2: "c"},
            "b (newest checkpoint), until it has been unreachable for 300 s",
            "",
        ),
        ({"b": 301.0}, {1: "b"}, "", "b (newest checkpoint) has been unreachable for 301 s"),
        (dict.fromkeys("abc", 900.0), {0: "a", 1: "b", 2: "c"}, "a, b, c", ""),  # nothing else can be done
    ],
)
def test_only_the_node_with_the_newest_checkpoint_is_waited_for_and_not_without_end(silent, ranks, waits_for, given_up):
    assert absent(WAY, silent) == Absent(ranks, waits_for, given_up)


def written(tmp_path, *by: tuple[str, int]) -> RunPaths:
    """The record of a run whose nodes have written checkpoints of these steps, in this order."""
    paths = RunPaths(tmp_path / "run-1")
    paths.directory.mkdir()
    recorder = RunDb(paths)
    for node, step in by:
        recorder.event(float(step), CheckpointWritten(step), "good", node, step=step)
    recorder.close()
    return paths


def test_the_newest_of_those_in_reach_and_no_later_one_than_a_rollback_wants(tmp_path):
    paths = written(tmp_path, ("b", 20), ("c", 20), ("b", 40))
    assert checkpoint_source.find(paths, "a") == Source(40, "b")
    assert checkpoint_source.find(paths, "a", {"b"}) == Source(20, "c")
    assert checkpoint_source.find(paths, "a", {"b", "c"}) == Source()
    assert checkpoint_source.find(paths, "a", at_most=20).step == 20
    assert checkpoint_source.find(paths, "a", at_most=10) == Source()


def test_none_of_a_history_that_the_run_has_gone_back_behind(tmp_path):
    paths = written(tmp_path, ("b", 40), ("c", 30))
    assert checkpoint_source.find(paths, "a") == Source(30, "c")
    assert checkpoint_source.find(paths, "a", {"c"}) == Source()


@pytest.mark.parametrize(
    ("happened", "step"), [(StepRetracted(40), 39), (RunStateChanged("", "resumed", "from step 20"), 20)]
)
def test_none_of_a_step_that_was_retracted_though_no_other_was_written_since(tmp_path, happened, step):
    paths = written(tmp_path, ("b", 20), ("b", 40))
    with RunDb(paths) as recorder:
        recorder.event(41.0, happened, "warning", "auto", step=step)
    assert checkpoint_source.find(paths, "a") == Source(20, "b")


@pytest.mark.parametrize(("made_in", "found"), [(Generation(1, 3), 4), (Generation(1, 2), 2), (None, 4)])
def test_none_here_that_a_cut_off_rank_made_of_a_step_that_was_made_again(tmp_path, made_in, found):
    """The record has step 4 of generation 3."""
    paths = written(tmp_path)
    with RunDb(paths) as recorder:
        for step in (1, 2, 3, 4):
            made = msgspec.structs.replace(records.step(step), generation=Generation(1, 3 if step > 3 else 1))
            recorder.commit(made, [records.part(step)], 1000.0 + step)
    for step, generation in ((2, Generation(1, 1)), (4, made_in)):
        records.write_checkpoint(paths, step, generation)
    assert checkpoint_source.find(paths, "a") == Source(found, "a", paths.checkpoints / f"step-{found}")


def test_a_run_that_is_stopped_while_it_waits_goes_back_no_more(tmp_path):
    paths = RunPaths(tmp_path / "run-1")
    settings = Settings(1, 24, {0: RankSetting("b", 24, 4)})
    with restore.make_directory(paths, config(100, 24, nodes={"b": {"backend": "torch"}})) as recorder:
        restore._keep(recorder, Durable(settings, Generation(1, 1), 40, rollback=Rollback(20, 2)))
    ended: list[tuple[str, str, str]] = []
    known = SimpleNamespace(directory=paths.directory)
    db = SimpleNamespace(known_run=lambda run: known, set_run_state=lambda *args: ended.append(args))
    context, unused = cast(Any, SimpleNamespace(db=db)), cast(Any, None)
    recovery = Recovery(context, unused, unused)
    recovery.reason = "rollback to step 20"
    recovery.stop("run-1", Command(rid="r", id="c-1", verb="stop", by="anna"))
    assert ended == [("run-1", "stopped", "rollback to step 20")]
    with RecordReader(paths) as reader:
        (event,) = [one for one in reader.events(0, 10)[0] if isinstance(one.data, RunStateChanged)]
    assert (event.data.after, event.by, event.command, event.step) == ("stopped", "anna", "c-1", 0)
    assert restore.rollback_step(paths) is None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_doubles_until_it_is_given_up():
    backoff = Backoff(clock := Clock())
    waits = []
    while (due := backoff.take("run-1", 40)) is not None:
        waits.append(due - clock.now)
        clock.now = due
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]


def test_a_run_that_got_further_or_was_forgotten_begins_to_count_again():
    backoff = Backoff(Clock())
    assert [backoff.take("run-1", step) for step in (40, 40, 40, 41)] == [1.0, 2.0, 4.0, 1.0]
    backoff.forget()
    assert backoff.take("run-1", 41) == 1.0


def test_one_that_cannot_be_taken_up_is_tried_again():
    backoff = Backoff(Clock())
    assert backoff.again() is None, "none has gone back"
    due = [backoff.take("run-1", 40), *(backoff.again() for _ in range(5))]
    assert due == [1.0, 2.0, 4.0, 8.0, 16.0, None]


def test_waiting_for_nodes_is_no_try():
    backoff = Backoff(clock := Clock())
    assert backoff.take("run-1", 40) == 1.0
    assert backoff.held_seconds == 0.0
    for _ in range(30):
        due = backoff.hold()
        assert due == clock.now + 1.0
        clock.now = due
    assert backoff.held_seconds == 30.0
    assert backoff.again() == clock.now + 2.0
    assert backoff.held_seconds == 0.0
