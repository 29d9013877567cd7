"""The peak predicted for a micro-batch is what a real model takes with it. `TRAINCTL_SEEDS`: of more models."""

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.protocol.batch.memory_model import fit
from trainctl.trainer import demo_assets

ROOT = Path(__file__).parents[3]
MODELS = 5 if "TRAINCTL_SEEDS" in os.environ else 1
MEASURED, PREDICTED = "1,2,4,8", "3,6,12"


def peaks(run: Path, sizes: str) -> dict[int, float]:
    """Bytes by micro-batch, of a process of its own."""
    words = [sys.executable, "-m", "tests.trainer.support.step_peaks", str(run), "here", sizes]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10 * HANG_SECONDS)
    return {int(micro): size for micro, size in json.loads(done.stdout).items()}


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc, which only Linux has")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(MODELS))
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_peaks_of_micro_batches_that_were_not_measured_are_predicted(
    run_file: Callable[..., Any], tmp_path: Path, backend: str, seed: int
) -> None:
    chance = random.Random(seed)
    shape = demo_assets.llama_config(
        hidden=32 * chance.randint(2, 4), layers=chance.randint(1, 4), heads=2, intermediate=192
    )
    demo_assets.make_model(tmp_path / "model", shape | {"vocab_size": 2048 * chance.randint(2, 6)})
    run_file(
        model__path=str(tmp_path / "model"), data__sequence_length=32 * chance.randint(2, 4),
        nodes__here={"backend": backend, "device": "cpu", "threads": 1},
    )  # fmt: skip
    model = fit(list(peaks(tmp_path / "run.toml", MEASURED).items()))
    assert model is not None
    found = peaks(tmp_path / "run.toml", PREDICTED)
    errors = sorted(abs(model.peak(micro) / peak - 1) for micro, peak in found.items())
    print(f"{backend}: predicted peaks are off by {statistics.median(errors):.1%} median, {errors[-1]:.1%} worst")
    assert statistics.median(errors) <= 0.03
    assert errors[-1] <= 0.10
