"""A recording made of a real run, and played back as a person does it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.run_files import NODE, on_mlx
from tests.cluster.waits import all_steps, wait_for_end
from tests.integration.conftest import AgentProcess
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.client.blocking import BlockingClient

COMMAND = [sys.executable, "-m", "trainctl.node_agent.cli"]


@pytest.mark.tier("test")
def test_a_run_is_recorded_and_played_back(agent: AgentProcess, run_config, tmp_path: Path) -> None:
    with agent.client() as client:
        client.send("start-run", {"config": run_config(run__steps=5, nodes=on_mlx(NODE))}, wait="accepted")
        view = wait_for_end(client)
        ran = [(step.step, round(step.loss, 6)) for step in all_steps(client)]
    recording, folder = tmp_path / "own.recording", tmp_path / "played"
    made = _record(agent.run_paths(view.run).directory, recording)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == f"{recording}: {recording.stat().st_size:,} bytes\n"
    play = [*COMMAND, "play", str(recording), f"--folder={folder}", "--speed=200", "--no-faults", "--leash"]
    with subprocess.Popen(play, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as player:
        assert player.stdout is not None and player.stdin is not None
        try:
            with BlockingClient(json.loads(player.stdout.readline())["listen"]) as client:
                until(lambda: client.snapshot().run.state == "finished", HANG_SECONDS, "the recording's end")
                played = [(step.step, step.loss) for step in all_steps(client)]
        finally:
            player.stdin.close()
    assert len(ran) == 5 and played == ran
    assert (folder / "record.db").is_file()


def test_a_folder_without_a_record_makes_no_recording(tmp_path: Path) -> None:
    refused = _record(tmp_path, tmp_path / "none.recording")
    assert refused.returncode != 0 and refused.stderr.count("\n") == 1 and str(tmp_path) in refused.stderr
    assert not (tmp_path / "none.recording").exists()


def _record(directory: Path, output: Path) -> "subprocess.CompletedProcess[str]":
    words = [*COMMAND, "record", str(directory), str(output)]
    return subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
