"""Command lines of training libraries under `trainctl exec`: the same losses as without, and they are the run's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.conftest import AgentProcess
from tests.trainer.support.chat_model import make_chat_model, questions, write_rows
from tests.waiting import HANG_SECONDS

from trainctl.protocol.messages import RunsRequest, StepsRequest

EXEC = [sys.executable, "-m", "trainctl.tui.cli.main", "exec", "--name", "guest", "--"]
PROGRAMS = Path(sys.executable).parent
STEPS = 6


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    make_chat_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.jsonl", questions(40))
    write_rows(tmp_path / "data" / "valid.jsonl", questions(8, 2))
    return tmp_path


def losses(agent: AgentProcess, folder: Path, pattern: str, *command: str) -> tuple[list[str], list[float | None]]:
    """Run a command with and without exec. Return the losses that both have printed, and those of the run's steps."""
    env = {**os.environ, "TRAINCTL_CONNECT": agent.address, "OMP_NUM_THREADS": "1"}
    printed = []
    for words in ([*command], [*EXEC, *command]):
        done = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
        )
        assert done.returncode == 0, done.stderr
        assert "trainctl" not in done.stderr
        printed.append(re.findall(pattern, re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)))
    assert printed[0] == printed[1] != []
    with agent.client() as client:
        (run,) = client.ask(RunsRequest).runs
        assert (run.state, run.step) == ("finished", STEPS)
        return printed[1], [step.loss for step in client.ask(StepsRequest, run.run, after_step=0, limit=500).steps]


def test_trl(agent: AgentProcess, inputs: Path) -> None:
    command = f"sft --model_name_or_path model --dataset_name data --max_steps {STEPS} --output_dir out"
    options = "--report_to none --use_cpu true --logging_steps 1 --save_strategy no --bf16 false"
    words = [str(PROGRAMS / "trl"), *command.split(), *options.split()]
    printed, recorded = losses(agent, inputs, r"'loss': '([\d.]+)'", *words)
    assert recorded == pytest.approx([float(loss) for loss in printed], abs=6e-4)


def test_mlx_lm(agent: AgentProcess, inputs: Path) -> None:
    command = f"--model model --train --data data --iters {STEPS} --batch-size 2 --num-layers 1 --adapter-path out"
    words = [str(PROGRAMS / "mlx_lm.lora"), *command.split(), "--steps-per-report", "2"]
    printed, recorded = losses(agent, inputs, r"(\d\.\d{3}) [▼▲]", *words)
    reported = [loss for loss in recorded if loss is not None]
    assert reported[-len(printed) :] == pytest.approx([float(loss) for loss in printed], abs=6e-4)
