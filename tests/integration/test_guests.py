"""Training loops attached by one line, with a real agent that is absent, killed and stopped."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import AgentProcess
from tests.tiers import scale
from tests.tui.support.cli_calls import ENVIRONMENT
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.client import BlockingClient
from trainctl.protocol.messages import RunsRequest, RunView, SnapshotRequest
from trainctl.protocol.record.reader import RecordReader

RUN = "loop-1"
ABSENT = 0.5
"""Seconds after which the loop takes an agent for absent; 10 for a user."""
STEP_CPU = 0.005
"""Most CPU seconds of the loop's thread in one call of `step()`."""
LOOP = """
import json, sys, time
from trainctl import guest
from trainctl.guest import link
link.ABSENT_SECONDS = {absent}
steps, seconds = int(sys.argv[1]), float(sys.argv[2])
run = guest.attach("loop", run=sys.argv[3], steps=steps, checkpoint=lambda: None)
worst = 0.0
for number in range(1, steps + 1):
    time.sleep(seconds)
    began = time.thread_time()
    stop = run.step(number, loss=1.0 / number, kl=0.5, tokens=8)
    worst = max(worst, time.thread_time() - began)
    if stop:
        break
run.close()
print(json.dumps({{"made": number, "cpu": worst}}))
"""
Loop = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def loop(agent: AgentProcess) -> Iterator[Loop]:
    """Starts a loop that makes so many steps, each after so many seconds."""
    begun: list[subprocess.Popen[str]] = []

    def begin(steps: int, seconds: float = 0.002, run: str = RUN) -> "subprocess.Popen[str]":
        words = [sys.executable, "-c", LOOP.format(absent=ABSENT), str(steps), str(seconds), run]
        env = {**ENVIRONMENT, "TRAINCTL_GUEST_STATE": str(agent.state)}
        begun.append(subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()


def finish(process: "subprocess.Popen[str]") -> dict[str, float]:
    """Wait for a loop's end; return the steps it made and the CPU seconds of the longest."""
    said, error = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0, error
    summary: dict[str, float] = json.loads(said)
    return summary


def view_of(client: BlockingClient, run: str = RUN) -> RunView | None:
    return next((view for view in client.ask(SnapshotRequest, 0).runs if view.run == run), None)


def recorded(agent: AgentProcess, run: str = RUN) -> list[int]:
    """The steps in the record, each as often as it is there."""
    with RecordReader(agent.run_paths(run)) as reader:
        steps: list[int] = []
        while page := [row.step for row in reader.steps(steps[-1] if steps else 0, 1000)[0]]:
            fresh = [step for step in page if not steps or step > steps[-1]]
            if not fresh:
                break
            steps += fresh
        return steps


def newest(agent: AgentProcess) -> int:
    """The newest step that the agent shows; 0 if it does not have the run."""
    with agent.client() as client:
        view = view_of(client)
        return view.step if view is not None else 0


def spool(agent: AgentProcess, run: str = RUN) -> Path:
    return agent.state / "spool" / f"{run}.jsonl"


def ended(agent: AgentProcess, run: str = RUN) -> bool:
    with agent.client() as client:
        return any((one.run, one.state) == (run, "finished") for one in client.ask(RunsRequest).runs)


def test_a_loop_is_recorded_and_stopped(agent: AgentProcess, loop: Loop) -> None:
    process = loop(1_000_000)
    with agent.client() as client:
        until(lambda: (view := view_of(client)) is not None and view.step > 10, what="steps")
        outcome = client.send("stop", {}, run=RUN)
        assert outcome.state == "applied", outcome
    steps = recorded(agent)
    assert finish(process)["made"] == steps[-1] and steps == [*range(1, steps[-1] + 1)] and outcome.step == steps[-1]


def test_a_loop_without_an_agent_is_recorded_by_the_next(agent: AgentProcess, loop: Loop) -> None:
    agent.terminate()
    finish(loop(500))
    assert spool(agent).exists()
    agent.start()
    until(lambda: ended(agent), what="the run's record")
    assert recorded(agent) == [*range(1, 501)] and not spool(agent).exists()


def test_each_step_is_recorded_once_though_the_agent_is_killed(agent: AgentProcess, loop: Loop) -> None:
    agent.terminate()
    process = loop(3000, 0.005)
    until(lambda: spool(agent).exists(), what="the spool")
    for _ in range(scale("kills of a guest's agent")):
        agent.start()
        before = newest(agent)
        until(lambda: newest(agent) > before + 20, what="more steps")  # noqa: B023
        agent.kill()
    agent.start()
    said = finish(process)
    until(lambda: ended(agent), what="the end")
    assert recorded(agent) == [*range(1, 3001)] and said["cpu"] < STEP_CPU


def test_a_stopped_agent_does_not_hold_the_loop(agent: AgentProcess, loop: Loop) -> None:
    process = loop(2000, 0.003)
    until(lambda: newest(agent) > 20, what="steps")
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    until(lambda: spool(agent).exists(), what="the spool")
    agent.process.send_signal(signal.SIGCONT)
    until(lambda: not spool(agent).exists() or process.poll() is not None, what="the agent's reading")
    said = finish(process)
    until(lambda: ended(agent), what="the end")
    assert recorded(agent) == [*range(1, 2001)] and said["cpu"] < STEP_CPU
