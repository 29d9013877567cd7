"""A record that another process has locked, or whose files are deleted: its run goes on, others notice nothing, one
alert says so, and nothing is lost."""

import statistics
import time
from collections.abc import Iterator

import pytest
from tests.asking import events_of, run_of
from tests.cluster.in_process import BlockingAgent
from tests.cluster.run_files import FOREVER
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.node_agent.support.processes import locked
from tests.waiting import until

from trainctl.node_agent.records import record_writer
from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.reader import RecordReader

LOCKED_SECONDS = 3.0
STATUS_SECONDS = 0.2
GUEST = "mine-1"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_writer, "BUSY_SECONDS", 0.5)


@pytest.fixture
def hosted(agent: BlockingAgent, run_config) -> Iterator[tuple[BlockingAgent, BlockingClient, str]]:
    with agent.client() as client:
        run = client.send("start-run", {"config": run_config(run__steps=FOREVER)}).run
        wait_for_step(client, 5)
        yield agent, client, run


def report(client: BlockingClient, first: int, last: int) -> list[float]:
    """Report steps of another program's run, and return how long each took to be taken."""
    seconds = []
    for number in range(first, last + 1):
        begun = time.perf_counter()
        step = m.GuestStep(step=number, committed_at=time.time(), step_seconds=0.01, loss=1.0)
        client.run_steps(GUEST, (step,))
        seconds.append(time.perf_counter() - begun)
    return seconds


def record_alerts(client: BlockingClient) -> list[m.AlertView]:
    return [alert for alert in client.ask(m.SnapshotRequest, 0).alerts.alerts if alert.kind == "record"]


def status_seconds(client: BlockingClient) -> float:
    begun = time.perf_counter()
    client.ask(m.SnapshotRequest, 0)
    return time.perf_counter() - begun


def check_steps(client: BlockingClient, run: str) -> None:
    client.send("stop", {"checkpoint": False})
    view = wait_for_end(client)
    assert view.state == "stopped"
    assert [step.step for step in until(lambda: all_steps(client, run))] == list(range(1, view.step + 1))


def test_a_lock_on_one_record_leaves_the_other_run_alone_and_loses_nothing(hosted) -> None:
    agent, client, run = hosted
    with agent.client() as other:
        other.attach_run(GUEST, "mine")
        report(other, 1, 50)
        with locked(agent.run_paths(run).record) as pid:
            begun, asked, taken = time.monotonic(), [], []
            step = run_of(client).step
            while time.monotonic() < begun + LOCKED_SECONDS:
                first = 51 + 10 * len(asked)
                taken += report(other, first, first + 9)
                asked.append(status_seconds(client))
            (alert,) = record_alerts(client)
            assert "record.db: locked by process" in alert.text and str(pid) in alert.text
            assert max(asked) < STATUS_SECONDS
            assert run_of(client).step > step, "it goes on"
        assert statistics.median(taken) < 0.05
        until(lambda: not agent.inner.agent._lead.session.recorder.is_behind, what="what waited")
        assert {alert.kind for alert in client.ask(m.SnapshotRequest, 0).alerts.alerts} <= {"record"}
        other.end_run(GUEST)
        check_steps(client, run)
        raised = [event.data for event in events_of(client, run) if isinstance(event.data, e.AlertRaised)]
        assert [data.id for data in raised] == ["record:box"]
        assert [step.step for step in all_steps(client, GUEST)] == list(range(1, 50 + 10 * len(asked) + 1))


def test_an_agent_that_restarts_while_a_record_is_locked_keeps_its_trainer_and_takes_the_run_up(hosted) -> None:
    agent, client, run = hosted
    (trainer,) = agent.trainers
    agent.stop()
    with locked(agent.run_paths(run).record) as pid:
        agent.start()
        (alert,) = until(lambda: record_alerts(client), what="the alert")
        assert f"locked by process {pid}" in alert.text
        (known,) = client.ask(m.RunsRequest).runs
        assert known.run == run and known.state in m.ACTIVE_RUN_STATES
        time.sleep(1.5)  # in which the trainer says that it lives
        assert agent.trainers == [trainer]
    step = until(lambda: (view := run_of(client)) and view.state == "running" and view.step, what="the run")
    wait_for_step(client, step + 5)
    assert agent.trainers == [trainer]
    check_steps(client, run)


def test_a_record_whose_files_are_deleted_is_written_again_at_once_and_says_so(hosted) -> None:
    agent, client, run = hosted
    for file in agent.run_paths(run).directory.glob("record.db*"):
        file.unlink()
    (alert,) = until(lambda: record_alerts(client), what="the alert")
    assert "record.db: its files were deleted or replaced" in alert.text and "written again" in alert.text
    wait_for_step(client, run_of(client).step + 5)
    check_steps(client, run)
    with RecordReader(agent.run_paths(run)) as reader:
        assert reader.events(0, 10)[0][0].id == 1
    assert agent.inner.is_running and client.ask(m.RunsRequest).runs[0].state == "stopped"
