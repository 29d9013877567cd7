"""The README's commands, read from the file and run as they are written, each block in a network of its own."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.support.namespaces import Network
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
pytestmark = [pytest.mark.tier("test"), pytest.mark.needs("namespaces")]
BEGIN = "set -euo pipefail\n"
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


def block(heading: str, number: int = 0) -> list[str]:
    """The commands of a block of code under a heading."""
    part = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```\n(.*?)```", part, re.DOTALL)[number].strip().splitlines()


def run(folder: Path, script: str) -> str:
    """What a shell prints that has this environment's programs, a home of its own and no network but loopback."""
    home = folder / "home"
    home.mkdir()
    folders = {name: str(home / name) for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")}
    taken = {name: value for name, value in os.environ.items() if not name.startswith("TRAINCTL_")}
    environment = {**taken, **folders, "HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with contextlib.closing(Network(["here"])) as network:
        done = subprocess.run(
            network.on("here", "bash", "-c", BEGIN + script), cwd=folder, env=environment, capture_output=True,
            text=True, check=False, timeout=HANG_SECONDS,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
