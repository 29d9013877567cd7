"""Where a run's time went, and what its faults cost: by its commits, whatever its events say of themselves."""

import dataclasses
import itertools
from collections.abc import Sequence

import pytest

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.rollups import Evaluation
from trainctl.protocol.record.whole_run import Commit
from trainctl.tui.report.run_facts import Incident
from trainctl.tui.report.timeline import Recorded, Timeline, incidents, time_parts

GENERATION = m.Generation(1, 2)
FORMED = e.GenerationFormed(GENERATION, 2, waited_seconds=0.1)
HUNG = e.RankChanged(("b",), "hung", "silent")
PAUSED, RESUMED = e.RunStateChanged("running", "paused"), e.RunStateChanged("paused", "running")
STOPPED = e.RunStateChanged("running", "stopped")


def commit(step: int, at: float, seconds: float = 1.0, *, retracted: bool = False) -> Commit:
    return Commit(step, at, seconds, retracted)


STEADY = tuple(commit(step, float(step)) for step in range(1, 11))
"""Ten steps of a second each."""


def happened(*found: tuple[float, e.AnyEvent], step: int | None = None) -> list[m.Event]:
    return [m.Event(number, at, "info", "auto", data, step=step) for number, (at, data) in enumerate(found, 1)]


def line_of(
    commits: Sequence[Commit], events: Sequence[m.Event], read_to: float, *, started_at: float = 0.0,
    evaluations: Sequence[Evaluation] = (),
) -> Timeline:  # fmt: skip
    return Timeline(Recorded(started_at, read_to, commits, events, evaluations))


def costs(commits: Sequence[Commit], events: Sequence[m.Event], read_to: float = 100.0) -> list[Incident]:
    return incidents(events, line_of(commits, events, read_to), lambda event: event.step or 0, lambda event: None)


def parts(line: Timeline, events: Sequence[m.Event]) -> dict[str, float]:
    """Each part by name; together they are the whole time."""
    found = {part.name: part.seconds for part in time_parts(line, events, 0)}
    assert sum(found.values()) == pytest.approx(line.seconds) and min(found.values()) > 0
    return found


@pytest.mark.parametrize("waited", [0.1, None])
def test_a_fault_costs_the_time_to_notice_it_too(waited: float | None) -> None:
    events = happened((40.0, HUNG), (41.0, e.GenerationFormed(GENERATION, 2, waited_seconds=waited)))
    (found,) = costs((*STEADY, commit(11, 43.0)), events)
    assert found.waited_seconds == pytest.approx(43.0 - 1.0 - 10.0)


def test_a_step_that_a_rank_hung_in_costs_what_it_took_longer() -> None:
    (found,) = costs((*STEADY, commit(11, 41.0, 31.0)), happened((40.0, e.RankChanged(("b",), "slow", "for 30 s"))))
    assert found.waited_seconds == pytest.approx(30.0)


def test_a_fault_doesnt_cost_the_time_of_a_pause_or_a_stop() -> None:
    events = happened((12.0, HUNG), (20.0, PAUSED), (30.0, RESUMED), (31.0, FORMED))
    (found,) = costs((*STEADY, commit(11, 33.0)), events)
    assert found.waited_seconds == pytest.approx(22.0 - 10.0)
    (found,) = costs((*STEADY, commit(11, 33.0)), happened((12.0, HUNG), (15.0, STOPPED), (31.0, FORMED)))
    assert found.waited_seconds == pytest.approx(5.0)


def test_a_fault_before_the_first_or_after_the_last_step() -> None:
    (found,) = costs((commit(1, 30.0),), happened((5.0, HUNG), (20.0, FORMED)))
    assert found.waited_seconds == pytest.approx(15.0)
    (found,) = costs(STEADY, happened((15.0, HUNG), (45.0, STOPPED)))
    assert found.waited_seconds == pytest.approx(35.0)
    (found,) = costs(STEADY, happened((15.0, HUNG)))
    assert found.waited_seconds is None


def test_what_stops_no_rank_costs_no_time() -> None:
    (found,) = costs((*STEADY, commit(11, 43.0)), happened((12.0, e.RecordState("the disk is full"))))
    assert found.waited_seconds is None


def test_steps_in_a_row_that_skipped_their_update_are_one_row() -> None:
    skipped = [
        m.Event(step, step + 0.5, "warning", "auto", e.StepSkipped(step, "nan"), step=step) for step in (2, 3, 4, 7)
    ]
    found = costs(STEADY, skipped)
    assert [one.texts for one in found] == [
        ("steps 2 to 4 skipped their update: nan",), ("step 7 skipped its update: nan",),
    ]  # fmt: skip
    other = [*skipped[:2], m.Event(9, 4.5, "warning", "auto", e.StepSkipped(4, "overflow"), step=4)]
    assert [one.step for one in costs(STEADY, other)] == [2, 4]


WENT_BACK = (*STEADY[:5], *(commit(step, float(step), retracted=True) for step in range(6, 9)),
             *(commit(step, step + 20.0) for step in range(6, 9)))  # fmt: skip


def test_steps_made_again_are_of_the_fault_that_took_them_back() -> None:
    events = happened((9.0, HUNG), (10.0, e.RunStateChanged("running", "going back")), (24.0, FORMED), (27.5, HUNG))
    first, second = costs(WENT_BACK, events)
    assert (first.steps_again, first.seconds_again, second.steps_again) == (3, 3.0, 0)
    assert first.waited_seconds == pytest.approx(17.0)
    (later,) = costs(WENT_BACK, happened((9.0, STOPPED), (27.5, HUNG)))
    assert later.steps_again == 0
    (left,) = costs(WENT_BACK[:8], happened((9.0, HUNG)))
    assert left.steps_again == 3


def test_a_resumed_run_began_when_it_was_first_started() -> None:
    """A record's start is renewed with each resume."""
    events = happened((0.0, FORMED), (9.0, STOPPED))
    line = line_of(WENT_BACK, events, 30.0, started_at=15.0)
    assert (line.began_at, line.seconds) == (0.0, 30.0)
    found = parts(line, events)
    assert found == pytest.approx(
        {"steps": 8.0, "steps made again": 3.0, "between a stop and a resume": 16.0, "after the last step": 2.0,
         "other": 1.0}
    )  # fmt: skip
    started = parts(line_of(WENT_BACK, (), 30.0, started_at=-4.0), ())
    assert started["start"] == pytest.approx(4.0)


def test_a_checkpoint_of_several_nodes_counts_once() -> None:
    written = (e.CheckpointWritten(3, 1, 0.25), e.CheckpointWritten(3, 1, 0.75), e.CheckpointWritten(3))
    commits = (*STEADY[:3], *(commit(step, step + 1.0) for step in range(4, 8)))
    events = happened(*((3.9, data) for data in written))
    line = line_of(commits, events, 8.0)
    assert [data.loop_seconds for _, data in line.checkpoints] == [0.75]
    assert parts(line, events)["checkpoints"] == pytest.approx(0.75)
    again = happened((7.5, written[0]), (26.9, written[0]), (27.5, e.CheckpointWritten(7, 1, 0.5)))
    assert len(line_of(WENT_BACK, again, 30.0).checkpoints) == 2


def test_an_evaluation_that_other_ranks_wait_for_in_their_step_counts_once() -> None:
    """It is in the time of the next step, too."""
    evaluated = [Evaluation(5, 5.6, 2.0, 1.0, 0.5)]
    found = parts(line_of(STEADY, (), 10.0, evaluations=evaluated), ())
    assert found == pytest.approx({"steps": 9.5, "evaluations": 0.5})


def test_what_was_evaluated_at_a_step_that_was_taken_back_doesnt_stand() -> None:
    line = line_of(WENT_BACK, (), 30.0)
    assert [line.stands(*one) for one in ((0, 0.0), (5, 5.5), (7, 7.5), (7, 27.5))] == [True, True, False, True]


def test_the_parts_of_every_gap_are_its_whole_time() -> None:
    events = happened((0.5, FORMED), (2.2, PAUSED), (12.9, RESUMED), (14.0, HUNG), (15.0, STOPPED))
    commits = (commit(1, 2.0, 1.5), commit(2, 13.0, 0.5), commit(3, 14.5, 2.5), commit(4, 30.0, 0.5))
    line = line_of(commits, events, 31.0)
    ends = [0.0, 2.0, 13.0, 14.5, 30.0, 31.0]
    for gap, (since, until) in zip(line.gaps, itertools.pairwise(ends), strict=True):
        seconds = dataclasses.astuple(gap)
        assert min(seconds) >= 0 and sum(seconds) == pytest.approx(until - since)
    assert parts(line, events)["pauses"] == pytest.approx(12.5 - 2.2)
