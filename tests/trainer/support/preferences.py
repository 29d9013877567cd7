"""Preferences about lines of the standard library, the run files that tune a small model by them, and its steps."""

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.trainer.support.chat_model import make_chat_model, questions, write_rows
from tests.trainer.support.curves import SIZES, G, worst

from trainctl.trainer.data.permutation import samples_at

STEPS, FEW_STEPS, RATE = 50, 15, 2e-3
"""Steps beside another library in `make soak`, and in `make test`."""
LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
NAMES = (*REWARDS, "logps/chosen", "logps/rejected")
Start = Callable[..., Any]


def preferences(count: int) -> list[dict[str, str]]:
    """The lines that follow a line of the standard library, preferred to the same with two of them exchanged or one
    turned around."""
    chance, pairs = random.Random(4), []
    for row in questions(count, seed=4):
        lines = row["completion"].split("\n")
        broken = [*lines]
        broken[chance.randrange(len(lines))] = lines[0][::-1]
        if broken != lines:
            pairs.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": "\n".join(broken)})
    return pairs


def run_settings(folder: Path, objective: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What `new_rig` needs to tune preferences with an objective."""
    path = write_rows(folder / "pairs.jsonl", preferences(90))
    return {
        "model__path": str(make_chat_model(folder / "model")),
        "data": {"path": str(path), "kind": "rows", "sequence_length": 256},
        "optimizer": {"learning_rate": RATE, "weight_decay": 0.1, "beta2": 0.999}, "adapter": LORA,
        "objective": objective, **changes,
    }  # fmt: skip


def rows_in_order(rig: Any, folder: Path, steps: int = STEPS) -> list[dict[str, str]]:
    """The pairs of `run_settings` as the rig trains on them."""
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text("utf-8").splitlines()]
    order = rig.dataset._training[samples_at(np.arange(steps * G), rig.dataset.samples, rig.config.run.seed)]
    return [rows[index] for index in order]


def reports(rig: Any, steps: int = STEPS, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    plans = (rig.plan(step, sizes[step % len(sizes)], learning_rate=RATE) for step in range(1, steps + 1))
    return [rig.executor.train(plan, time.perf_counter()) for plan in plans]


def losses(found: list[Any]) -> list[float]:
    return [report.loss_sum / report.weight for report in found]


def assert_as_logged(found: list[Any], trainer: Any, names: Sequence[str]) -> None:
    """Whether the loss and the metrics of all steps are those that a trainer of TRL has logged, within 1e-5."""
    logged = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert len(logged) == len(found) == trainer.args.max_steps
    assert worst(losses(found), [entry["loss"] for entry in logged]) < 1e-5
    for name in names:
        mine, other = np.array([report.values[name] for report in found]), np.array([entry[name] for entry in logged])
        assert np.abs(mine - other).max() <= 1e-5 * max(1.0, np.abs(other).max()), name
