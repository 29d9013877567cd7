"""An agent on a leash: it leaves when nobody holds its standard input any more, and needs one that can be held."""

import json
import subprocess
import sys
from pathlib import Path

from tests.node_agent.support.processes import ENVIRONMENT
from tests.waiting import HANG_SECONDS

COMMAND = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", "here"]


def test_without_a_run_it_leaves_when_it_is_let_go(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "--leash", "--state", str(tmp_path)], env=ENVIRONMENT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as agent:  # fmt: skip
        assert agent.stdout is not None
        assert json.loads(agent.stdout.readline())["name"] == "here"
        assert agent.poll() is None
        _, err = agent.communicate("what comes before the end is thrown away", timeout=HANG_SECONDS)
    assert (agent.returncode, err) == (0, "")


def test_a_standard_input_that_nobody_holds_is_refused_in_a_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--leash", "--state", str(tmp_path)], env=ENVIRONMENT, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "trainctl-agent: --leash: standard input is not a pipe\n"
    assert not any(tmp_path.iterdir())
