"""Memory: what a process holds, what `check` estimates, and the peak predicted for a micro-batch, by real models."""

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.lacking import memory_groups
from tests.tiers import is_soak
from tests.trainer.support.quantized_model import quantized_copy
from tests.waiting import HANG_SECONDS

from trainctl.protocol.batch.memory_estimate import estimate_memory, fit
from trainctl.protocol.config.model_facts import read_facts
from trainctl.trainer import demo_assets
from trainctl.trainer.backends import memory as host_memory
from trainctl.trainer.backends.memory import HostMemory

MUCH, BLOCK = 50_000_000, 100_000_000


def use_and_free(meanwhile=lambda: None):
    block = np.ones(BLOCK, np.uint8)
    meanwhile()
    del block


def read_again(memory):
    """A reading of now, and not that of a moment ago."""
    first = memory.read()
    while (found := memory.read()) is first:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_on_a_cpu_either_backend_tells_what_the_process_holds(new_rig, backend):
    memory = new_rig(backend).backend.device.memory.read()
    assert memory.used_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.3)
    assert memory.peak_bytes >= memory.used_bytes


@pytest.mark.tier("all")
@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_the_peak_of_a_step_falls_with_its_micro_batch_and_holds_what_the_update_has_freed(new_rig, tmp_path, backend):
    # A wide vocabulary: each array of logits is so large that the allocator gives it back to the system when freed.
    config = demo_assets.llama_config(hidden=16, layers=1, heads=2, intermediate=32, vocabulary=16_000)
    demo_assets.make_model(tmp_path / "wide", config, seed=7)
    rig = new_rig(backend, model__path=str(tmp_path / "wide"), data__sequence_length=128)
    large = rig.train(1, 12)
    assert large.values["memory_peak_bytes"] > large.values["memory_bytes"] + MUCH
    small = rig.train(2, 2)
    assert small.values["memory_bytes"] <= small.values["memory_peak_bytes"] < large.values["memory_peak_bytes"] - MUCH


def test_the_allocator_of_mlx_which_a_gpu_is_asked_for_gives_each_step_s_own_peak(new_rig):
    from trainctl.trainer.backends.mlx_backend import MlxMemory

    gc.collect()  # other tests' models are in the same process
    rig = new_rig("mlx")
    rig.backend.device.memory = MlxMemory(None)  # a CPU's allocator counts as well
    first, large, small = rig.train(1, 2), rig.train(2, 12), rig.train(3, 2)
    assert large.values["memory_peak_bytes"] > large.values["memory_bytes"] > 0
    assert small.values["memory_peak_bytes"] == pytest.approx(first.values["memory_peak_bytes"], rel=0.2)
    held = small.values["memory_bytes"]
    assert small.values["memory_peak_bytes"] - held < (large.values["memory_peak_bytes"] - held) / 2


@pytest.mark.parametrize("kernel", [True, False], ids=["kept by the kernel", "sampled"])
def test_a_peak_is_kept_until_it_was_read_and_is_then_begun_again(kernel, tmp_path, monkeypatch):
    if not kernel:
        monkeypatch.setattr(host_memory, "_CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    memory = HostMemory(None)
    memory.read()
    memory.reset()
    use_and_free(memory.sample)
    memory.reset()  # the next step's: nothing has been read since
    found = read_again(memory)
    assert found.used_bytes is not None and found.peak_bytes is not None
    assert found.peak_bytes > found.used_bytes + MUCH
    memory.reset()
    later = read_again(memory)
    assert later.peak_bytes is not None
    assert later.peak_bytes < found.peak_bytes - MUCH


CAP = """
import sys
from pathlib import Path
from trainctl.trainer.backends.memory import HostMemory
group = Path(sys.argv[1])
(group / "cgroup.procs").write_text("0")
memory = HostMemory(int(sys.argv[2]) or None)
print(memory.read().cap_bytes)
"""


@pytest.mark.needs("cgroups")
@pytest.mark.parametrize(("limit", "cap"), [(0, 2**29), (2**28, 2**28), (2**30, 2**29)])
def test_the_cap_is_that_of_the_control_group_unless_the_node_s_limit_is_lower(limit, cap):
    group = memory_groups() / f"tc{os.getpid()}-cap"
    group.mkdir()
    try:
        version_1, version_2 = group / "memory.limit_in_bytes", group / "memory.max"
        (version_1 if version_1.exists() else version_2).write_text(str(2**29))
        command = [sys.executable, "-c", CAP, str(group), str(limit)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    finally:
        group.rmdir()
    assert int(done.stdout) == cap


ROOT = Path(__file__).parents[3]


def estimated(config):
    node = config.nodes["here"]
    facts = read_facts(Path(config.model.path), "run.toml: model.path")
    assert facts is not None
    return estimate_memory(config, facts, node, node.backend, "run.toml")


LORA = {"adapter": {"kind": "lora"}}


@pytest.mark.tier("all")
@pytest.mark.needs("linux")  # the peak is read from /proc, which only Linux has
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "base", "length", "changes", "allowed"),
    [
        ("mlx", "stored", 32, {}, 0.25),
        ("torch", "stored", 16, {"model__dtype": "bfloat16"}, 0.25),
        ("torch", "nf4", 128, LORA, 0.15),
        ("mlx", "mlx-4bit", 64, LORA, 0.15),
        pytest.param("torch", "stored", 128, {}, 0.25, marks=pytest.mark.tier("soak")),
        pytest.param("torch", "stored", 128, LORA, 0.25, marks=pytest.mark.tier("soak")),
        pytest.param("torch", "mlx-4bit", 128, LORA, 0.15, marks=pytest.mark.tier("soak")),
    ],
)
def test_the_estimate_is_near_what_is_measured(run_file, tmp_path, backend, base, length, changes, allowed):
    """At times glibc's allocator keeps less of what is freed, so a peak that is outside is measured again."""
    shape = demo_assets.llama_config(hidden=384, layers=10, heads=6, intermediate=1024) | {"vocab_size": 8192}
    demo_assets.make_model(tmp_path / "model", shape)
    model = quantized_copy(tmp_path / "model", base) if base.startswith("mlx") else tmp_path / "model"
    there = {"backend": backend, "device": "cpu", "threads": 1}
    config = run_file(
        model__path=str(model), model__base=base, data__sequence_length=length, nodes__here=there, **changes
    )
    found, ratios = estimated(config), list[float]()
    assert 18e6 < found.parameters < 50e6
    words = [sys.executable, "-m", "tests.trainer.support.peak_memory", str(tmp_path / "run.toml"), "here", "--copy"]
    while not any(1 / (1 + allowed) < ratio < 1 + allowed for ratio in ratios):
        assert len(ratios) < 3, ratios
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10 * HANG_SECONDS)
        ratios.append(found.total / int(done.stdout))


def test_what_is_trained_and_how_each_setting_changes_a_part(run_file):
    full = estimated(run_file())
    assert full.trained == full.parameters == 29_088
    assert (full.gradient_bytes, full.parts["weights"], full.parts["optimizer"]) == (116_352, 116_352, 232_704)
    lora = estimated(run_file(adapter={"kind": "lora", "rank": 4}))
    assert lora.trained == 4 * 2 * (4 * (32 + 32) + 3 * (32 + 64))
    assert lora.parts["weights"] == 4 * lora.parameters + 4 * lora.trained
    for dtype, size in (("bfloat16", 6), ("float16", 6)):
        half = estimated(run_file(model__dtype=dtype))
        assert half.parts["weights"] == size * full.parameters
    there = {"backend": "mlx"}
    kept, saving = (
        estimated(run_file(nodes__here=there, model__gradient_checkpointing=mode)) for mode in ("none", "all")
    )
    assert saving.parts["activations"] < 0.6 * kept.parts["activations"]


def test_the_copy_for_checkpoints_counts_where_it_is_in_the_device_s_memory(run_file):
    there = {"backend": "torch", "device": "cpu"}
    full = estimated(run_file(nodes__here=there))
    assert full.parts["copy"] == 12 * full.trained
    for config in (
        run_file(nodes__here=there, checkpoint={"background": False}),
        run_file(nodes__here=there | {"device": "cuda:0"}),
    ):
        assert "copy" not in estimated(config).parts


def test_a_chunked_loss_keeps_the_logits_of_a_chunk(run_file):
    tokens = {"data__sequence_length": 100_000, "batch": {"global": 12, "micro": 12}}
    whole, chunked = (estimated(run_file(model__chunked_loss=mode, **tokens)) for mode in ("off", "on"))
    assert chunked.parts["logits"] < 0.2 * whole.parts["logits"]
    there = {"backend": "torch", "device": "cpu", "memory_limit_gb": 4.0}
    assert estimated(run_file(nodes__here=there, **tokens)).parts["logits"] == chunked.parts["logits"]


SOAK = is_soak()
MODELS = 5 if SOAK else 1
MEASURED, PREDICTED = (1, 2, 4, 8), (3, 6, 10)


def peaks(run, sizes):
    """Bytes by micro-batch, of a process of its own."""
    words = [sys.executable, "-m", "tests.trainer.support.peak_memory", str(run), "here", "--micros"]
    words.append(",".join(map(str, sizes)))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10 * HANG_SECONDS)
    return {int(micro): size for micro, size in json.loads(done.stdout).items()}


@pytest.mark.tier("all")
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
