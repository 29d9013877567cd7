"""A whole run as it is read: sums over the steps that stand, of a record with a step that was made again."""

import math
from pathlib import Path

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import NoteWritten
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.whole_run import CurvePoint, PlanSpan, WholeRunReader

STEPS = 300


def commit(recorder: RunDb, step: int, n: int, syncs: tuple[float, ...], loss: float, version: int) -> None:
    generation = m.Generation(1, n)
    made = m.StepCommitted(
        run="run-1", generation=generation, step=step, committed_at=float(step), loss=loss, weight=8.0, samples=8,
        learning_rate=1e-3, grad_norm=1.0, cursor=8 * step, global_batch=8, plan_version=version, step_seconds=2.0,
        tokens_total=8.0 * step, tokens=8, weight_total=8.0 * step, seconds_total=2.0 * step,
    )  # fmt: skip
    parts = [
        m.RankStep(
            run="run-1", generation=generation, step=step, rank=rank, node=f"n{rank}", tokens=4.0, samples=4,
            micro_batch=4, replays=0, step_seconds=2.0, phases=m.Phases(0.0, 0.5, 0.5, sync, 0.25, 0.125),
        )
        for rank, sync in enumerate(syncs)
    ]  # fmt: skip
    recorder.commit(made, parts, float(step))


def test_sums_leave_out_retracted_steps_and_waits_are_apart(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run-1")
    paths.directory.mkdir()
    with RunDb(paths, resumable=False) as recorder:
        for step in range(1, STEPS + 1):
            commit(recorder, step, 1, (0.25, 0.75), 2.0, 1 + (step > 200))
        commit(recorder, STEPS, 2, (0.5,), math.nan, 3)  # made again by one rank
        for number in range(700):
            recorder.event(1.0, NoteWritten(str(number)), "info", "anna")
    with WholeRunReader(paths) as reader:
        first, second = reader.rank_totals()
        assert (first.node, first.steps, first.samples, first.seconds) == ("n0", STEPS, 4 * STEPS, 2.0 * STEPS)
        assert (first.phases.sync, first.phases.wait) == (0.25 * (STEPS - 1) + 0.5, 0.125 * STEPS)
        assert (second.steps, second.phases.sync) == (STEPS - 1, 0.25 * (STEPS - 1))
        assert second.phases.wait == 0.625 * (STEPS - 1)
        assert reader.plan_spans() == (PlanSpan(1, 1, 200), PlanSpan(2, 201, STEPS - 1), PlanSpan(3, STEPS, STEPS))
        *curve, last = reader.curve()
        assert curve == [CurvePoint(step, 2.0, 8 * step) for step in range(1, STEPS)]
        assert last.loss is not None and math.isnan(last.loss)
        assert [(made.step, made.seconds) for made in reader.commits() if made.retracted] == [(STEPS, 2.0)]
        events = reader.all_events()
        assert [event.text for event in events] == [str(number) for number in range(700)]
        assert reader.all_events(events[-2].id) == events[-1:]
