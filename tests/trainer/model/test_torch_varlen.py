"""Packs by `varlen_attn` train as with a mask.

Without an NVIDIA GPU, what torch documents of the kernel takes its place."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.trainer.support.families import EACH, SMALL
from tests.trainer.support.passes import blocks, furthest, loss_and_gradient, packs

from trainctl.protocol.config.run_tables import NodeTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.load import load
from trainctl.trainer.backends.passes import Decoding

Compute = Callable[..., Any]


def by_document(
    query: Any,
    key: Any,
    value: Any,
    starts: Any,
    ends: Any,
    longest: int,
    longest_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Any:
    """Attend as torch documents `varlen_attn` with the window of causal attention."""
    import torch

    assert starts is ends
    assert starts.dtype == torch.int32
    assert starts.is_contiguous()
    assert window_size == (-1, 0)
    assert query.shape[1] == key.shape[1] or enable_gqa
    bounds = starts.tolist()
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert (sum(sizes), max(sizes)) == (len(query), longest)
    assert longest == longest_key
    parts = [[each[begin:end].transpose(0, 1) for each in (query, key, value)] for begin, end in
             itertools.pairwise(bounds)]  # fmt: skip
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([
        attend(*part, is_causal=True, scale=scale, enable_gqa=enable_gqa).transpose(0, 1) for part in parts
    ])  # fmt: skip


class Kernel:
    """`varlen_attn` on one device; counts its calls."""

    def __init__(self, device: str, compute: Compute) -> None:
        self.device, self.compute, self.calls = device, compute, 0

    def __call__(self, *given: Any, **how: Any) -> Any:
        self.calls += 1
        return self.compute(*given, **how)


TOKENS = 40
WINDOWS = "has no attention windows, and this model's sliding_window is 8"
REFUSED = {
    "gemma2": "has no soft cap for attention scores",
    "gemma3": WINDOWS,
    "gemma4": WINDOWS,
    "olmo3": WINDOWS,
    "stablelm": "can't keep packed samples apart in this model",  # it passes no arguments on to attention
}
TOLERANCES = {"cpu": (1e-6, 1e-5), "cuda": (5e-3, 5e-2)}
"""Relative tolerances of the loss and of the gradient: float32 on a CPU, bfloat16 on a GPU."""
LORA = {"kind": "lora", "rank": 4}
PACKED, _ = packs(SMALL["vocab_size"])
BLOCKS = blocks(2, 16, first=1, stop=SMALL["vocab_size"])


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global torch, torch_attention, varlen
    import torch
    from torch.nn.attention import varlen

    from trainctl.trainer.model import torch_attention


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.needs("cuda"))])
def kernel(request, monkeypatch):
    made = Kernel(request.param, varlen.varlen_attn if request.param == "cuda" else by_document)
    monkeypatch.setattr(varlen, "varlen_attn", made)
    if request.param == "cpu":
        monkeypatch.setattr(torch_attention, "device_fault", lambda device, dtype: None)
    return made


@pytest.fixture
def load_model(run_file, assets):
    """In float32 on a CPU, which the kernel itself doesn't have."""

    def make(model, attention, device="cpu", **changes):
        data = {"path": str(assets / "samples.jsonl"), "kind": "samples", "packing": "best-fit"}
        table = {"model__path": str(model), "model__dtype": "bfloat16", "model__attention": attention}
        there = {"backend": "torch", "device": device, "threads": 1}
        config = run_file(data=data | {"sequence_length": TOKENS}, nodes__here=there, **table, **changes)
        if device == "cpu":
            config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float32"))
        return load(config, config.nodes["here"], "run.toml")

    return make


def assert_one_model(backend, masked, device):
    (loss, gradient), (expected, slopes) = (loss_and_gradient(one, PACKED) for one in (backend, masked))
    of_loss, of_gradient = TOLERANCES[device]
    assert loss == pytest.approx(expected, rel=of_loss)
    flat, other = (np.concatenate([part.ravel() for part in each.values()]) for each in (gradient, slopes))
    assert np.linalg.norm(flat - other) < of_gradient * np.linalg.norm(other)


@pytest.mark.parametrize("name", EACH)
def test_a_family_trains_on_packs_as_with_a_mask_or_is_refused(family, load_model, kernel, name):
    if name in REFUSED:
        with pytest.raises(InvalidInputError, match=rf'^run\.toml: model\.attention: "varlen" {REFUSED[name]}'):
            load_model(family(name), "varlen", kernel.device)
        return
    backend, masked = (load_model(family(name), attention, kernel.device) for attention in ("varlen", "auto"))
    assert (backend.compute.attention, masked.compute.attention) == ("varlen", "sdpa")
    kernel.calls = 0
    assert_one_model(backend, masked, kernel.device)
    assert kernel.calls == SMALL["num_hidden_layers"]


def test_it_stands_with_adapters_and_what_saves_memory(family, load_model, kernel):
    changes = {"adapter": LORA, "model__gradient_checkpointing": "all", "model__chunked_loss": "on"}
    backend, masked = (load_model(family("llama"), one, kernel.device, **changes) for one in ("varlen", "auto"))
    kernel.calls = 0
    assert_one_model(backend, masked, kernel.device)
    assert kernel.calls == 2 * SMALL["num_hidden_layers"], "checkpointed layers twice"


def test_heads_are_repeated_for_a_kernel_that_takes_no_groups(family, load_model, kernel, monkeypatch):
    """torch 2.11's. Its function has no argument for them."""
    heads = []

    def ungrouped(query, key, *given, **how):
        heads.append((query.shape[1], key.shape[1]))
        assert "enable_gqa" not in how
        return kernel(query, key, *given, **how)

    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    monkeypatch.setattr(varlen, "varlen_attn", ungrouped)
    backend, masked = (load_model(family("llama"), attention, kernel.device) for attention in ("varlen", "auto"))
    assert_one_model(backend, masked, kernel.device)
    assert {*heads} == {(SMALL["num_attention_heads"], SMALL["num_attention_heads"])}
    assert SMALL["num_key_value_heads"] < SMALL["num_attention_heads"], "or there is nothing to repeat"


def test_no_mask_is_made_for_packs(family, load_model, kernel, monkeypatch):
    from transformers import masking_utils

    backend = load_model(family("llama"), "varlen", kernel.device)
    masks = []
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *_, **how: masks.append(how))
    loss_and_gradient(backend, PACKED)
    assert masks == []
    loss_and_gradient(backend, BLOCKS)
    assert len(masks) == 1


def test_batches_without_packs_and_answers_are_those_of_today(family, load_model, kernel):
    backend, plain = (load_model(family("llama"), attention, kernel.device) for attention in ("varlen", "auto"))
    kernel.calls = 0
    (loss, gradient), (expected, slopes) = (loss_and_gradient(one, BLOCKS) for one in (backend, plain))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert furthest(gradient, slopes) <= 1e-6
    how = Decoding(6, 0.0, 1.0, 1)
    assert backend.generate([5, 6, 7], how, [], lambda: None) == plain.generate([5, 6, 7], how, [], lambda: None)
    assert kernel.calls == 0


def leaking(query, key, value, *_, **how):
    """Attend to all tokens before, of any document."""
    bounds = torch.tensor([0, len(query)], dtype=torch.int32)
    return by_document(query, key, value, bounds, bounds, len(query), len(query), **how)


def failing(*_, **__):
    raise RuntimeError("no kernel for these heads\nand a stack of C++ frames")


@pytest.mark.parametrize(("compute", "reason"), [(leaking, ";"), (failing, r" \(no kernel for these heads\);")])
def test_a_kernel_that_fails_or_mixes_documents_is_refused_when_it_is_tried(
    family, load_model, monkeypatch, compute, reason
):
    monkeypatch.setattr(torch_attention, "device_fault", lambda device, dtype: None)
    monkeypatch.setattr(varlen, "varlen_attn", compute)
    with pytest.raises(InvalidInputError, match=rf"can't keep packed samples apart in this model{reason}"):
        load_model(family("llama"), "varlen")


def test_a_cpu_and_mlx_are_refused_with_the_reason(family, load_model, run_file, assets):
    with pytest.raises(InvalidInputError, match="needs an NVIDIA GPU, and this rank's device is cpu"):
        load_model(family("llama"), "varlen")
    data = {"path": str(assets / "samples.jsonl"), "kind": "samples", "packing": "best-fit"}
    config = run_file(model__dtype="bfloat16", model__attention="varlen", data=data, nodes={})
    with pytest.raises(InvalidInputError, match=r'model\.attention: "varlen" needs torch on an NVIDIA GPU, and this'):
        load(config, NodeTable(backend="mlx", device="cpu"), "run.toml")


@pytest.mark.parametrize(
    ("version", "capability", "dtype", "fault"),
    [
        ("2.11.0", (8, 0), "bfloat16", None),
        ("2.14.1", (12, 0), "float16", None),
        ("2.10.1", (8, 0), "bfloat16", "needs torch 2.11 or newer, and 2.10.1 is installed"),
        ("2.13.0", (7, 5), "float16", "needs an NVIDIA GPU of the Ampere generation or newer"),
        ("2.13.0", (9, 0), "float32", "computes in 16 bits"),
    ],
)
def test_what_a_device_lacks_is_named(monkeypatch, version, capability, dtype, fault):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    found = torch_attention.device_fault(torch.device("cuda:0"), getattr(torch, dtype))
    assert (found is None) if fault is None else (found or "").startswith(fault)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"sliding_window": 40}, None),
        ({"sliding_window": 39}, "has no attention windows, and this model's sliding_window is 39"),
        ({"attention_chunk_size": 8}, "has no attention windows, and this model's attention_chunk_size is 8"),
        ({"attn_logit_softcapping": 50.0}, "has no soft cap"),
        ({"head_dim": 20}, "needs heads of a multiple of 8 up to 256, and this model's have 20"),
        ({"hidden_size": 528}, "needs heads of a multiple of 8 up to 256, and this model's have 264"),
        ({"is_encoder_decoder": True}, "does not support this model"),
        ({"_attn_implementation": "eager"}, "does not support this model"),
    ],
)
def test_what_a_model_needs_beyond_the_kernel_is_named(changes, fault):
    stated = {"hidden_size": 64, "num_attention_heads": 2, "is_encoder_decoder": False} | changes
    kind = stated.get("_attn_implementation", "varlen")
    found = torch_attention.model_fault(SimpleNamespace(_attn_implementation=kind, to_dict=lambda: stated), 40)
    assert (found is None) if fault is None else (found or "").startswith(fault)


@pytest.mark.parametrize(
    ("module", "how", "reason"),
    [
        ({}, {"softcap": 30.0}, "softcap"),
        ({}, {"s_aux": [0.0]}, "s_aux"),
        ({}, {"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, {}, "later tokens"),
    ],
)
def test_attention_that_the_kernel_would_compute_otherwise_is_refused(module, how, reason):
    bounds = torch_attention.arguments(np.array([0, 3], np.int32), torch.device("cpu"))
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(RuntimeError, match=f"attention with {reason} is"):
        torch_attention._attend(SimpleNamespace(**module), heads, heads, heads, None, **bounds, **how)
