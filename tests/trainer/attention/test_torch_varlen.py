"""Packs by `varlen_attn` train as with a mask.

Without an NVIDIA GPU, what torch documents of the kernel takes its place.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.trainer.support.families import EACH, SMALL, save
from tests.trainer.support.varlen_kernel import Compute, Kernel, by_document
from torch.nn.attention import varlen

from trainctl.protocol.config.run_tables import NodeTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.attention import torch_varlen
from trainctl.trainer.attention.document_bounds import DocumentBounds
from trainctl.trainer.backends.base import Backend, Decoding
from trainctl.trainer.backends.load import load
from trainctl.trainer.data import batch as batches

TOKENS = 40
WINDOWS = "has no attention windows, and this model's sliding_window is 8"
REFUSED = {
    "gemma2": "has no soft cap for attention scores", "gemma3": WINDOWS, "gemma4": WINDOWS, "olmo3": WINDOWS,
    "stablelm": "can't keep packed samples apart in this model",  # it passes no arguments on to attention
}  # fmt: skip
TOLERANCES = {"cpu": (1e-6, 1e-5), "cuda": (5e-3, 5e-2)}
"""Of the loss and of the gradient, relative: float32 on a CPU, bfloat16 on a GPU."""
LORA = {"kind": "lora", "rank": 4}
SAVING = {"gradient_checkpointing": "all", "chunked_loss": "on"}
NONE: Mapping[str, Any] = {}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.needs("cuda"))])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel(request.param, varlen.varlen_attn if request.param == "cuda" else by_document)
    monkeypatch.setattr(varlen, "varlen_attn", made)
    if request.param == "cpu":
        monkeypatch.setattr(torch_varlen, "device_fault", lambda device, dtype: None)
    return made


@pytest.fixture
def load_model(run_file: Callable[..., Any], assets: Path) -> Callable[..., Backend]:
    """In float32 on a CPU, which the kernel itself doesn't have."""

    def make(
        model: Path, attention: str, device: str = "cpu", settings: Mapping[str, Any] = NONE, **tables: Any
    ) -> Backend:  # fmt: skip
        data = {"path": str(assets / "samples.jsonl"), "kind": "samples", "packing": "best-fit"}
        table = {"path": str(model), "dtype": "bfloat16", "attention": attention, **settings}
        there = {"backend": "torch", "device": device, "threads": 1}
        config = run_file(model=table, data=data | {"sequence_length": TOKENS}, nodes__here=there, **tables)
        if device == "cpu":
            config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float32"))
        return load(config, config.nodes["here"], "run.toml")

    return make


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("families")
    return lambda name: folder / name if (folder / name).exists() else save(name, folder / name)


def packs() -> batches.Batch:
    """Three rows with padding, one of a single token."""
    chance = np.random.default_rng(4)
    lengths = np.array([9, 14, 7, 5, 20, 1])
    tokens = chance.integers(1, SMALL["vocab_size"], lengths.sum() + len(lengths))
    counted = chance.integers(0, 2, len(tokens)).astype(np.uint8)
    starts = np.cumsum(lengths + 1) - lengths - 1
    return batches.packed(tokens, counted, starts, lengths, np.array([0, 0, 0, 1, 1, 2]))


def blocks() -> batches.Batch:
    return batches.from_blocks(np.random.default_rng(3).integers(1, SMALL["vocab_size"], (2, 17), dtype=np.int32))


def summed(backend: Backend, batch: batches.Batch) -> tuple[float, NDArray[np.float32]]:
    """The loss and the gradient."""
    backend.clear()
    backend.forward(batch, 1.0)
    backend.backward()
    backend.accumulate()
    gradient = backend.copy_of("accumulators")
    return backend.totals().sums.losses["tokens"], np.concatenate([gradient[name].ravel() for name in sorted(gradient)])


def assert_one_model(backend: Backend, masked: Backend, device: str) -> None:
    (loss, gradient), (expected, slopes) = (summed(one, packs()) for one in (backend, masked))
    of_loss, of_gradient = TOLERANCES[device]
    assert loss == pytest.approx(expected, rel=of_loss)
    assert np.linalg.norm(gradient - slopes) < of_gradient * np.linalg.norm(slopes)


@pytest.mark.parametrize("name", EACH)
def test_a_family_trains_on_packs_as_with_a_mask_or_is_refused(
    saved: Callable[[str], Path], load_model: Callable[..., Backend], kernel: Kernel, name: str
) -> None:
    if name in REFUSED:
        with pytest.raises(InvalidInputError, match=rf'^run\.toml: model\.attention: "varlen" {REFUSED[name]}'):
            load_model(saved(name), "varlen", kernel.device)
        return
    backend, masked = (load_model(saved(name), attention, kernel.device) for attention in ("varlen", "auto"))
    assert (backend.compute.attention, masked.compute.attention) == ("varlen", "sdpa")
    kernel.calls = 0
    assert_one_model(backend, masked, kernel.device)
    assert kernel.calls == SMALL["num_hidden_layers"]


@pytest.mark.parametrize(("settings", "tables"), [(NONE, {"adapter": LORA}), (SAVING, {})], ids=["lora", "saving"])
def test_it_stands_with_adapters_and_what_saves_memory(
    saved: Callable[[str], Path], load_model: Callable[..., Backend], kernel: Kernel,
    settings: dict[str, Any], tables: dict[str, Any],
) -> None:  # fmt: skip
    backend, masked = (load_model(saved("llama"), one, kernel.device, settings, **tables) for one in ("varlen", "auto"))
    kernel.calls = 0
    assert_one_model(backend, masked, kernel.device)
    assert kernel.calls == SMALL["num_hidden_layers"] * (2 if settings else 1), "checkpointed layers twice"


def test_heads_are_repeated_for_a_kernel_that_takes_no_groups(
    saved: Callable[[str], Path], load_model: Callable[..., Backend], kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11's. Its function has no argument for them."""
    heads = []

    def ungrouped(query: torch.Tensor, key: torch.Tensor, *given: Any, **how: Any) -> torch.Tensor:
        heads.append((query.shape[1], key.shape[1]))
        assert "enable_gqa" not in how
        return kernel(query, key, *given, **how)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    monkeypatch.setattr(varlen, "varlen_attn", ungrouped)
    backend, masked = (load_model(saved("llama"), attention, kernel.device) for attention in ("varlen", "auto"))
    assert_one_model(backend, masked, kernel.device)
    assert {*heads} == {(SMALL["num_attention_heads"], SMALL["num_attention_heads"])}
    assert SMALL["num_key_value_heads"] < SMALL["num_attention_heads"], "or there is nothing to repeat"


def test_no_mask_is_made_for_packs(
    saved: Callable[[str], Path], load_model: Callable[..., Backend], kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import masking_utils

    backend = load_model(saved("llama"), "varlen", kernel.device)
    masks = []
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *_, **how: masks.append(how))
    summed(backend, packs())
    assert masks == []
    summed(backend, blocks())
    assert len(masks) == 1


def test_batches_without_packs_and_answers_are_those_of_today(
    saved: Callable[[str], Path], load_model: Callable[..., Backend], kernel: Kernel
) -> None:
    backend, plain = (load_model(saved("llama"), attention, kernel.device) for attention in ("varlen", "auto"))
    kernel.calls = 0
    (loss, gradient), (expected, slopes) = (summed(one, blocks()) for one in (backend, plain))
    assert loss == pytest.approx(expected, rel=1e-6)
    assert np.linalg.norm(gradient - slopes) <= 1e-6 * np.linalg.norm(slopes)
    how = Decoding(6, 0.0, 1.0, 1)
    assert backend.generate([5, 6, 7], how, [], lambda: None) == plain.generate([5, 6, 7], how, [], lambda: None)
    assert kernel.calls == 0


# ---------------------------------------------------------------- refusals


def leaking(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **how: Any) -> torch.Tensor:
    """Attention over all tokens before, of any document."""
    bounds = torch.tensor([0, len(query)], dtype=torch.int32)
    return by_document(query, key, value, bounds, bounds, len(query), len(query), **how)


def failing(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("no kernel for these heads\nand a stack of C++ frames")


@pytest.mark.parametrize(("compute", "reason"), [(leaking, ""), (failing, " (no kernel for these heads)")])
def test_a_kernel_that_fails_or_mixes_documents_is_refused_when_it_is_tried(
    saved: Callable[[str], Path], load_model: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch,
    compute: Compute, reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch_varlen, "device_fault", lambda device, dtype: None)
    monkeypatch.setattr(varlen, "varlen_attn", compute)
    with pytest.raises(InvalidInputError) as refusal:
        load_model(saved("llama"), "varlen")
    assert str(refusal.value) == (
        f'run.toml: model.attention: "varlen" can\'t keep packed samples apart in this model{reason}; '
        'set attention = "auto"'
    )


def test_a_cpu_is_refused_with_the_reason(saved: Callable[[str], Path], load_model: Callable[..., Backend]) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        load_model(saved("llama"), "varlen")
    assert str(refusal.value) == (
        'run.toml: model.attention: "varlen" needs an NVIDIA GPU, and this rank\'s device is cpu; '
        'set attention = "auto"'
    )


def test_mlx_is_refused_with_the_reason(run_file: Callable[..., Any], assets: Path) -> None:
    data = {"path": str(assets / "samples.jsonl"), "kind": "samples", "packing": "best-fit"}
    table = {"path": str(assets / "model"), "dtype": "bfloat16", "attention": "varlen"}
    config = run_file(model=table, data=data, nodes={})
    with pytest.raises(InvalidInputError, match=r'model\.attention: "varlen" needs torch on an NVIDIA GPU, and this'):
        load(config, NodeTable(backend="mlx", device="cpu"), "run.toml")


@pytest.mark.parametrize(
    ("version", "capability", "dtype", "fault"),
    [
        ("2.13.0", (8, 0), torch.bfloat16, None),
        ("2.14.1", (12, 0), torch.float16, None),
        ("2.11.0", (8, 0), torch.bfloat16, None),
        ("2.10.1", (8, 0), torch.bfloat16, "needs torch 2.11 or newer, and 2.10.1 is installed"),
        ("2.13.0", (7, 5), torch.float16, "needs an NVIDIA GPU of the Ampere generation or newer"),
        ("2.13.0", (9, 0), torch.float32, "computes in 16 bits"),
    ],
)
def test_what_a_device_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str, capability: tuple[int, int], dtype: torch.dtype, fault: str | None
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    found = torch_varlen.device_fault(torch.device("cuda:0"), dtype)
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
        ({"head_dim": 264}, "needs heads of a multiple of 8 up to 256, and this model's have 264"),
        ({"hidden_size": 72}, "needs heads of a multiple of 8 up to 256, and this model's have 36"),
        ({"is_encoder_decoder": True}, "does not support this model"),
        ({"_attn_implementation": "eager"}, "does not support this model"),
    ],
)
def test_what_a_model_needs_beyond_the_kernel_is_named(changes: dict[str, Any], fault: str | None) -> None:
    stated = {"hidden_size": 64, "num_attention_heads": 2, "is_encoder_decoder": False} | changes
    kind = stated.get("_attn_implementation", "varlen")
    found = torch_varlen.model_fault(SimpleNamespace(_attn_implementation=kind, to_dict=lambda: stated), 40)
    assert (found is None) if fault is None else (found or "").startswith(fault)


@pytest.mark.parametrize(
    ("module", "how", "reason"),
    [
        ({}, {"softcap": 30.0}, "attention with softcap is"),
        ({}, {"s_aux": torch.zeros(2)}, "attention with s_aux is"),
        ({}, {"dropout": 0.1}, "attention with dropout is"),
        ({"is_causal": False}, {}, "attention with later tokens is"),
    ],
)
def test_attention_that_the_kernel_would_compute_otherwise_is_refused(
    module: dict[str, Any], how: dict[str, Any], reason: str
) -> None:
    bounds = torch_varlen.arguments(DocumentBounds(np.array([0, 3], np.int32), 3), torch.device("cpu"))
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(RuntimeError, match=reason):
        torch_varlen._attend(SimpleNamespace(**module), heads, heads, heads, None, **bounds, **how)
