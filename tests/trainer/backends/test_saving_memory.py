"""Gradient checkpointing changes no bit of a gradient, a chunked loss only its last ones; both save memory."""

import dataclasses
import gc
import importlib
import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.passes import accumulate, blocks, furthest, loss_and_gradient

from trainctl.protocol.batch.memory_estimate import Chunking
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.memory import Memory, free_bytes

LORA = {"adapter": {"kind": "lora", "rank": 4}}
BACKENDS = pytest.mark.parametrize("backend", ["torch", "mlx"])


def batch(length=20, rows=3):
    """Some targets don't count."""
    made = blocks(rows, length)
    made.counted[0, : length // 2] = 0
    return made


def chunked(load_backend, backend, logits, **changes):
    """Load a model whose loss is computed in chunks of so many logits."""
    model: Any = load_backend(backend, model__chunked_loss="on", **changes)
    chunks = model.passes.chunks
    chunks.chunking = chunks.chunking._replace(logits=logits)
    return model


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
@BACKENDS
def test_gradient_checkpointing_is_bitwise_equal(load_backend, backend, adapter):
    plain = load_backend(backend, **adapter)
    loss, gradient = loss_and_gradient(plain, batch())
    for mode in ("alternate", "all"):
        saving = load_backend(backend, model__gradient_checkpointing=mode, **adapter)
        assert list(saving.shapes) == list(plain.shapes)
        again, same = loss_and_gradient(saving, batch())
        assert again == loss
        assert same.keys() == gradient.keys()
        assert all(np.array_equal(same[name], array) for name, array in gradient.items())
        assert saving.evaluate(batch()) == plain.evaluate(batch())


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
@BACKENDS
def test_a_chunked_loss_is_the_same_one(load_backend, backend, adapter):
    plain = load_backend(backend, model__chunked_loss="off", **adapter)
    saving = chunked(load_backend, backend, 257 * 7, **adapter)  # 60 tokens in 9 chunks
    loss, gradient = loss_and_gradient(plain, batch())
    again, same = loss_and_gradient(saving, batch())
    assert again == pytest.approx(loss, rel=1e-6)
    assert furthest(same, gradient) <= 1e-6
    ours, theirs = (each.evaluate(batch()).losses["tokens"] for each in (saving, plain))
    assert ours == pytest.approx(theirs, rel=1e-6)
    logs = saving.token_log_probabilities(batch())
    assert logs == pytest.approx(plain.token_log_probabilities(batch()), rel=1e-5, abs=1e-6)
    assert logs.shape == (3, 20)


def test_chunks_on_mlx_train_a_tied_head_beside_what_else_is_outside_the_body():
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten

    from trainctl.trainer.backends.mlx_loss import MlxChunks, cross_entropy

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(50, 8)

        def __call__(self, inputs, cache=None):
            return mx.tanh(self.wte(inputs))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.norm = Body(), nn.RMSNorm(8)

        def __call__(self, inputs, cache=None):
            return self.model.wte.as_linear(self.norm(self.model(inputs)))

    model, inputs = Model(), mx.arange(40).reshape(2, 20)
    targets = (inputs + 7) % 50
    expected = nn.value_and_grad(model, lambda: cross_entropy(model(inputs), targets, "sum"))()[1]
    chunks = MlxChunks.of(model, Chunking("on", vocabulary=50, free_bytes=1))
    gradient = nn.value_and_grad(model, lambda: chunks.chunked_cross_entropy(inputs, targets, 7).sum())()[1]
    pairs = dict(tree_flatten(gradient)), dict(tree_flatten(expected))
    assert furthest(*({name: np.array(array) for name, array in each.items()} for each in pairs)) <= 1e-6


@BACKENDS
def test_both_keep_the_documents_of_a_pack_apart(load_backend, backend):
    """With dropout, whose masks backward has to find again."""
    table = LORA["adapter"] | {"dropout": 0.1}
    places = np.tile(np.concatenate([np.arange(8), np.arange(12)]), (3, 1))
    keys = np.arange(60, dtype=np.int32).reshape(3, 20)
    given = dataclasses.replace(batch(), positions=places.astype(np.int32), keys=keys)
    plain = load_backend(backend, model__chunked_loss="off", adapter=table)
    saving = chunked(load_backend, backend, 257 * 7, model__gradient_checkpointing="all", adapter=table)
    loss, gradient = loss_and_gradient(plain, given)
    again, same = loss_and_gradient(saving, given)
    assert again == pytest.approx(loss, rel=1e-6)
    assert abs(loss - loss_and_gradient(load_backend(backend, adapter=table), batch())[0]) > 1e-5 * loss
    assert furthest(same, gradient) <= 2e-6


def peak_bytes(backend, given):
    """Return what the arrays of a forward and a backward pass take, as the library's own allocator counts them."""
    loss_and_gradient(backend, given)
    backend.clear()
    gc.collect()
    if backend.name == "mlx":
        import mlx.core as mx

        mx.reset_peak_memory()
        held = mx.get_active_memory()
        loss_and_gradient(backend, given)
        return mx.get_peak_memory() - held
    from torch import profiler

    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        loss_and_gradient(backend, given)
    kept: Any = seen.profiler
    allocations = [event for event in kept.kineto_results.events() if event.name() == "[memory]"]
    return max(
        itertools.accumulate(event.nbytes() for event in sorted(allocations, key=lambda event: event.start_ns()))
    )


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.tier("all"))])
def test_gradient_checkpointing_saves_memory(load_backend, tmp_path, backend):
    config = demo_assets.llama_config(hidden=64, layers=6, heads=4, intermediate=512)
    demo_assets.make_model(tmp_path / "deep", config)
    peaks = {}
    for mode in ("none", "alternate", "all"):
        model = load_backend(backend, model__path=str(tmp_path / "deep"), model__gradient_checkpointing=mode)
        peaks[mode] = peak_bytes(model, batch(256, 2))
    assert peaks["all"] < 0.7 * peaks["none"], peaks
    assert peaks["alternate"] < 0.9 * peaks["none"], peaks


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.tier("all"))])
def test_a_chunked_loss_saves_memory(load_backend, tmp_path, backend):
    config = demo_assets.llama_config(hidden=32, layers=1, heads=2, intermediate=64) | {"vocab_size": 8192}
    demo_assets.make_model(tmp_path / "wide", config)
    wide = {"model__path": str(tmp_path / "wide")}
    plain, saving = (
        load_backend(backend, model__chunked_loss="off", **wide),
        chunked(load_backend, backend, 1 << 18, **wide),
    )
    assert peak_bytes(saving, batch(256, 2)) < 0.7 * peak_bytes(plain, batch(256, 2))


def test_a_step_of_all_weights_on_mlx_holds_one_gradient_and_lets_go_of_it(load_backend, tmp_path):
    import mlx.core as mx

    config = demo_assets.llama_config(hidden=192, layers=4, heads=4, intermediate=768)
    demo_assets.make_model(tmp_path / "large", config)
    gc.collect()
    before = mx.get_active_memory()
    backend = load_backend("mlx", model__path=str(tmp_path / "large"))
    values = sum(math.prod(shape) for shape in backend.shapes.values())
    for _ in range(2):
        mx.reset_peak_memory()
        accumulate(backend, batch(2, 1))
        backend.gradient_norm()
        backend.update(1e-3, 1.0)
    assert mx.get_peak_memory() - before <= 1.1 * 16 * values, "weights, two moments and a gradient"
    assert mx.get_active_memory() - before <= 1.01 * 12 * values


def test_accumulators_on_mlx_are_replaced_one_by_one(load_backend, tmp_path):
    import mlx.core as mx

    demo_assets.make_model(
        tmp_path / "large", demo_assets.llama_config(hidden=192, layers=4, heads=4, intermediate=768)
    )
    backend = load_backend("mlx", model__path=str(tmp_path / "large"))
    accumulate(backend, batch(2, 1))
    sums = {name: array + 1 for name, array in backend.copy_out("accumulators").items()}
    values, largest = sum(array.size for array in sums.values()), max(array.size for array in sums.values())
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    backend.copy_in("accumulators", sums)
    assert mx.get_peak_memory() - before <= 4 * 1.1 * largest < 4 * 0.5 * values
    assert all((sums[name] == array).all() for name, array in backend.copy_out("accumulators").items())


def test_the_norm_of_gradients_that_overflow_copies_one_of_them_at_a_time(load_backend):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            parts = made if isinstance(made, list | tuple) else [made]
            self.most = max(self.most, sum(part.nbytes for part in parts if isinstance(part, torch.Tensor)))
            return made

    backend = load_backend("torch")
    accumulate(backend, batch(2, 1), scale=1e30)
    largest = max(4 * math.prod(shape) for shape in backend.shapes.values())
    with Copies() as copies:
        norm = backend.gradient_norm()
        backend._accumulators[0].view(-1)[0] = math.inf
        assert backend.gradient_norm() == math.inf
        backend._accumulators[0].view(-1)[0] = math.nan
        assert math.isnan(backend.gradient_norm())
    assert 1e20 < norm < math.inf
    assert copies.most <= largest


def test_auto_chunks_when_logits_would_take_over_a_tenth_of_the_free_memory():
    chunking = Chunking("auto", vocabulary=1000, free_bytes=40_000_000, logits=250_500)
    assert chunking.chunk_tokens(1000) is None
    assert chunking.chunk_tokens(1001) == 250
    assert chunking._replace(mode="on").chunk_tokens(1) == 250
    assert chunking._replace(mode="off").chunk_tokens(10**9) is None
    assert chunking._replace(mode="on", logits=10).chunk_tokens(5) == 1


def test_free_memory_is_what_the_cap_leaves_and_the_host_has():
    host = free_bytes(Memory(), of_host=True)
    assert host > 10_000_000
    assert free_bytes(Memory(used_bytes=7, cap_bytes=10), of_host=True) == 3
    assert free_bytes(Memory(used_bytes=0, cap_bytes=2**60), of_host=False) == 2**60
    assert free_bytes(Memory(used_bytes=9, cap_bytes=8), of_host=False) == 0


@BACKENDS
def test_a_model_that_cannot_do_it_is_one_line(backend):
    from torch import nn

    checkpoint = importlib.import_module(f"trainctl.trainer.model.{backend}_model").checkpoint_layers
    library = importlib.import_module(f"trainctl.trainer.backends.{backend}_passes")
    model = SimpleNamespace()
    model.base_model = model
    passes = getattr(library, f"{backend.title()}Passes")(model)

    with pytest.raises(InvalidInputError, match=r"^run\.toml: model\.gradient_checkpointing: .* use \"none\"$"):
        checkpoint(nn.Linear(2, 2), "all", "run.toml")
    with pytest.raises(InvalidInputError, match=r"^run\.toml: model\.chunked_loss: "):
        passes.chunk_losses(Chunking("on", 1, 1), "run.toml")
