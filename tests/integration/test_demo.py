"""The demo as a newcomer runs it: one command, a real model on real text, one JSON object, nothing left behind."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest


def demo(folder: Path, *arguments: str, seconds: float = 240) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trainctl.tui.cli", "demo", "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_headless_demo_learns_and_prints_one_object(tmp_path, backend):
    steps = {"torch": 12, "mlx": 2}[backend]
    done = demo(tmp_path, "--headless", "--steps", str(steps), "--json", "--backend", backend)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["steps"] == steps
    assert result["last_loss"] < result["first_loss"]
    assert result["first_loss"] == pytest.approx(5.5, abs=0.2)
    (node,) = result["nodes"]
    assert node["backend"] == backend
    assert node["tokens"] == steps * 24 * 128
    assert result["tokens_per_second"] > 0
    assert result["engine"] == "none"
    assert Path(result["run_directory"]).is_dir()


def test_a_demo_that_cannot_start_is_one_line_and_leaves_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    begun = time.monotonic()
    done = demo(blocked, "--headless", "--steps", "5")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert str(blocked) in done.stderr.splitlines()[-1]
    assert time.monotonic() - begun < 60
