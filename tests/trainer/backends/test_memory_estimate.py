"""The memory that `trainctl check` estimates is what a rank takes.

`make test-all` has one of each backend, data type and quantized form.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.support.quantized_model import quantized_copy
from tests.waiting import HANG_SECONDS

from trainctl.protocol.batch.memory_estimate import MemoryEstimate, estimate_memory
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer import demo_assets

ROOT = Path(__file__).parents[3]


def estimated(config: Any) -> MemoryEstimate:
    node = config.nodes["here"]
    facts = read_facts(Path(config.model.path), "run.toml: model.path")
    assert facts is not None
    return estimate_memory(config, facts, node, node.backend, "run.toml")


@pytest.mark.tier("all")
@pytest.mark.needs("linux")  # the peak is read from /proc, which only Linux has
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "length", "changes"),
    [
        pytest.param("torch", 128, {}, marks=pytest.mark.tier("soak")),
        ("mlx", 32, {}),
        pytest.param("torch", 128, {"adapter": {"kind": "lora"}}, marks=pytest.mark.tier("soak")),
        ("torch", 16, {"model__dtype": "bfloat16"}),
    ],
)
def test_the_estimate_is_within_a_quarter_of_what_is_measured(
    run_file: Callable[..., Any], tmp_path: Path, backend: str, length: int, changes: dict[str, Any]
) -> None:
    make_model(tmp_path / "model")
    there = {"backend": backend, "device": "cpu", "threads": 1}
    model = str(tmp_path / "model")
    config = run_file(model__path=model, data__sequence_length=length, nodes__here=there, **changes)
    found = estimated(config)
    assert 18e6 < found.parameters < 50e6
    assert found.total == pytest.approx(measured_peak(tmp_path / "run.toml"), rel=0.25)


def make_model(folder: Path) -> None:
    shape = demo_assets.llama_config(hidden=384, layers=10, heads=6, intermediate=1024) | {"vocab_size": 8192}
    demo_assets.make_model(folder, shape)


def measured_peak(run: Path) -> int:
    """Bytes, of a process of its own."""
    words = [sys.executable, "-m", "tests.trainer.support.peak_memory", str(run), "here", "--copy"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10 * HANG_SECONDS)
    return int(done.stdout)


@pytest.mark.tier("all")
@pytest.mark.needs("linux")  # the peak is read from /proc, which only Linux has
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "base", "length"),
    [
        pytest.param("torch", "mlx-4bit", 128, marks=pytest.mark.tier("soak")),
        ("torch", "nf4", 128),
        ("mlx", "mlx-4bit", 64),
    ],
)
def test_the_estimate_of_a_quantized_base_is_within_15_percent(
    run_file: Callable[..., Any], tmp_path: Path, backend: str, base: str, length: int
) -> None:
    """At times glibc's allocator keeps less of what is freed, so a peak that is outside is measured again."""
    make_model(tmp_path / "model")
    model = tmp_path / "model" if base == "nf4" else quantized_copy(tmp_path / "model", base)
    there = {"backend": backend, "device": "cpu", "threads": 1}
    changes = {"model__base": base, "data__sequence_length": length, "adapter": {"kind": "lora"}}
    found = estimated(run_file(model__path=str(model), nodes__here=there, **changes)).total
    ratios: list[float] = []
    while not any(1 / 1.15 < ratio < 1.15 for ratio in ratios):
        assert len(ratios) < 3, ratios
        ratios.append(found / measured_peak(tmp_path / "run.toml"))


def test_what_is_trained_and_how_each_setting_changes_a_part(run_file: Callable[..., Any]) -> None:
    full = estimated(run_file())
    assert full.trained == full.parameters == 29_088
    assert (full.gradient_bytes, full.parts["weights"], full.parts["optimizer"]) == (116_352, 116_352, 232_704)
    lora = estimated(run_file(adapter={"kind": "lora", "rank": 4}))
    assert lora.trained == 4 * 2 * (4 * (32 + 32) + 3 * (32 + 64))
    assert lora.parts["weights"] == 4 * lora.parameters + 4 * lora.trained
    for dtype, size in (("bfloat16", 4), ("bf16-sr", 2), ("float16", 6)):
        half = estimated(run_file(model__dtype=dtype))
        assert half.parts["weights"] == size * full.parameters
    there = {"backend": "mlx"}
    kept, saving = (
        estimated(run_file(nodes__here=there, model__gradient_checkpointing=mode)) for mode in ("none", "all")
    )
    assert saving.parts["activations"] < 0.6 * kept.parts["activations"]


def test_the_copy_for_checkpoints_counts_where_it_is_in_the_device_s_memory(run_file: Callable[..., Any]) -> None:
    there = {"backend": "torch", "device": "cpu"}
    full = estimated(run_file(nodes__here=there))
    assert full.parts["copy"] == 12 * full.trained
    for config in (
        run_file(nodes__here=there, checkpoint={"background": False}),
        run_file(nodes__here=there | {"device": "cuda:0"}),
    ):
        assert "copy" not in estimated(config).parts


def test_a_chunked_loss_keeps_the_logits_of_a_chunk(run_file: Callable[..., Any]) -> None:
    tokens = {"data__sequence_length": 100_000, "batch": {"global": 12, "micro": 12}}
    whole, chunked = (estimated(run_file(model__chunked_loss=mode, **tokens)) for mode in ("off", "on"))
    assert chunked.parts["logits"] < 0.2 * whole.parts["logits"]
    there = {"backend": "torch", "device": "cpu", "memory_limit_gb": 4.0}
    assert estimated(run_file(nodes__here=there, **tokens)).parts["logits"] == chunked.parts["logits"]


def test_an_unknown_target_is_named(run_file: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"^run\.toml: adapter\.targets: the model has no layer 'qkv'; it has "):
        estimated(run_file(adapter={"kind": "lora", "targets": ["qkv"]}))
