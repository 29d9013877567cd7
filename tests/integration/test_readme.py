"""The README's commands, read from the file and run as they are written, each block in a network of its own."""

import json
import re
from pathlib import Path

import pytest
from tests.integration.support.documented import block, run

pytestmark = [pytest.mark.tier("test"), pytest.mark.needs("namespaces")]
UNTIL_SHOWN = """
for _ in $(seq 3000); do
  grep -q "step 1 " demo.out && break
  sleep 0.2
done
"""
UNTIL_STEP = """
for _ in $(seq 600); do
  step=$(trainctl status --json 2>/dev/null | python -c 'import json, sys; print((json.load(sys.stdin)["run"] or {}).get("step", 0))' || echo 0)
  [ "$step" -ge 2 ] && break
  sleep 1
done
"""  # noqa: E501  a command

END_AGENT = """
pid=$(grep -ho '"pid":[0-9]*' "$XDG_STATE_HOME"/trainctl/.agents/*.json | cut -d: -f2)
kill "$pid"
while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
"""


def test_your_own_run(tmp_path: Path) -> None:
    *commands, screen = block("Your own run")
    assert screen.split("#")[0].strip() == "trainctl", "the last line opens the full screen"
    ending = UNTIL_STEP + "trainctl status --json | tail -n 1\ntrainctl send stop checkpoint=false\n" + END_AGENT
    said = run(tmp_path, "\n".join(commands) + ending)
    status = next(json.loads(line) for line in said.splitlines() if line.startswith("{") and '"rank_steps"' in line)
    assert status["run"]["state"] == "running" and status["run"]["step"] >= 2
    assert (tmp_path / "run.toml").is_file()


def test_a_second_terminal_steers_the_demo(tmp_path: Path) -> None:
    activate, *commands = block("Demo", 1)
    assert activate == ". .venv/bin/activate" and len(commands) == 3
    demo = "trainctl demo --headless --steps 20000 > demo.out 2>&1 &\n" + UNTIL_SHOWN
    said = run(tmp_path, "\n".join([demo, *commands, "trainctl send stop checkpoint=false", "wait || true"]))
    applied = re.findall(r"^(\w[\w-]*) applied at step [\d,]+", said, re.MULTILINE)
    assert applied == ["rebalance", "resize-batch", "pause", "stop"]
