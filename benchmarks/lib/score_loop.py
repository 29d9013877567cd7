"""A plain scoring loop with transformers: one thread, batches of like lengths; a line of seconds in, rows done out."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

END = 257


def main() -> None:
    folder, batch_tokens = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(folder / "checkpoint").eval()
    lines = (folder / "rows.jsonl").read_text("utf-8").splitlines()[:512]
    rows = sorted(([*json.loads(line)["text"].encode(), END] for line in lines), key=len, reverse=True)
    batches = made_batches(rows, batch_tokens)
    print(0, flush=True)
    for line in sys.stdin:
        done, place, started = 0, 0, time.monotonic()
        while time.monotonic() - started < float(line):
            done += score(model, batches[place % len(batches)])
            place += 1
        print(done / (time.monotonic() - started), flush=True)


def made_batches(rows: list[list[int]], batch_tokens: int) -> list[list[list[int]]]:
    found: list[list[list[int]]] = [[]]
    for row in rows:
        if found[-1] and (len(found[-1]) + 1) * len(found[-1][0]) > batch_tokens:
            found.append([])
        found[-1].append(row)
    return found[1::2] + found[::2]  # long and short ones mixed


def score(model: Any, rows: list[list[int]]) -> int:
    """Rows whose log-probabilities were computed."""
    width = len(rows[0]) - 1
    inputs = torch.tensor([[*row[:-1], *[0] * (width + 1 - len(row))] for row in rows])
    targets = torch.tensor([[*row[1:], *[-100] * (width + 1 - len(row))] for row in rows])
    with torch.inference_mode():
        logits = model(input_ids=inputs, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.view(targets.shape).sum(1).tolist()
    return len(rows)


main()
