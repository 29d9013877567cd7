"""The demo as a newcomer runs it: one command, a real model on real text, one JSON object, nothing left behind."""

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.tui.cli_calls import assert_none_left, end_all

from trainctl.protocol import cluster

STEPS = 8
TOKENS_PER_STEP = 24 * 128


def demo(folder: Path, *arguments: str, seconds: float = 170) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trainctl.tui.cli", "demo", "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)


def test_the_headless_demo_trains_one_model_on_torch_and_mlx_and_prints_one_object(tmp_path):
    try:
        done = demo(tmp_path, "--headless", "--steps", str(STEPS), "--json")
        assert_none_left(tmp_path)
    finally:
        end_all(tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["steps"], result["state"], result["mixed"]) == (STEPS, "finished", True)
    assert 5.3 < result["first_loss"] < 5.7
    assert result["last_loss"] < result["first_loss"] - 0.5
    assert result["engine"] in ("gloo", "ring")
    assert [(node["name"], node["backend"]) for node in result["nodes"]] == [
        ("torch-a", "torch"),
        ("torch-b", "torch"),
        ("mlx-c", "mlx"),
    ]
    assert min(node["tokens"] for node in result["nodes"]) > 0
    assert sum(node["tokens"] for node in result["nodes"]) == STEPS * TOKENS_PER_STEP
    assert sum(node["share"] for node in result["nodes"]) == 24
    assert result["tokens_per_second"] > 0
    (file,) = tmp_path.glob("demo-*/cluster.toml")
    assert list(cluster.read(file).nodes) == ["torch-a", "torch-b", "mlx-c"]
    assert Path(result["run_directory"]).is_dir()
    assert "Traceback" not in done.stderr


def test_a_demo_that_cannot_start_is_one_line_and_leaves_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    begun = time.monotonic()
    done = demo(blocked, "--headless", "--steps", "5")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert str(blocked) in done.stderr.splitlines()[-1]
    assert time.monotonic() - begun < 60
