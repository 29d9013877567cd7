"""The example of a training program that is attached, with a real agent that comes and goes.

tests/node_agent/guests/test_attached_runs.py has what an agent does with such a run.
"""

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.integration.conftest import AgentProcess
from tests.tui.support.cli_calls import ENVIRONMENT
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.messages import HistoryRequest, RunsRequest
from trainctl.protocol.record.reader import RecordReader

RUN = "mine-1"
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def example(agent: AgentProcess, *words: str) -> Sequence[str]:
    return (
        sys.executable, str(EXAMPLES / "attach.py"), str(EXAMPLES / "attach.py"), "--connect", agent.address, *words
    )  # fmt: skip


def test_the_example_trains_and_is_recorded(agent: AgentProcess) -> None:
    words = example(agent, "--run", RUN, "--steps", "60", "--batch", "16")
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "after 60 steps; 60 recorded" in done.stdout
    with agent.client() as client:
        (known,) = client.ask(RunsRequest).runs
        assert (known.state, known.step, known.kind) == ("finished", 60, "guest")
        losses = client.ask(HistoryRequest, RUN, ("loss",), columns=100).series[0].last
    assert losses[-1] < losses[0] - 0.5 and abs(losses[0] - math.log(256)) < 1e-6


def test_the_example_trains_on_without_an_agent_and_catches_up(agent: AgentProcess) -> None:
    words = example(agent, "--run", RUN, "--steps", "1200", "--batch", "64")
    agent.terminate()
    loop = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    try:
        agent.start()
        with agent.client() as client:
            until(lambda: any(run.step > 0 for run in client.ask(RunsRequest).runs), what="steps of the loop")
        agent.kill()
        agent.start()
        said, _ = loop.communicate(timeout=HANG_SECONDS)
    finally:
        loop.kill()
        loop.wait()
    assert loop.returncode == 0 and "1200 recorded" in said
    with RecordReader(agent.run_paths(RUN)) as reader:
        found = [step.step for first in (0, 1000) for step in reader.steps(first, 1000)[0] if step.step > first]
    assert sorted(set(found)) == list(range(1, 1201))
