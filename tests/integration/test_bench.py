"""`trainctl bench` as a person runs it: real runs on an agent of its own, and nothing left behind."""

import os
import signal
from pathlib import Path

import pytest
import tomli_w
from tests.tui.support.cli_calls import ENVIRONMENT, assert_none_left, call_json, started
from tests.waiting import HANG_SECONDS, until


@pytest.fixture
def run_toml(run_config, tmp_path):
    config = run_config(run__steps=1000)
    config["nodes"] = {"studio": {"backend": "torch", "device": "cpu", "threads": 1}}
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(config).encode())
    return tmp_path / "run.toml"


def environment(folder: Path) -> dict[str, str]:
    (folder / "tmp").mkdir()
    return {**ENVIRONMENT, "TMPDIR": str(folder / "tmp"), "TRAINCTL_STATE": str(folder / "state")}


def test_each_setting_trains_and_one_that_fails_is_a_row_that_says_why(run_toml, tmp_path):
    (tmp_path / "cluster.toml").write_text('[nodes.studio]\naddress = "ipc:///tmp/none"\nprice_per_hour = 2.0\n')
    found = call_json(
        "bench", run_toml, "--over", "batch.micro=1,2,4096", "--steps", "4", "--cluster", tmp_path / "cluster.toml"
    )
    one, two, failed = found["rows"]
    assert found["ok"] and found["node"] == "studio"
    for row in (one, two):
        assert row["ok"] and row["tokens_per_second"] > 0 and row["peak_bytes"] > 1e7
        assert row["steps_of_run"] == 1000 and row["seconds_to_end"] == pytest.approx(1000 * row["step_seconds"])
        assert row["cost"] == pytest.approx(2.0 * row["seconds_to_end"] / 3600)
    assert one["against_first"] == 1.0
    assert not failed["ok"] and "batch.micro: 4096 is above batch.global" in failed["problem"]
    assert not (tmp_path / "state").exists()


def test_ctrl_c_ends_the_run_and_its_agent_and_the_node_keeps_its_tokens(run_toml, tmp_path):
    kept = tmp_path / "state" / "studio"
    kept.mkdir(parents=True)
    with started("bench", run_toml, "--steps", "10000", env=environment(tmp_path)) as process:
        until(lambda: [*(tmp_path / "tmp").rglob("runs/*/record.db")], HANG_SECONDS, "the run")
        until(lambda: [path for path in kept.rglob("*") if path.is_file()], HANG_SECONDS, "the tokens")
        os.kill(process.pid, signal.SIGINT)
        process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 130
    assert_none_left(tmp_path)
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # torch's own folder
