"""Preferences about lines of the standard library, and the run files that tune a small model by them."""

import random
from pathlib import Path
from typing import Any

from tests.trainer.support.chat_model import questions, write_rows
from tests.trainer.support.library_trainers import LORA, RATE

REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
NAMES = (*REWARDS, "logps/chosen", "logps/rejected")


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


PAIRS = preferences(90)


def run_settings(folder: Path, model: Path, objective: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return what `new_rig` needs to tune a model by PAIRS with an objective."""
    path = write_rows(folder / "pairs.jsonl", PAIRS)
    return {
        "model__path": str(model),
        "data": {"path": str(path), "kind": "rows", "sequence_length": 256},
        "optimizer": {"learning_rate": RATE, "weight_decay": 0.1, "beta2": 0.999},
        "adapter": LORA,
        "objective": objective,
        **changes,
    }
