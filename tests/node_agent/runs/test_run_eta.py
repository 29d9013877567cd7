"""A run's parts beside its calibration, its costs and its time left, by what is committed."""

import time
from typing import Any

import msgspec
import pytest
from tests.asking import run_of
from tests.cluster.in_process import blocking_cluster
from tests.cluster.run_files import FOREVER, on
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.node_agent.support.records import part, step
from tests.node_agent.support.simulated_ranks import SimRank, SimWorld
from tests.node_agent.support.simulation import config, durable
from tests.waiting import until

from trainctl.node_agent.planning import plans
from trainctl.node_agent.records.keys import ETA_KEY, OWN_KEYS
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs.figures import KeptEta, Links, RunEta, compared, group_links
from trainctl.protocol import messages as m
from trainctl.protocol.batch.cost import spent_by
from trainctl.protocol.calibration.profile import LinkRate, Pass, ProfileSummary
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import cluster_file
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
    assert facts(recorder).facts.lost_seconds == pytest.approx(45.0)


def test_a_pause_and_a_wait_are_no_fault(recorder):
    commits = Commits(recorder)
    commits.until(100)
    for state, reason in (("paused", ""), ("running", ""), ("running", "waits for data"), ("running", "")):
        commits.eta.look(state, reason, commits.now)
        commits.now += 500.0 if state == "paused" or reason else 0.0
    commits.generation = commits.generation.next()
    commits.one(101)
    assert facts(recorder).facts.lost_seconds == pytest.approx(0.0)


def test_steps_undone_are_a_return(recorder):
    commits = Commits(recorder)
    commits.until(100)
    commits.generation = commits.generation.next()
    made = commits.until(80, 80)
    assert facts(recorder).facts.lost_seconds == pytest.approx(21.0), "steps 80 to 100 are made again"
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


LINK = LinkRate("a", 1e8, 1e8)
PROFILE = ProfileSummary(created_at=0.0, passes=(Pass(8, 0.2), Pass(16, 0.4)), links=(LINK,))
READY = msgspec.structs.replace(SimRank(0, SimWorld(0)).ready(), profile=PROFILE)


def test_the_speed_is_relative_to_the_calibrated_passes() -> None:
    phases = m.Phases(forward=0.25, backward=0.5)
    values = compared(msgspec.structs.replace(part(1), phases=phases), READY, Links()).values
    assert values["calibrated_speed"] == pytest.approx(0.6 / 0.75)


def test_the_sum_is_relative_to_the_calibrated_links() -> None:
    row = msgspec.structs.replace(part(1), phases=m.Phases(sync=0.5), values={"sum_bytes": 2e7})
    assert compared(row, READY, Links(2, (LINK,))).values["link_use"] == pytest.approx(0.2 / 0.5)
    assert "link_use" not in compared(row, READY, Links(2)).values


def test_links_count_only_if_each_is_calibrated() -> None:
    nodes = {0: "a", 1: "b", 2: "b"}
    assert group_links(nodes, {2: PROFILE}, "a") == Links(3, (LINK,))
    assert group_links({**nodes, 3: "c"}, {2: PROFILE}, "a") == Links(4)
    assert group_links({0: "a", 1: "a"}, {}, "a") == Links(2)


def test_without_a_calibration_the_part_stays_as_it_is() -> None:
    row = part(1)
    assert compared(row, None, Links()) is row
    assert compared(row, msgspec.structs.replace(READY, profile=None), Links()) is row


PER_SECOND = 3600
"""A price by which a second costs 1."""


def cost_of(client: BlockingClient) -> m.RunCost:
    view = run_of(client)
    assert view is not None and view.cost is not None
    return view.cost


def test_a_price_that_comes_while_a_run_trains_counts_from_its_start_and_not_while_it_is_away(tmp_path, run_config):
    with blocking_cluster(tmp_path) as free:
        with free.client("alpha") as client:
            config = run_config(run__steps=FOREVER, nodes=on("alpha"))
            run = client.send("start-run", {"config": config}).run
            first = wait_for_step(client, 3)
            assert first.run.cost is None and "cost" not in first.last_step.values
        alpha = free["alpha"].inner
        priced = free.file.read_text().replace("[nodes.alpha]\n", f"[nodes.alpha]\nprice_per_hour = {PER_SECOND}\n")
        free.file.write_text("currency = 'EUR'\n" + priced)
        alpha.cluster = cluster_file.read(free.file)
        free["alpha"].kill()
        free["alpha"].start()
        with free.client("alpha") as client:
            step = wait_for_step(client, first.run.step + 5).last_step
            found, now = cost_of(client), time.time()
            assert (found.currency, found.per_hour, found.unpriced) == ("EUR", PER_SECOND, ())
            assert first.last_step.step_seconds < spent_by(found, now) <= now - first.run.started_at + 1
            assert 0 < step.values["cost"] <= spent_by(found, now)
            assert client.send("pause", {}).state == "applied"
            assert cost_of(client).per_hour == PER_SECOND
            client.send("stop", {"checkpoint": True})
            wait_for_end(client)
            ended = until(lambda: (cost := cost_of(client)).per_hour == 0 and cost, 30, "the end of the cost")
            began = time.time()
            assert client.send("start-run", {"resume": run}).state == "applied"
            wait_for_step(client, step.step + 2)
            again = spent_by(cost_of(client), time.time())
            assert ended.spent < again <= ended.spent + time.time() - began + 1
            (kept,) = [one for one in client.ask(m.RunsRequest).runs if one.run == run]
            assert kept.cost is not None and kept.cost.per_hour == PER_SECOND and kept.cursor
