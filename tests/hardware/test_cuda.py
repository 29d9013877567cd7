"""Torch on an NVIDIA GPU: a CPU's curves, also compiled, no wait within a micro-batch, and memory as is stated."""

import gc
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.support.compiled_losses import CASES, RAGGED, check, compare
from tests.trainer.support.curves import TOLERANCES, UNEVEN, group_losses, losses, worst
from tests.trainer.support.pinned import doubled_by_another_process
from tests.trainer.support.quantized_model import quantized_copy

from trainctl.protocol import messages as m
from trainctl.trainer import demo_assets
from trainctl.trainer.data.permutation import samples_at

GPU = {"device": "cuda"}
STEPS = 20
LORA = {"kind": "lora", "rank": 4, "dropout": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "masked": {"samples": True}, "packed": {"samples": True, "data__packing": "best-fit"},
    "lora": {"adapter": LORA}, "lora masked": {"adapter": LORA, "samples": True},
    "chunked": {"model__chunked_loss": "on"}, "checkpointed": {"model__gradient_checkpointing": "all"},
}  # fmt: skip
VARLEN = KINDS["packed"] | {"model__dtype": "bfloat16", "model__attention": "varlen"}


def both(new_rig, **changes):
    """Losses on the GPU and on the CPU, with other micro-batches on the way."""
    gpu, cpu = (losses(new_rig("torch", node=node, **changes), True, STEPS) for node in (GPU, {}))
    assert cpu[-1] < 0.99 * cpu[0], "it has to learn for this to mean anything"
    return gpu, cpu


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_is_that_of_a_cpu_with_each_kind_of_batch_and_adapter(new_rig, kind):
    apart = worst(*both(new_rig, **KINDS[kind]))
    print(f"{kind}: {apart:.2g}")
    assert 0 < apart < TOLERANCES["float32"]


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
@pytest.mark.parametrize("form", ["mlx-4bit", "nvfp4"])
def test_a_quantized_base_draws_the_curve_of_a_cpu(new_rig, assets, tmp_path, form):
    demo_assets.make_model(tmp_path / "m", demo_assets.llama_config(hidden=64, layers=2, heads=2, intermediate=128))
    apart = worst(*both(new_rig, model__path=str(quantized_copy(tmp_path / "m", form)), adapter=LORA))
    print(f"{form}: {apart:.2g}")
    assert 0 < apart < TOLERANCES["float32"]


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("other", ["torch", pytest.param("mlx", marks=pytest.mark.needs("mlx-gpu"))])
def test_ranks_on_one_gpu_draw_the_curve_of_one(new_rig, new_ranks, other, dtype):
    alone = losses(new_rig("torch", node=GPU, model__dtype=dtype), False, STEPS)
    ranks = new_ranks("gloo", ("torch", other), node={"device": "gpu"}, model__dtype=dtype)  # a name that both know
    apart = worst(group_losses(ranks, UNEVEN), alone)
    print(f"torch and {other}, {dtype}: {apart:.2g}, on {[rank.rig.backend.device.name for rank in ranks.ranks]}")
    assert alone[-1] < 0.9 * alone[0], "it has to learn for this to mean anything"
    assert "cpu" not in [rank.rig.backend.device.name for rank in ranks.ranks]
    assert apart < TOLERANCES[dtype]


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
@pytest.mark.parametrize("kind", ["blocks", *KINDS, "varlen"])
def test_the_host_does_not_wait_within_a_micro_batch(new_rig, kind):
    rig = new_rig("torch", node=GPU, **(KINDS | {"varlen": VARLEN}).get(kind, {}))
    rig.train(1, 4)
    batches = [rig.dataset.batch(samples_at(np.arange(at, at + 4), rig.dataset.samples, 3)) for at in (0, 4)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            rig.backend.loss_and_gradient(batch, {"tokens": 1.0}, adding=nullcontext())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rig.backend.gradient_norm() > 0


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
def test_the_group_s_sum_is_copied_into_the_accumulators_that_there_are(new_rig):
    backend = new_rig("torch", node=GPU).backend
    sums = {name: array + 1 for name, array in backend.copy_out("accumulators").items()}
    before = [tensor.data_ptr() for tensor in backend._accumulated()]
    backend.copy_in("accumulators", sums)
    assert [tensor.data_ptr() for tensor in backend._accumulated()] == before
    assert all(np.array_equal(sums[name], array) for name, array in backend.copy_out("accumulators").items())


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
def test_a_micro_batch_that_does_not_fit_is_run_in_halves(new_rig):
    count = 2048
    found = []
    for limit in ({}, {"memory_limit_gb": 0.15}):
        rig = new_rig("torch", node=GPU | limit)
        work = (m.RankWork(0, (m.Range(0, count),), count),)
        reports = [rig.train(1, count, global_batch=count, work=work)]
        work = (m.RankWork(0, (m.Range(count, count),), count),)
        reports.append(rig.train(2, count, cursor=count, global_batch=count, work=work))
        found.append(reports)
        del rig
        gc.collect()
        torch.cuda.empty_cache()
    whole, halves = found
    print([(report.micro_batch, report.replays, report.values.get("memory_peak_bytes")) for report in halves])
    assert [report.replays for report in whole] == [0, 0]
    assert 1 < halves[0].micro_batch < count
    assert halves[0].replays >= 1
    assert halves[1].replays == 0, "the size that fitted is kept"
    for one, other in zip(whole, halves, strict=True):
        assert one.weight == other.weight
        assert one.loss_sum == pytest.approx(other.loss_sum, rel=TOLERANCES["float32"])


LIBRARY_BYTES = 140e6
"""Bytes of cuBLAS's workspace, the second gradient of tied embeddings and the activations of 16 tokens."""
BYTES = {("float32", "adamw"): 20, ("bfloat16", "adamw"): 20}


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
@pytest.mark.parametrize("case", BYTES, ids=" ".join)
def test_the_peak_is_what_the_documentation_states(new_rig, tmp_path, case):
    shape = demo_assets.llama_config(hidden=768, layers=8, heads=12, intermediate=2048)
    parameters = demo_assets.make_model(tmp_path / "model", shape | {"vocab_size": 8192})
    held = torch.cuda.memory_allocated()  # workspaces of threads that other tests had
    rig = new_rig(
        "torch", node=GPU, model__path=str(tmp_path / "model"), model__dtype=case[0], optimizer__kind=case[1],
        data__sequence_length=16,
    )  # fmt: skip
    rig.train(1, 1)
    values = rig.train(2, 1).values
    per_parameter = (values["memory_peak_bytes"] - held - LIBRARY_BYTES) / parameters
    print(f"{case}: {values['memory_peak_bytes'] / parameters:.2f} bytes per parameter, {per_parameter:.2f} of state")
    assert 8 < per_parameter <= BYTES[case]
    parts = sum(values[f"memory_{part}_bytes"] for part in ("weights", "gradients", "moments"))
    assert parts <= values["memory_peak_bytes"] <= values["memory_cap_bytes"]


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
@pytest.mark.parametrize("kind", ["adamw-8bit", "paged-adamw", "paged-adamw-8bit"])
def test_the_optimizers_of_bitsandbytes_train(new_rig, kind):
    plain, other = (losses(new_rig("torch", node=GPU, optimizer__kind=one), True, STEPS) for one in ("adamw", kind))
    print(f"{kind}: {worst(other, plain):.2g}")
    assert worst(other, plain) < (0.05 if "8bit" in kind else 5e-4), "its kernels decay weights after the update"


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
def test_phases_are_times_of_the_device(new_rig):
    rig = new_rig("torch", node=GPU)
    rig.train(1, 4)
    report = rig.train(2, 4)
    phases = report.phases
    assert phases.forward > 0
    assert phases.backward > 0
    assert phases.forward + phases.backward <= report.step_seconds
    assert "NVIDIA" in rig.backend.device.name


@pytest.mark.needs("cuda")
@pytest.mark.usefixtures("gpu_as_found")
def test_the_buffer_of_a_sum_is_pinned_where_it_is_shared(new_rig):
    backend = new_rig("torch", node=GPU).backend
    for seed in range(2):  # also where the memory was pinned before
        views = doubled_by_another_process(backend, seed)
        assert all(torch.from_numpy(array).is_pinned() for array in views.values())
        del views
        gc.collect()


NODE = {"backend": "torch", "device": "cuda", "threads": 1}
QUICK = ("ragged", "ragged lora", "bfloat16")
TRIED = [
    pytest.param(mode, case, marks=[] if case in QUICK else [pytest.mark.tier("soak")])
    for mode in ("default", "reduce-overhead")
    for case, (_, sizes, _) in CASES.items()
    if sizes == RAGGED and (mode == "default" or "lora" not in case)
]
"""Graphs aren't recorded with adapters."""
PADDED = {"4x20": 20, "3x17": 20, "2x9": 10, "1x8": 10, "1x20": 20}
"""For RAGGED, the lengths that rows get where CUDA graphs are recorded."""


@pytest.mark.needs("cuda", "cuda-compiler")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("mode", "case"), TRIED)
def test_losses_and_gradients_are_those_without(run_file, tmp_path, mode, case):
    changes, sizes, tolerance = CASES[case]
    run_file(**{"model__compile": mode, "nodes__here": NODE, "data__kind": "rows"} | changes)
    found = compare(tmp_path / "run.toml", sizes, tmp_path / "cache")
    print(mode, case, found)
    check(found, TOLERANCES[changes.get("model__dtype", "float32")], tolerance)
    assert found["mode"] == mode
    if mode == "default":
        assert found["recorded"] == 0
        assert found["lengths"] == sorted({int(size.partition("x")[2]) for size in sizes}), "nothing is padded"
    else:
        assert found["recorded"] > 0, "or what overwrites results was not tried"
        assert found["lengths"] == sorted({PADDED[size] for size in sizes})
