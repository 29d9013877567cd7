"""The self-test's model and text: the same bits on every machine, so that losses can be compared between machines."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainctl.trainer.common.atomic_folder import make_folder
from trainctl.trainer.demo_assets import llama_config, make_model

LINES: Final = 4000
_FACTOR, _STEP, _RANGE = 1_103_515_245, 12_345, 1 << 31
"""The linear congruential generator of the C standard's example."""


def make_assets(folder: Path) -> dict[str, int]:
    """FOLDER/model, of 0.12 M parameters, and FOLDER/data; their sizes, by name."""
    config = llama_config(hidden=64, layers=2, heads=2, intermediate=172)
    text = "".join(_sums(LINES))

    def write(work: Path) -> None:
        (work / "sums.txt").write_text(text, encoding="ascii")

    make_folder(folder / "data", write)
    return {"parameters": make_model(folder / "model", config), "text_bytes": len(text)}


def make_rows(folder: Path) -> Path:
    """FOLDER/sums.jsonl: the same sums as prompts and completions."""
    rows = [line.split(" = ") for line in _sums(LINES)]

    def write(work: Path) -> None:
        lines = [json.dumps({"prompt": f"{question} = ", "completion": answer.strip()}) for question, answer in rows]
        (work / "sums.jsonl").write_text("\n".join(lines), encoding="ascii")

    make_folder(folder, write)
    return folder / "sums.jsonl"


def _sums(count: int) -> Iterator[str]:
    """Lines of addition, which a small model can learn."""
    state = 1
    for _ in range(count):
        numbers = []
        for _ in range(2):
            state = (state * _FACTOR + _STEP) % _RANGE
            numbers.append((state >> 16) % 1000)
        yield f"{numbers[0]} + {numbers[1]} = {sum(numbers)}\n"
