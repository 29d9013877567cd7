"""A run from a run file to its last step, seen through the agent: record, history, live messages, resume."""

import math
import os
import re
import shutil
import signal
from collections.abc import Iterator

import pytest
from tests.asking import newest_events, run_of
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess, keep_processes
from tests.integration.support.reference import one_rank_curve
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record.checkpoints import newest_complete
from trainctl.protocol.record.reader import RecordReader


@pytest.fixture(scope="module")
def lasting_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path_factory.mktemp("runs") / "state").start()
    keep_processes()
    yield process
    process.clean_up()


@pytest.fixture
def agent(lasting_agent: AgentProcess) -> Iterator[AgentProcess]:
    """One for all tests of this module, each of which ends its run."""
    yield lasting_agent
    lasting_agent.check()
    until(lambda: not lasting_agent.trainer_pids(), 20, "the trainers' end")


@pytest.mark.tier("test")
def test_a_run_trains_to_its_end_and_every_step_is_in_the_record_and_live_without_a_gap(agent, run_config):
    with agent.client() as client:
        config = run_config(evaluate__every_steps=10)
        sent = client.send("start-run", {"config": config}, wait="accepted")
        base, *seqs = numbers_to_the_end(client)
        assert seqs == list(range(base + 1, base + 1 + len(seqs)))
        kept = client.ask(m.GapRequest, boot="other", first_seq=1, last_seq=2)
        assert not kept.complete
        begun = client.send("start-run", {"config": config}, id=sent.id)
        assert (begun.state, begun.step) == ("applied", 1)
        view = wait_for_end(client)
        steps = all_steps(client)
        history = client.ask(m.HistoryRequest, view.run, ("loss", "own_tokens_per_second", "eval_loss"), columns=10)
        events = newest_events(client)
        (listed,) = [run for run in client.ask(m.RunsRequest).runs if run.run == view.run]
        log = client.ask(m.LogRequest)
    assert view.state == "finished"
    assert [step.step for step in steps] == list(range(1, 31))
    assert steps[-1].loss < steps[0].loss
    assert all(step.cursor == 12 * step.step for step in steps)
    assert math.isclose(steps[-1].tokens_total, sum(step.weight for step in steps))
    left = [[step.values[f"time_left{case}_seconds"] for case in ("_best", "", "_worst")] for step in steps]
    assert all(best <= expected <= worst for best, expected, worst in left)
    assert left[-1][1] < left[10][1], "one evaluation is left, of three"
    assert all(step.values["run_tflops"] > 0 for step in steps)
    assert [series.metric for series in history.series] == ["loss", "own_tokens_per_second", "eval_loss"]
    assert max(len(series.steps) for series in history.series) <= 10
    assert {event.kind for event in events} >= {"run", "command", "evaluation"}
    assert (listed.state, listed.step) == ("finished", 30)
    assert log.size_bytes >= len(log.text.encode())
    with RecordReader(agent.run_paths(view.run)) as reader:
        assert len(reader.rank_steps(30)) == 1
    assert not agent.trainer_pids()


def numbers_to_the_end(client: BlockingClient) -> list[int]:
    """Return the numbers of the snapshot that a client begins with, and of the live messages after it until the run has
    finished."""
    numbers = []
    for message in client.attach(columns=20):
        if isinstance(message, m.Snapshot | m.Live):
            numbers.append(message.seq)
        if isinstance(message, m.RunView) and message.state == "finished":
            break
    return numbers


@pytest.mark.timeout(240)
def test_resume_goes_on_as_if_never_stopped_and_never_changed_after_the_checkpoint(agent, run_config):
    """Steps after the checkpoint are retracted and redone; on torch to the same losses, bit for bit. What a command
    changed at one of them is undone with it, and the events say so. A stop that has one written undoes nothing. Before
    there is a checkpoint its trainer stands still for a while, and at the end it is lost."""
    config = run_config(run__steps=100_000)
    with agent.client() as client:
        client.send("start-run", {"config": config}, wait="accepted")
        run = wait_for_step(client, 3).run.run
        stand_still(agent, client)
        written = client.send("checkpoint", {}).step
        wait_for_step(client, written + 1)
        rate = client.ask(m.StepsRequest, after_step=written, limit=1).steps[0].learning_rate
        changed = client.send("set-lr", {"value": 1e-5, "schedule": "set"})
        wait_for_step(client, changed.step + 2)
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
        before = [step.loss for step in all_steps(client)]
        again = client.send("start-run", {"resume": run})
        assert again.step == written + 1 < changed.step
        assert client.ask(m.StepsRequest, after_step=written, limit=1).steps[0].learning_rate == rate
        assert any("undone" in event.text for event in newest_events(client))
        stopped = client.send("stop", {})
        assert wait_for_end(client).state == "stopped"
        found = newest_complete(agent.run_paths(run).checkpoints)
        assert found is not None
        assert found.name == f"step-{stopped.step}"
        again = client.send("start-run", {"resume": run})
        assert (again.state, again.step, again.run) == ("applied", stopped.step + 1, run)
        last = wait_for_step(client, changed.step).run.step
        steps = all_steps(client)
        stop_while_it_waits(agent, client)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1)) and len(steps) >= last
    losses = [step.loss for step in steps[: changed.step]]
    assert losses[:-1] == before[: changed.step - 1]
    assert losses == pytest.approx([step.loss for step in one_rank_curve(config, changed.step)], rel=1e-5)


def stand_still(agent: AgentProcess, client: BlockingClient) -> None:
    """The only trainer is shown as hung, and goes on."""
    (pid,) = agent.trainer_pids()
    os.kill(pid, signal.SIGSTOP)
    try:
        rank = until(lambda: next((r for r in run_of(client).ranks if r.state == "hung"), None), 20)
        why = r"silent in \w+ of step \d+; no other rank has the run's state; there is no checkpoint"
        assert re.fullmatch(why, rank.why)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: run_of(client).ranks[0].state == "run", 20)


def stop_while_it_waits(agent: AgentProcess, client: BlockingClient) -> None:
    """The only trainer is lost, and the run stopped before it goes back to its checkpoint."""
    (pid,) = agent.trainer_pids()
    os.kill(pid, signal.SIGKILL)
    until(lambda: run_of(client).state == "starting", 20, "its going back")
    stop = client.send("stop", {"checkpoint": False})
    assert stop.state == "applied", stop
    view = wait_for_end(client)
    assert (view.state, view.step) == ("stopped", stop.step)
    until(lambda: not agent.trainer_pids(), 20, "the trainer's end")


def test_weights_that_are_no_safetensors_start_no_run(agent, run_config, tmp_path, small_assets):
    model = tmp_path / "broken"
    shutil.copytree(small_assets / "model", model)
    (model / "model.safetensors").write_bytes(b"not weights")
    with agent.client() as client:
        before = client.ask(m.RunsRequest).runs
        reply = client.send("start-run", {"config": run_config(model__path=str(model))})
        assert (reply.state, reply.field) == ("rejected", "config: model.path")
        assert client.ask(m.RunsRequest).runs == before
