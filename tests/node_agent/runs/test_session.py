"""A session's turns: what one event leads to is carried out wholly before anything of the next event is."""

import asyncio
import threading
import time

import msgspec
import pytest
import zmq
from tests.node_agent.support.loaded_session import LoadedSession, Port
from tests.node_agent.support.records import FIRST, part, plan, report, rows, step
from tests.node_agent.support.simulation import config
from tests.trainer.support.synced_disk import SyncedDisk
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.state import Progress
from trainctl.node_agent.planning.durable import Writing
from trainctl.node_agent.records.replication import Copies
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs.session import LedRun, RunListener, Session
from trainctl.node_agent.trainers.rank_ports import Ending
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import Pass, ProfileSummary
from trainctl.protocol.config.cluster_file import Prices
from trainctl.protocol.messages import verbs
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader


@pytest.fixture
def told(tmp_path, request):
    """A loaded session; a test's parameter is its prices."""
    (tmp_path / "run-1").mkdir()
    context = zmq.Context()
    publisher = Publisher(context.socket(zmq.XPUB), "b" * 16)
    made = LoadedSession(RunPaths(tmp_path / "run-1"), publisher, getattr(request, "param", Prices()))
    yield made
    made.session.close()
    context.destroy(linger=0)


priced = pytest.mark.parametrize("told", [Prices("EUR", {"a": 2.0, "b": 1.0})], indirect=True)
FORMS, FENCES = [(rank, "Form") for rank in range(3)], [(rank, "Fence") for rank in range(3)]


async def test_what_one_event_leads_to_is_carried_out_before_the_next_event_is_taken(told):
    await told.load()
    for rank in (0, 1):
        await told.session.feed(told.offered(rank))
    await asyncio.gather(told.session.feed(told.offered(2)), told.session.feed(told.failed()))
    assert told.orders == FORMS + FENCES


async def test_a_caller_that_is_cancelled_leaves_nothing_half_done(told):
    await told.load()
    for rank in (0, 1):
        await told.session.feed(told.offered(rank))
    caller = asyncio.create_task(told.session.feed(told.offered(2)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert told.orders != FORMS
    await told.session.feed(d.Ticked())
    assert told.orders == FORMS


async def test_a_command_that_waited_for_its_turn_while_the_session_was_closed_still_ends(told):
    await told.load()
    for rank in range(3):
        await told.session.feed(m.TrainerFailed(run="sim", rank=rank, reason="no such device"))
    for rank in range(3):
        await told.session.feed(d.RankEnded(rank, False, "exited with 1"))
    assert told.session.ended is not None
    pause = d.Commanded("c1", "pause", verbs.check("pause", {}), "anna", None, None, float("inf"))
    waiting = asyncio.create_task(told.session.feed(pause))
    told.session.close()
    await waiting
    assert [end.state for end in told.ends] == ["rejected"]


async def test_a_rank_whose_agent_has_just_come_back_is_not_taken_for_hung(told):
    await told.load()
    now, port = time.monotonic(), told.session.ports[2]
    told.session._watching_since = told.conductor.ranks[2].heard = now - 60.0
    port.reached_monotonic = now - 1.0
    await told.session.watch_trainers()
    assert 2 not in told.session._away
    port.reached_monotonic = now - 60.0
    await told.session.watch_trainers()
    assert told.session._away == {2: "silent"}


def kept_rows(told: LoadedSession) -> list[tuple[object, ...]]:
    told.session.recorder.flush()
    return rows(told.session.paths, "SELECT step, rank FROM rank_steps ORDER BY step, rank")


async def test_a_report_that_comes_after_its_plan_was_given_up_is_in_the_record(told):
    """As of a rank that is lost, and had made the step that the others went on from."""
    await told.load()
    await told.session._carry_out(d.Commit(step(1), part(1)))
    await told.session.feed(report(2, micro_batch=2))
    assert kept_rows(told) == [(1, 0), (1, 2)]


async def test_a_report_that_comes_before_its_step_is_committed_is_in_the_record_with_it(told):
    await told.load()
    await told.session.feed(report(2, micro_batch=2))
    assert kept_rows(told) == []
    await told.session._carry_out(d.Commit(step(1), part(1)))
    assert kept_rows(told) == [(1, 0), (1, 2)]


async def test_what_a_trainer_that_has_ended_kept_of_its_steps_is_in_the_record(told):
    await told.load()
    await told.session._carry_out(d.Commit(step(1), part(1)))
    port = told.session.ports[1]
    port.ending, port.reported = Ending(False, "was ended by signal 9"), [report(1, micro_batch=2)]
    await told.session.watch_trainers()
    assert kept_rows(told) == [(1, 0), (1, 1)]


@priced
async def test_the_view_has_the_run_s_cost_until_its_ranks_have_ended(told):
    await told.load()
    found = told.session.view.cost
    assert (found.currency, found.per_hour, found.unpriced) == ("EUR", 3.0, ("c",))
    for rank in range(3):
        await told.session.feed(m.TrainerFailed(run="sim", rank=rank, reason="no such device"))
    for rank in range(3):
        await told.session.feed(d.RankEnded(rank, False, "exited with 1"))
    assert (told.session.view.state, told.session.view.cost.per_hour) == ("failed", 0.0)


@priced
async def test_a_step_is_kept_with_its_cost_also_when_parts_of_it_come_later(told):
    made = msgspec.structs.replace(step(1), committed_at=time.time() + 3600)
    await told.load()
    await told.session._carry_out(d.Commit(made, part(1)))
    await told.session._carry_out(d.RankDone(part(1, rank=1), made))
    told.session.recorder.flush()
    with RecordReader(told.session.paths) as reader:
        kept = reader.last_step()
    for found in (kept, told.session.last_step):
        assert (found.values["cost"], found.values["cost_per_hour"]) == (pytest.approx(3.0, abs=0.01), 3.0)
    assert kept_rows(told) == [(1, 0), (1, 1)]


def test_a_session_continues_the_statistics_of_the_record(tmp_path):
    paths = RunPaths(tmp_path / "run-1")
    paths.directory.mkdir()
    with RunDb(paths) as recorder:
        for number in range(1, 100):
            recorder.commit(step(number, FIRST), [], 1.0)
    context = zmq.Context()
    told = LoadedSession(paths, Publisher(context.socket(zmq.XPUB), "b" * 16))
    made = d.Commit(step(100, FIRST), part(100, 0, FIRST))
    asyncio.run(told.session._carry_out(made))
    told.session.close()
    context.destroy(linger=0)
    with RunDb(paths) as recorder:
        last = recorder.last_state().step
    assert last is not None
    assert {"clip_scale", "loss_std", "loss_trend", "grad_norm_trend"} <= last.values.keys()


def test_a_rank_s_part_says_how_much_of_its_device_s_peak_it_reached(told):
    asyncio.run(told.load())
    rank = told.conductor.ranks[0]
    profile = ProfileSummary(created_at=0.0, passes=(Pass(1, 1.0),), gflops={"float32": 500.0})
    measured = msgspec.structs.replace(part(1), values={"tflops": 0.1})
    rank.ready = msgspec.structs.replace(rank.ready, compute=m.Compute("float32"), profile=profile)
    assert told.session._joined(measured).values == {"tflops": 0.1, "matmul_use": pytest.approx(0.2)}
    rank.ready = msgspec.structs.replace(rank.ready, device="cuda:0 NVIDIA H200", compute=m.Compute("bfloat16"))
    assert told.session._joined(measured).values == {"tflops": 0.1, "mfu": pytest.approx(0.1 / 989)}
    rank.ready = None
    assert told.session._joined(measured) is measured


def checkpoint_plan(told: LoadedSession, seq: int = 1) -> m.StepPlan:
    made = plan(seq, told.conductor.durable.generation)
    return msgspec.structs.replace(made, kind="checkpoint", step=1, writers=(0, 2), recorded=False)


async def heard(told: LoadedSession, count: int) -> None:
    """Wait until so many orders were sent."""
    async with asyncio.timeout(HANG_SECONDS):
        while len(told.orders) < count:
            await asyncio.sleep(0.01)


async def test_the_writers_of_a_checkpoint_hear_once_the_disk_has_the_record_up_to_its_step(told, tmp_path):
    await told.load()
    await told.session._carry_out(d.Issue(checkpoint_plan(told), told.conductor.durable))
    told.orders.clear()
    disk = SyncedDisk(tmp_path)
    with disk.recorded():
        await told.session.feed(d.Ticked())
        assert told.orders == []  # the step isn't committed yet
        told.conductor.progress.step = 1
        await told.session.feed(d.Ticked())
        await heard(told, 2)
    assert told.orders == [(0, "StepPlan"), (2, "StepPlan")]
    assert "run-1/record.db-wal" in {moment.path for moment in disk.moments if moment.call == "sync"}


async def test_no_writer_hears_of_a_checkpoint_whose_generation_was_left_meanwhile(told, monkeypatch):
    """A follower would take the word for that of a lead that has been replaced."""
    await told.load()
    await told.session._carry_out(d.Issue(checkpoint_plan(told), told.conductor.durable))
    for rank in (0, 1):
        await told.session.feed(told.offered(rank))
    told.orders.clear()
    told.conductor.progress.step = 1
    is_synced = threading.Event()
    monkeypatch.setattr(told.session.recorder, "sync", lambda: is_synced.wait(HANG_SECONDS))
    await told.session.feed(d.Ticked())
    (telling,) = told.session._telling
    failing = asyncio.create_task(told.session.feed(told.failed()))  # its turn comes first
    await asyncio.sleep(0)
    is_synced.set()
    await asyncio.gather(failing, telling)
    assert told.orders == FENCES


async def test_a_successor_tells_the_writers_of_the_checkpoint_that_was_begun(told):
    await told.load()
    made = checkpoint_plan(told, 7)
    told.session.recorder.plan(made, 0.0)
    kept = msgspec.structs.replace(
        told.conductor.durable, writing=Writing(made.generation, made.seq, made.step, made.writers)
    )
    orders: list[tuple[int, str]] = []
    conductor, copies = Conductor("sim", config(batch=12), kept, Progress(1)), Copies(told.session.recorder, {}, list)
    ports = {rank: Port(rank, orders) for rank in range(3)}
    paths, recorder, publisher = told.session.paths, told.session.recorder, told.session._publisher
    led = LedRun(conductor, paths, recorder, copies, ports, "a", publisher, 0.0)
    successor = Session(led, RunListener(told._end))
    await successor.feed(d.Ticked())
    async with asyncio.timeout(HANG_SECONDS):
        while len(orders) < 2:
            await asyncio.sleep(0.01)
    successor._eta.close()
    assert orders == [(0, "StepPlan"), (2, "StepPlan")]
