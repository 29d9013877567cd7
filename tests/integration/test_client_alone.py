"""A program that has only the client library drives a live agent: no part of protocol that it needs loads more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import AgentProcess
from tests.integration.support.client_alone import BLOCKED, DRIVE
from tests.tui.support.cli_calls import ENVIRONMENT
from tests.waiting import HANG_SECONDS

from trainctl.protocol.machine import shim
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.schema import open_for_reading

pytestmark = pytest.mark.tier("test")

BLOCKER = f"""
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(name + " is not a dependency of the client library")

sys.meta_path.insert(0, Blocker())
"""


RECORD = """
from pathlib import Path
from trainctl.protocol import messages as m
from trainctl.protocol.record.rank_record import MetricsWriter

writer = MetricsWriter(Path(sys.argv[1]), "here")
for step in range(1, 4):
    writer.append(m.Report(
        run="r", rank=0, generation=m.Generation(1, 1), seq=step, kind="train", step=step, loss_sum=1.0, weight=2.0,
        own_weight=2.0, own_samples=1,
    ))
writer.close()
"""

KEEP = """
import runpy
path = sys.argv.pop(1)
runpy.run_path(path, run_name="__main__")
"""


def python(code: str, *arguments: str) -> str:
    """What a program prints to which none of BLOCKED can be imported."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", BLOCKER + code, *arguments], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_client_attaches_commands_and_reads_history(live: AgentProcess) -> None:
    said = json.loads(python(DRIVE, live.address))
    assert said["state"] == "applied"
    assert said["committed"] >= said["step"] > 0
    assert said["run"] in said["runs"], "other tests may have had runs on this agent"
    assert {*said["points"]} == {"loss", "busy_seconds"} and all(said["points"].values())


def test_a_rank_keeps_its_record(tmp_path: Path) -> None:
    python(RECORD, str(tmp_path / "rank-0.db"))
    connection = open_for_reading(tmp_path / "rank-0.db")
    steps = [step for (step,) in connection.execute("SELECT step FROM rank_steps ORDER BY step")]
    connection.close()
    assert steps == [1, 2, 3]


def test_the_shim_keeps_an_exit_status(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    record, log = paths.process(0), tmp_path / "rank-0.log"
    python(KEEP, shim.__file__, "--record", str(record), "--log", str(log), "--", "/bin/sh", "-c", "echo hi; exit 5")
    assert json.loads(record.read_text())["exit_status"] == 5
    assert log.read_text() == "hi\n"


def test_what_is_blocked_is_missed() -> None:
    assert "numpy is not" in python("try:\n    import numpy\nexcept ImportError as error:\n    print(error)")
