"""The examples of docs/guests.md, with an agent's socket and without one: they print the same."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.protocol.support.line_server import LineServer
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples" / "guests").glob("*.py"))
pytestmark = pytest.mark.tier("all")


def run(example: Path, folder: Path, **variables: str) -> str:
    """Run an example for 20 steps; return what it says of losses."""
    done = subprocess.run(
        [sys.executable, str(example), "--steps", "20"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "protocol"), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss (\d+\.\d+)|\b(\d\.\d{3}) [▲▼]", done.stdout)
    assert losses or "mlx" in example.name
    return str(losses)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_the_same_with_and_without_an_agent(
    server: LineServer, tmp_path: Path, example: Path
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    without = run(example, alone, TRAINCTL_GUEST_SOCKET=f"{alone}/none.sock", TRAINCTL_GUEST_STATE=str(alone))
    assert run(example, tmp_path) == without
    assert [*server.rows] == [*range(1, 21)] and server.of("end")[-1]["state"] == "finished"
    assert sum("loss" in row for row in server.rows.values()) >= 4
    assert len([*alone.glob("spool/*.jsonl")]) == 1


def test_each_framework_has_an_example() -> None:
    frameworks = {"torch", "hf", "trl", "lightning", "accelerate", "mlx_lm"}
    assert {path.stem.removeprefix("with_") for path in EXAMPLES} == frameworks
