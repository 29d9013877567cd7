"""Training needs none of its watchers: agents are killed, stand still or lose their log, and no step is lost."""

import contextlib
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.asking import events_of, newest_events, run_of
from tests.cluster.run_files import FOREVER, NODE, on_mlx
from tests.cluster.waits import all_steps, wait_for_checkpoint, wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.integration.support.reference import one_rank_curve
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.protocol.messages import events as e
from trainctl.protocol.messages.events import Notice
from trainctl.protocol.record.checkpoints import newest_complete
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.wire.codec import decode_order

STEPS = 150
"""Steps of a run that lasts longer than some resizes and kills."""


def test_resizes_and_an_agent_killed_again_and_again_leave_each_step_alone_and_a_client_sees_all(agent, run_config):
    """The undisturbed run's losses, step for step, to 1e-5 (promise 1 on one rank), and one trainer. The agent is first
    killed while that loads."""
    config = run_config(run__steps=STEPS)
    with agent.client() as client, ThreadPoolExecutor(1) as thread:
        sent = client.send("start-run", {"config": config}, wait="accepted")
        (pid,) = until(agent.trainer_pids, what="the trainer")
        agent.kill()
        agent.start()
        again = client.send("start-run", {"config": config}, id=sent.id)
        assert (again.state, again.step) == ("applied", 1)
        watched = thread.submit(watch_to_the_end, agent)
        wait_for_step(client, 2)
        assert agent.trainer_pids() == [pid]
        run = run_of(client).run
        for micro in (1, 12, 5, 2, 7):
            assert client.send("resize-batch", {"micro": micro}).state == "applied"
        chance = random.Random(7)
        for _ in range(4):
            time.sleep(chance.uniform(0.05, 0.4))
            agent.kill()
            time.sleep(chance.uniform(0.0, 0.3))
            agent.start()
            state = until(lambda: run_of(client))
            alive = agent.trainer_pids()
            if run_of(client).step == STEPS:
                break  # with nothing left to train, its trainer may have left before the run is "finished"
            assert alive == [pid]
            wait_for_step(client, min(state.step + 5, STEPS))
        assert wait_for_end(client).state == "finished"
        disturbed = all_steps(client, run)
        seen, states = watched.result(HANG_SECONDS)
    assert [step.step for step in disturbed] == list(range(1, STEPS + 1))
    losses = [step.loss for step in one_rank_curve(config)]
    assert [step.loss for step in disturbed] == pytest.approx(losses, rel=1e-5)
    assert seen == {step.step: step.loss for step in disturbed}
    assert states.count("connected") >= 2
    assert disturbed[-1].generation > disturbed[0].generation
    check_ledger(agent.run_paths(run), disturbed)


def watch_to_the_end(agent: AgentProcess) -> tuple[dict[int, float], list[str]]:
    """Return what a client that is attached until the run has finished sees: each step's loss, and how its line to the
    agent was."""
    seen: dict[int, float] = {}
    states = []
    with agent.client(timeout_seconds=2) as client:
        for item in client.attach(columns=2000):
            if isinstance(item, Connection):
                states.append(item.state)
            elif isinstance(item, m.Snapshot):
                (series,) = [series for series in item.series if series.metric == "loss"]
                seen |= dict(zip(series.steps, series.last, strict=True))
            elif isinstance(item, m.StepCommitted):
                seen[item.step] = item.loss
            run = item.run if isinstance(item, m.Snapshot) else item
            if isinstance(run, m.RunView) and run.state == "finished":
                break
    return seen, states


def check_ledger(paths, steps) -> None:
    """By the journal: no generation and seq twice, and each step's plans begin where the step before ended."""
    record = open_for_reading(paths.record)
    plans = [decode_order(body) for (body,) in record.execute("SELECT body FROM plans")]
    record.close()
    assert len({(plan.generation, plan.seq) for plan in plans}) == len(plans)
    ends = {step.step: step.cursor for step in steps} | {0: 0}
    assert all(plan.cursor == ends[plan.step - 1] for plan in plans if plan.kind == "train")


def test_a_trainer_whose_agent_stays_away_writes_a_checkpoint_and_the_next_agent_goes_on_from_it(agent, run_config):
    """A stop sent to an agent that just came back still has another one written."""
    with agent.client() as client:
        config = run_config(run__steps=100_000, run__orphan_seconds=2, nodes=on_mlx(NODE))
        client.send("start-run", {"config": config}, wait="accepted")
        run = wait_for_step(client, 3).run.run
        (pid,) = agent.trainer_pids()
    assert agent.terminate() == 0
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 30, "its end")
    written = newest_complete(agent.run_paths(run).checkpoints)
    assert written is not None
    agent.start()
    with agent.client() as client:
        step = int(written.name.removeprefix("step-"))
        view = until(
            lambda: (v := run_of(client)).state == "running" and v.step > step and v,
            60,
            "its steps",
        )
        assert view.run == run
        assert client.ask(m.StepsRequest, run, after_step=0, limit=500).steps[step].step == step + 1
        texts = [event.text for event in newest_events(client)]
        assert any(text.startswith(f"resumed from step {step:,}") for text in texts)
    agent.kill()
    agent.start()
    with agent.client() as client:
        stopped = client.send("stop", {})
        assert stopped.state == "applied"
        assert wait_for_end(client).state == "stopped"
    assert newest_complete(agent.run_paths(run).checkpoints).name == f"step-{stopped.step}"


FROZEN_SECONDS = 13.0
"""Longer than a trainer takes to give up its connection, several times over."""


@pytest.mark.timeout(900)
def test_a_frozen_agent_records_one_return_of_its_trainer_and_one_regroup(agent, run_config):
    config = run_config(run__steps=FOREVER, nodes=on_mlx("box"))
    with agent.client() as client:
        run = client.send("start-run", {"config": config}).run
        wait_for_step(client, 3)
        agent.process.send_signal(signal.SIGSTOP)
        time.sleep(FROZEN_SECONDS)  # that is what is tested
        agent.process.send_signal(signal.SIGCONT)
        wait_for_step(client, run_of(client).step + 20)
        said = [event.data for event in events_of(client, run)]
        client.send("stop", {"checkpoint": False})
    back = [data for data in said if isinstance(data, e.NodeState) and data.state == "trainer-back"]
    assert len(back) == 1, said
    assert len([data for data in said if isinstance(data, e.GenerationFormed)]) == 2, said


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_run_whose_lead_lost_its_log_resumes_from_the_checkpoint(
    run_config: Any, tmp_path: Path, is_gone: bool
) -> None:
    """The log is cut in half, or removed, while the agent and its trainer are dead."""
    agent = AgentProcess(tmp_path / "state").start()
    try:
        with agent.client() as client:
            run = client.send("start-run", {"config": run_config(run__steps=100_000)}).run
            wait_for_step(client, 30)
            assert client.send("checkpoint", {}).state == "applied"
            at = wait_for_checkpoint(client, run)
        found = agent.trainer_pids()
        agent.kill()
        for pid in found:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
        until(lambda: not agent.trainer_pids(), what="the trainer's end")
        log = agent.run_paths(run).record.with_name("record.db-wal")
        content = log.read_bytes()
        assert content
        log.unlink()
        if not is_gone:
            log.write_bytes(content[: len(content) // 2])
        agent.start()
        with agent.client() as client:

            def continued() -> bool:
                view = run_of(client)
                if view is None or view.state not in m.ACTIVE_RUN_STATES:
                    reply = client.send("start-run", {"resume": run})
                    assert reply.state == "applied", reply.reason
                    return False
                return view.state == "running" and view.step > at + 3

            until(continued, 120, "steps after the checkpoint", lambda: run_of(client))
            notices = [
                event.data.text
                for event in events_of(client, run)
                if isinstance(event.data, Notice) and "lost" in event.data.text
            ]
            assert len(notices) == 1 and notices[0].endswith(f"continues from its checkpoint of step {at:,}")
            steps = [step.step for step in all_steps(client, run)]
            assert [step for step in steps if step > at] == [*range(at + 1, steps[-1] + 1)]
            client.send("stop", {"checkpoint": False})
            wait_for_end(client)
    finally:
        agent.clean_up()
