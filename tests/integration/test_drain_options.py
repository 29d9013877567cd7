"""One agent alone with --drain-on-term, --grace and --spot-notice-command: it leaves a checkpoint of the last step."""

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.asking import run_of
from tests.cluster.run_files import FOREVER, NODE, on_mlx
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.record.checkpoints import verify
from trainctl.protocol.record.copy_mark import COMMAND_VARIABLE

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def alone(tmp_path) -> Iterator[AgentProcess]:
    """An agent that a test starts with options of its own; its run must have ended when the test does."""
    process = AgentProcess(tmp_path / "state")
    yield process
    process.clean_up()


def start(agent: AgentProcess, *options: str) -> None:
    agent.options = options
    agent.start()


def begin(agent: AgentProcess, config: dict) -> str:
    with agent.client() as client:
        started = client.send("start-run", {"config": config})
        assert started.state == "applied", started.reason
        wait_for_step(client, 3)
    assert started.run is not None
    return started.run


def exit_status(agent: AgentProcess) -> tuple[int, str]:
    assert agent.process is not None and agent.process.stderr is not None
    status, said = agent.process.wait(HANG_SECONDS), agent.process.stderr.read()
    agent.kill()
    return status, said


def newest_checkpoint(agent: AgentProcess, run: str) -> int:
    return max(int(path.name.removeprefix("step-")) for path in agent.run_paths(run).checkpoints.glob("step-*"))


def test_what_cannot_leave_in_time_is_left_running_and_a_second_sigterm_waits_for_nothing(alone, run_config):
    start(alone, "--drain-on-term", "--grace", "3600")
    run = begin(alone, run_config(run__steps=FOREVER, nodes=on_mlx(NODE)))
    (trainer,) = alone.trainer_pids()
    os.kill(trainer, signal.SIGSTOP)
    alone.process.send_signal(signal.SIGTERM)
    with alone.client() as client:
        until(lambda: run_of(client).state == "stopping", what="the stop")
    alone.process.send_signal(signal.SIGTERM)
    assert exit_status(alone)[0] == 0
    assert alone.trainer_pids() == [trainer]

    start(alone, "--drain-on-term", "--grace", "1")
    alone.process.send_signal(signal.SIGTERM)
    status, said = exit_status(alone)
    assert status == 1 and "had not left after 1 s; its trainer was left running" in said
    assert alone.trainer_pids() == [trainer]

    start(alone, "--drain-on-term", "--grace", "3600")
    os.kill(trainer, signal.SIGCONT)
    with alone.client() as client:
        assert wait_for_end(client).state == "stopped"
        last = run_of(client).step
    assert newest_checkpoint(alone, run) == last
    alone.process.send_signal(signal.SIGTERM)
    assert exit_status(alone)[0] == 0


def test_an_agent_waits_for_the_copy_of_the_last_checkpoint(alone, run_config, tmp_path: Path, monkeypatch):
    gate, there = tmp_path / "gate", tmp_path / "there"
    os.mkfifo(gate)
    command = ("sh", "-c", f'read line < {gate} && cp -r "$1" {there}', "copy", "{folder}")
    monkeypatch.setenv(COMMAND_VARIABLE, shlex.join(command))
    start(alone, "--drain-on-term", "--grace", "3600")
    run = begin(alone, run_config(run__steps=FOREVER, nodes=on_mlx(NODE), checkpoint={"copy_to": "command"}))
    alone.process.send_signal(signal.SIGTERM)
    until(lambda: not alone.trainer_pids(), what="the end of the trainer")
    with pytest.raises(subprocess.TimeoutExpired):
        alone.process.wait(2)
    gate.write_text("continue\n")
    assert exit_status(alone)[0] == 0
    assert verify(there).step == newest_checkpoint(alone, run)


def test_a_command_that_does_not_exist_is_refused(tmp_path: Path):
    agent = AgentProcess(tmp_path / "state")
    agent.options = ("--spot-notice-command", "no-such-program-here")
    with pytest.raises(AssertionError, match="--spot-notice-command: program 'no-such-program-here' not found"):
        agent.start()
    agent.kill()
