"""The demo's preferences: functions as they are written, and the same with one line backwards."""

import argparse
import json
import random
from pathlib import Path

from trainctl.trainer import demo_assets


def test_a_pair_differs_in_one_line_that_is_backwards(tmp_path, monkeypatch):
    library = {module.__name__: [Path(module.__file__)] for module in (random, argparse)}
    monkeypatch.setattr(demo_assets, "_standard_library", lambda: library)
    source = tmp_path / "pairs"
    assert demo_assets.make_functions(source, demo_assets.preferences) > 20
    pairs = [json.loads(line) for line in (source / "functions.jsonl").read_text("utf-8").splitlines()]
    for pair in pairs:
        chosen, rejected = (pair[half].split("\n") for half in ("chosen", "rejected"))
        ((whole, broken),) = [both for both in zip(chosen, rejected, strict=True) if both[0] != both[1]]
        assert whole.strip() == broken.strip()[::-1].strip()
        assert pair["prompt"].startswith("def ") and pair["prompt"].endswith(":\n")
        assert len(pair["prompt"]) + len(pair["chosen"]) <= 181
