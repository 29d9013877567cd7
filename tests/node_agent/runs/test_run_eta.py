"""A run's time left by what is committed: evaluations, checkpoints and faults between steps, pauses, and restarts."""

from typing import Any

import msgspec
import pytest
from tests.node_agent.support.records import step
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.planning import plans
from trainctl.node_agent.records.keys import ETA_KEY, OWN_KEYS
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs.figures import KeptEta, RunEta
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths


@pytest.fixture
def recorder(tmp_path):
    (tmp_path / "run-1").mkdir()
    with RunDb(RunPaths(tmp_path / "run-1")) as made:
        yield made


class Commits:
    """Steps of a second each, and what passes between them."""

    def __init__(self, recorder: RunDb, held_out: int = 0, **tables: Any) -> None:
        self.eta, self.held_out = RunEta(recorder, config(1000, 12, **tables)), held_out
        self.recorder, self.now, self.generation = recorder, 1000.0, m.Generation(1, 1)

    def until(self, last: int, first: int = 1, **fields: Any) -> m.StepCommitted:
        for number in range(first, last + 1):
            made = self.one(number, **fields)
        return made

    def one(self, number: int, **fields: Any) -> m.StepCommitted:
        self.now += 1.0
        row = msgspec.structs.replace(
            step(number), step_seconds=1.0, samples=12, generation=self.generation, **fields
        )  # fmt: skip
        made = self.eta.with_time_left(row, self.held_out, self.now)
        self.recorder.commit(made, [], made.committed_at)
        return made

    def plan(self, kind: str, after: int, seconds: float) -> None:
        maker = plans.PlanMaker("sim", durable(("a", "b"), 12), config(20, 12), after, 12 * after)
        made = maker.evaluate(24) if kind == "evaluate" else maker.checkpoint()
        self.eta.issued(made)
        self.now += seconds


def left(row: m.StepCommitted) -> float:
    return row.values["time_left_seconds"]


def facts(recorder: RunDb) -> KeptEta:
    return msgspec.json.decode(recorder.meta(ETA_KEY) or "", type=KeptEta)


def test_each_step_has_its_time_left(recorder):
    made = Commits(recorder).until(100)
    assert left(made) == pytest.approx(900, rel=0.1)
    assert made.values["time_left_best_seconds"] < left(made) < made.values["time_left_worst_seconds"]


def test_an_evaluation_is_measured_by_what_passes_beside_the_step(recorder):
    commits = Commits(recorder, held_out=24, evaluate={"every_steps": 50})
    commits.until(50)
    commits.plan("evaluate", 50, 30.0)
    made = commits.one(51)
    assert facts(recorder).facts.plans == {"evaluate": pytest.approx((30.0,))}
    assert left(made) == pytest.approx(949 + 19 * 30, rel=0.1)


def test_a_group_that_forms_again_is_a_fault(recorder):
    commits = Commits(recorder)
    commits.until(100)
    commits.now += 45.0
    commits.generation = commits.generation.next()
    commits.one(101)
    faults = facts(recorder).facts.faults
    assert (faults.events, faults.total) == (1, pytest.approx(45.0))


def test_a_pause_and_a_wait_are_no_fault(recorder):
    commits = Commits(recorder)
    commits.until(100)
    for state, reason in (("paused", ""), ("running", ""), ("running", "waits for data"), ("running", "")):
        commits.eta.look(state, reason, commits.now)
        commits.now += 500.0 if state == "paused" or reason else 0.0
    commits.generation = commits.generation.next()
    commits.one(101)
    assert facts(recorder).facts.faults.total == pytest.approx(0.0)


def test_steps_undone_are_a_return(recorder):
    commits = Commits(recorder)
    commits.until(100)
    commits.generation = commits.generation.next()
    made = commits.until(80, 80)
    assert facts(recorder).facts.returns == 1
    assert left(made) > 920


def test_another_agent_goes_on_from_the_record(recorder):
    commits = Commits(recorder, held_out=24, evaluate={"every_steps": 50})
    commits.until(50)
    commits.plan("evaluate", 50, 30.0)
    before = commits.until(60, 51)
    commits.eta.close()
    assert ETA_KEY not in OWN_KEYS
    again = Commits(recorder, held_out=24, evaluate={"every_steps": 50})
    assert left(again.one(61)) == pytest.approx(left(before) - 1, rel=0.02)
