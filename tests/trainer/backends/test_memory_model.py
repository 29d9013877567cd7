"""The peak predicted for a micro-batch is what a real model takes with it.

`make soak`: of five models, and in another process than the one whose peaks are known.
"""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiers import is_soak
from tests.waiting import HANG_SECONDS

from trainctl.protocol.batch.memory_estimate import fit
from trainctl.trainer import demo_assets

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).parents[3]
SOAK = is_soak()
MODELS = 5 if SOAK else 1
MEASURED, PREDICTED = (1, 2, 4, 8), (3, 6, 10)


def peaks(run, sizes):
    """Bytes by micro-batch, of a process of its own."""
    words = [sys.executable, "-m", "tests.trainer.support.peak_memory", str(run), "here", "--micros"]
    words.append(",".join(map(str, sizes)))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10 * HANG_SECONDS)
    return {int(micro): size for micro, size in json.loads(done.stdout).items()}


@pytest.mark.needs("linux")  # the peak is read from /proc, which only Linux has
@pytest.mark.timeout(1800)
def test_peaks_of_micro_batches_that_were_not_measured_are_predicted(run_file, tmp_path):
    errors = []
    for seed in range(MODELS):
        make_model(tmp_path / f"model-{seed}", random.Random(seed))
        for backend in ("torch", "mlx"):
            length = 32 * random.Random(seed).randint(2, 4)
            there = {"backend": backend, "device": "cpu", "threads": 1}
            run_file(model__path=str(tmp_path / f"model-{seed}"), data__sequence_length=length, nodes__here=there)
            off = errors_of(tmp_path / "run.toml")
            print(f"{backend}, model {seed}: " + ", ".join(f"{error:.1%}" for error in off))
            errors += off
    assert statistics.median(errors) <= 0.03
    assert max(errors) <= 0.10


def make_model(folder, chance):
    width, layers = 32 * chance.randint(1, 3), chance.randint(1, 3)
    shape = demo_assets.llama_config(hidden=width, layers=layers, heads=2, intermediate=192)
    demo_assets.make_model(folder, shape | {"vocab_size": 2048 * chance.randint(1, 3)})


def errors_of(run):
    """Relative errors of the peaks predicted by what was measured."""
    found = peaks(run, MEASURED) | peaks(run, PREDICTED) if SOAK else peaks(run, MEASURED + PREDICTED)
    model = fit([(micro, found[micro]) for micro in MEASURED])
    return [abs(model.peak(micro) / found[micro] - 1) for micro in PREDICTED]
