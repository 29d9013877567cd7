"""The memory that full training takes at its peak, in bytes per parameter: one case, or all of a larger model."""

import math
import subprocess
import sys

import pytest
from tests.conftest import ROOT
from tests.tiers import is_soak
from tests.waiting import HANG_SECONDS

from trainctl.protocol.config.model_facts import read_facts
from trainctl.trainer import demo_assets

pytestmark = pytest.mark.tier("all")

ALL = is_soak()
BARS = {
    ("torch", "bfloat16", "adamw"): 20.0, ("torch", "bfloat16", "adamw-8bit"): 16.0,
    ("torch", "bf16-sr", "adamw"): 18.0, ("torch", "bf16-sr", "adamw-8bit"): 16.0,
    ("mlx", "bfloat16", "adamw"): 20.0, ("mlx", "bf16-sr", "adamw"): 18.0,
}  # fmt: skip
"""With two micro-batches per step, of the process on torch and of the allocator on MLX, which keeps freed memory in the
process. Without activations and the libraries' memory, each is 2 less at least. The goal for bf16-sr with `adamw`
is 16: 17.3 and 16.9 were measured on torch, and 16.6 on MLX."""
SMALL = ("torch", "bf16-sr", "adamw")
LIBRARY_BYTES = 110_000_000
"""Of the libraries' working memory and the activations, which count more on the smaller model of `make test`."""


def make_model(folder):
    layers, width = (8, 768) if ALL else (6, 384)
    shape = demo_assets.llama_config(hidden=width, layers=layers, heads=12, intermediate=8 * width // 3)
    demo_assets.make_model(folder, shape | {"vocab_size": 8192})


@pytest.mark.needs("linux")  # the peak is read from /proc, which only Linux has
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", BARS if ALL else [SMALL], ids=" ".join)
def test_the_peak_is_below_the_bar(run_file, tmp_path, case):
    backend, dtype, kind = case
    make_model(tmp_path / "model")
    run_file(
        model__path=str(tmp_path / "model"), model__dtype=dtype, optimizer__kind=kind, data__sequence_length=16,
        batch={"global": 1, "micro": 1}, nodes__here={"backend": backend, "device": "cpu", "threads": 1},
    )  # fmt: skip
    facts = read_facts(tmp_path / "model", "model")
    words = [sys.executable, "-m", "tests.trainer.support.peak_memory", str(tmp_path / "run.toml"), "here"]
    words += ["--allocator"] if backend == "mlx" else []
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30 * HANG_SECONDS)
    parameters = sum(map(math.prod, facts.shapes.values()))
    beside = 0 if ALL else LIBRARY_BYTES
    per_parameter = (int(done.stdout.split()[-1]) - beside) / parameters
    print(f"{' '.join(case)}: {per_parameter:.2f} bytes per parameter")
    assert 8 < per_parameter <= BARS[case]
