"""Mirrors in TensorBoard's and W&B's own files, read back: whole runs, growing ones, mirrors that were killed."""

import json
import math
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.node_agent.support import records
from tests.tui.support import event_files, run_directory
from tests.tui.support.cli_calls import (
    COMMAND,
    DEADLINE_SECONDS,
    ENVIRONMENT,
    assert_one_line,
    call,
    call_process,
    wait_until,
)
from tests.tui.support.simulated_cluster import simulated_cluster

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import NoteWritten
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

RUN_FILE = '[run]\nname = "demo"\nsteps = 160\n[batch]\nglobal = 12\n[optimizer]\nlearning_rate = 3e-3\n'
SECOND = m.Generation(1, 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = run_directory.make(tmp_path_factory.mktemp("runs") / "demo-1")
    (made / "run.toml").write_text(RUN_FILE)
    return made


@pytest.fixture(scope="module")
def board(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> event_files.Board:
    """The whole run, mirrored twice: the second time there is nothing new."""
    out = tmp_path_factory.mktemp("mirrors")
    for _ in range(2):
        done = call("mirror", directory, "--to", "tensorboard", "--output", out)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == f"{out / 'demo-1'}: mirrored to step 160\n"
    return event_files.board(out / "demo-1")


def test_tensorboard_has_every_step_once_and_the_gap(board: event_files.Board, directory: Path) -> None:
    found = board.scalars
    with RecordReader(directory) as reader:
        steps, _ = reader.steps(0)
        parts = reader.parts_between(1, 160)
        evaluations = {one.step: one.loss for one in reader.evaluations()}
    assert found["train/loss"] == pytest.approx({step.step: step.loss for step in steps})
    assert not {100, 101, 102} & found["train/loss"].keys()
    assert found["eval/loss"] == pytest.approx(evaluations) and evaluations
    assert found["eval/perplexity"] == pytest.approx({step: math.exp(loss) for step, loss in evaluations.items()})
    assert not {"train/eval_loss", "train/perplexity"} & found.keys()
    for node in {part.node for part in parts}:
        rates = {part.step: part.own_tokens_per_second for part in parts if part.node == node}
        assert found[f"nodes/{node}/tokens_per_second"] == pytest.approx(rates)
    assert all(re.fullmatch(r"(train|eval|nodes/[\w.-]+)/\w+", tag) for tag in found)


def test_tensorboard_has_events_and_settings(board: event_files.Board, directory: Path) -> None:
    with RecordReader(directory) as reader:
        events, _ = reader.events()
    told = board.texts["events"]
    assert sum(text.count("\n") + 1 for text in told.values()) == len(events)
    assert "- step 160: [run] finished at step 160 (auto)" in told[160]
    assert all(f"- def → return {step}" in text for step, text in board.texts["samples"].items())
    assert "| optimizer.learning_rate | 0.003 |" in board.texts["settings"][0]
    assert b"optimizer.learning_rate" in board.settings


class Follower:
    """`trainctl mirror --follow` as a process."""

    def __init__(self, *words: str | Path) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "mirror", *map(str, words), "--follow"], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )

    def end(self, number: int) -> str:
        """Return what it said."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=DEADLINE_SECONDS)[1]


def commit(recorder: RunDb, first: int, last: int, generation: m.Generation, loss: float) -> None:
    for step in range(first, last + 1):
        recorder.commit(records.step(step, generation, loss), [records.part(step, generation=generation)], 1.0)


def place_of(folder: Path, target: str = "tensorboard") -> int:
    file = folder / f"{target}.place.json"
    return json.loads(file.read_bytes())["step"] if file.exists() else 0


def test_a_follower_killed_and_begun_again_over_a_run_that_goes_back(tmp_path: Path) -> None:
    """kill -9 at step 20; steps after 15 retracted and redone meanwhile; another follows, and ends by SIGTERM."""
    directory, out = tmp_path / "run-1", tmp_path / "out"
    directory.mkdir()
    words = (directory, "--to", "tensorboard", "--output", out)
    with RunDb(RunPaths(directory), resumable=False) as recorder:
        commit(recorder, 1, 20, records.FIRST, 2.0)
        recorder.event(1.0, NoteWritten("before"), "info", "anna", step=18)
        first = Follower(*words)
        wait_until(lambda: place_of(out / "run-1") == 20, "step 20")
        if sys.platform == "linux":  # torch would be installed here, and cost 300 MB
            assert not [one.path for one in psutil.Process(first.process.pid).memory_maps() if "torch" in one.path]
        first.end(signal.SIGKILL)
        recorder.retract_after(15)
        commit(recorder, 16, 30, SECOND, 3.0)
        second = Follower(*words)
        wait_until(lambda: place_of(out / "run-1") == 30, "step 30")
        commit(recorder, 31, 40, SECOND, 3.0)
        wait_until(lambda: place_of(out / "run-1") == 40, "step 40")
        said = second.end(signal.SIGTERM)
    assert second.process.returncode == 0
    assert said.splitlines()[-1] == f"{out / 'run-1'}: mirrored to step 40"
    found = event_files.board(out / "run-1")
    assert found.scalars["train/loss"] == {step: 2.0 if step <= 15 else 3.0 for step in range(1, 41)}
    assert list(found.texts["events"].items()) == [(18, "- step 18: [note] before (anna)")]


def test_what_was_written_past_the_place_is_not_there_twice(
    directory: Path, board: event_files.Board, tmp_path: Path
) -> None:
    """As a mirror leaves it that is killed between writing and keeping its place."""
    out = tmp_path / "demo-1"
    call("mirror", directory, "--to", "tensorboard", "--output", tmp_path)
    file = out / "tensorboard.place.json"
    kept = json.loads(file.read_bytes())
    texts = [*board.texts["events"].items()][: len(board.texts["events"]) // 2]
    last, count = texts[-1][0], sum(text.count("\n") + 1 for _, text in texts)
    losses = {step: loss for step, loss in kept["evaluations"].items() if int(step) <= last}
    kept |= {"step": last, "events": kept["events"][:count], "text_step": last, "evaluations": losses}
    file.write_text(json.dumps(kept))
    call("mirror", directory, "--to", "tensorboard", "--output", tmp_path)
    again = event_files.board(out)
    assert (again.scalars, again.texts) == (board.scalars, board.texts)


def test_through_an_agent_to_the_runs_end(tmp_path: Path) -> None:
    words = ("--to", "tensorboard", "--output")
    with simulated_cluster(tmp_path / "cluster", 2, 8) as cluster:
        done = call("mirror", cluster.run, *words, tmp_path / "far", "--connect", cluster.address, "--follow")
        assert done.returncode == 0 and "step 8" in done.stderr
    assert call("mirror", cluster.directory, *words, tmp_path / "near").returncode == 0
    far, near = (event_files.board(tmp_path / where / cluster.run).scalars for where in ("far", "near"))
    assert len(far["train/loss"]) == 8
    for tag, values in far.items():
        assert values == pytest.approx(near[tag], rel=1e-6), tag
    assert near.keys() - far.keys() <= {tag for tag in near if tag.endswith("/samples")}


def sessions(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def test_wandb_offline_in_two_sessions_and_one_that_was_cut_off(tmp_path: Path) -> None:
    """Rows are numbered on, none comes twice; what a killed session left is dropped and mirrored again."""
    directory, out = tmp_path / "run-1", tmp_path / "out"
    directory.mkdir()
    (directory / "run.toml").write_text(RUN_FILE)
    words = ("mirror", directory, "--to", "wandb", "--offline", "--project", "p", "--output", out)
    with RunDb(RunPaths(directory), resumable=False) as recorder:
        commit(recorder, 1, 20, records.FIRST, 2.0)
        recorder.event(1.0, NoteWritten("hello"), "info", "anna", step=18)
        recorder.evaluation(10, 1.0, 2.25, 512.0, 0.5)
        first = call(*words)
        assert (first.returncode, first.stdout, first.stderr) == (0, "", f"{out / 'run-1'}: mirrored to step 20\n")
        (begun,) = sessions(out / "run-1")
        (begun.parent / "offline-run-20200101_000000-run-1").mkdir()
        recorder.retract_after(15)
        commit(recorder, 16, 30, SECOND, 3.0)
        assert call(*words).returncode == 0
    one, two = sessions(out / "run-1")
    assert one == begun
    before, after = event_files.wandb_rows(one), event_files.wandb_rows(two)
    assert [row["_step"] for row in before + after] == [*range(22 + 15)]
    steps = [row for row in before if "train/loss" in row]
    assert [(row["step"], row["attempt"], row["train/loss"]) for row in steps] == [(n, 1, 2.0) for n in range(1, 21)]
    assert [(row["step"], row["attempt"], row["train/loss"]) for row in after] == [(n, 2, 3.0) for n in range(16, 31)]
    assert after[0]["nodes/node-0/tokens_per_second"] == 100.0
    evaluated = [(row["eval/loss"], row["eval/perplexity"]) for row in before if "eval/loss" in row]
    assert evaluated == [(2.25, pytest.approx(math.exp(2.25)))]
    assert [row["events"] for row in before if "events" in row] == ["step 18: [note] hello (anna)"]
    assert settings(one)["optimizer"] == tomllib.loads(RUN_FILE)["optimizer"]


def test_wandb_without_a_key_is_one_line_and_makes_nothing(directory: Path, tmp_path: Path) -> None:
    done = call_process(
        "mirror", directory, "--to", "wandb", "--output", tmp_path / "out",
        HOME=str(tmp_path), NETRC=str(tmp_path / "netrc"), WANDB_API_KEY="",
    )  # fmt: skip
    assert_one_line(done, 2, "W&B has no API key: run `wandb login`, or add --offline")
    assert not (tmp_path / "out").exists()


def settings(session: Path) -> dict[str, Any]:
    """The run's config as W&B has it."""
    found: dict[str, Any] = {}
    for record in event_files.wandb_records(session):
        if record.WhichOneof("record_type") == "run":
            assert (record.run.run_id, record.run.project) == ("run-1", "p")
            found |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return found
