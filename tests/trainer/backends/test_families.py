"""Each family, saved by transformers as it saves today, is one model in transformers and in both of our backends."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from tests.trainer.support.families import EACH, FACTORS, FAMILIES, SMALL, save
from tests.trainer.support.quantized_model import quantized_copy

from trainctl.protocol.config.families import TESTED
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends import document_mask
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.backends.load import load
from trainctl.trainer.checkpoints import files
from trainctl.trainer.data import batch as batches

TOKENS = 40  # more than the short context of llama3 below, fewer than that of longrope
Saved = Callable[[str], Path]
Loader = Callable[[Path, str], Backend]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A random model of a family in float32, as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("families")

    def make(name: str) -> Path:
        return folder / name if (folder / name).exists() else save(name, folder / name)

    return make


@pytest.fixture
def load_model(run_file: Callable[..., Any]) -> Loader:
    def make(model: Path, backend: str) -> Backend:
        there = {"backend": backend, "device": "cpu", "threads": 1}
        config = run_file(model__path=str(model), data__sequence_length=TOKENS, nodes__here=there)
        return load(config, config.nodes["here"], "run.toml")

    return make


@pytest.fixture
def old_layout(saved: Saved, tmp_path: Path) -> Saved:
    """The same model, described as transformers 4 did."""

    def make(name: str) -> Path:
        shutil.copytree(saved(name), tmp_path / "old")
        config = json.loads((saved(name) / "config.json").read_text(encoding="utf-8"))
        assert FAMILIES[name].old is not None
        del config["rope_parameters"]
        assert not config.keys() & {"rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"}
        (tmp_path / "old" / "config.json").write_text(json.dumps(config | FAMILIES[name].old), encoding="utf-8")
        return tmp_path / "old"

    return make


def batch() -> batches.Batch:
    tokens = np.random.default_rng(3).integers(1, SMALL["vocab_size"], (2, TOKENS + 1), dtype=np.int32)
    return batches.from_blocks(tokens)


def picked(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The log-probability of each target of `batch()`, [B, L]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    logs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return np.take_along_axis(logs, batch().targets[..., None].astype(np.int64), -1)[..., 0]


def torch_logs(model: Any) -> NDArray[np.float64]:
    import torch

    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor(batch().inputs, dtype=torch.int64)).logits
    return picked(logits.numpy())


def mlx_logs(model: Any) -> NDArray[np.float64]:
    import mlx.core as mx

    return picked(np.array(model(mx.array(batch().inputs))))


def logs_of(backend: Any) -> NDArray[np.float64]:
    return (torch_logs if backend.name == "torch" else mlx_logs)(backend._model)


def plain_torch(model: Path) -> NDArray[np.float64]:
    """None of ours: as transformers loads it."""
    import torch

    return torch_logs(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))


def plain_mlx(model: Path) -> NDArray[np.float64]:
    """None of ours: as mlx-lm loads it."""
    from mlx_lm.utils import load_model as load_plain

    return mlx_logs(load_plain(model)[0])


def furthest(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.abs(one - other).max())


def two_losses(backend: Backend) -> list[float]:
    """Before and after one step of AdamW."""
    backend.forward(batch(), 1 / batch().weight)
    backend.backward()
    backend.accumulate()
    first = backend.totals().sums
    backend.update(1e-3, 1.0)
    return [sums.losses["tokens"] for sums in (first, backend.evaluate(batch()))]


@pytest.mark.parametrize("name", EACH)
def test_both_backends_train_the_model_that_transformers_saved(saved: Saved, load_model: Loader, name: str) -> None:
    torch, mlx = (load_model(saved(name), backend) for backend in ("torch", "mlx"))
    plain, allowed = plain_torch(saved(name)), TESTED[FAMILIES[name].kind]
    assert furthest(logs_of(torch), plain) < 1e-4
    assert furthest(logs_of(mlx), plain) < 1e-4
    one, other = two_losses(torch), two_losses(mlx)
    assert one[0] == pytest.approx(-plain.sum(), rel=1e-5)
    assert other == pytest.approx(one, rel=allowed.gradient)
    assert one[1] < one[0]


def gradient_of(backend: Backend) -> dict[str, NDArray[np.float32]]:
    backend.forward(batch(), 1.0)
    backend.backward()
    backend.accumulate()
    return backend.copy_of("accumulators")


def eager_gradient(model: Path) -> dict[str, NDArray[np.float32]]:
    """None of ours: transformers' own loss, with attention written out."""
    import torch

    whole = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).train()
    given = torch.tensor(batch().inputs, dtype=torch.int64), torch.tensor(batch().targets, dtype=torch.int64)
    logits = whole(input_ids=given[0], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), given[1].flatten(), reduction="sum").backward()
    return {name: parameter.grad.numpy() for name, parameter in whole.named_parameters()}


def assert_close(one: dict[str, Any], other: dict[str, Any], limit: float) -> None:
    assert one.keys() == other.keys()
    gaps = {name: np.linalg.norm(one[name] - other[name]) / np.linalg.norm(other[name]) for name in one}
    worst = max(gaps, key=gaps.__getitem__)
    assert gaps[worst] <= limit, (worst, gaps[worst])


def test_each_tested_family_is_tried_here_and_on_the_page() -> None:
    assert {family.kind for family in FAMILIES.values()} == TESTED.keys()
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \| ([-\de.]+) \|$", page, re.MULTILINE)
    assert {kind: float(gradient) for _, kind, gradient in rows} == {
        kind: family.gradient for kind, family in TESTED.items()
    }
    assert all(TESTED[kind].title in title for title, kind, _ in rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_agree_within_the_family_s_tolerance(saved: Saved, load_model: Loader, name: str) -> None:
    family = TESTED[FAMILIES[name].kind]
    torch, mlx = (load_model(saved(name), backend) for backend in ("torch", "mlx"))
    expected = eager_gradient(saved(name))
    for backend in (torch, mlx):
        assert_close(gradient_of(backend), expected, family.gradient)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("name", EACH)
def test_a_chunked_loss_and_checkpointed_layers_give_the_same_gradient(
    saved: Saved, run_file: Callable[..., Any], name: str, backend: str
) -> None:
    """Soft-capped logits, tied embeddings, masks of a sliding window."""
    there = {"backend": backend, "device": "cpu", "threads": 1}
    changes = {"model__path": str(saved(name)), "data__sequence_length": TOKENS, "nodes__here": there}
    plain = run_file(**changes)
    saving = run_file(**changes, model__chunked_loss="on", model__gradient_checkpointing="all")
    small: Any = load(saving, saving.nodes["here"], "run.toml")
    small.chunks._chunking = small.chunks._chunking._replace(logits=SMALL["vocab_size"] * 9)
    same = gradient_of(load(plain, plain.nodes["here"], "run.toml"))
    assert_close(gradient_of(small), same, 2e-6)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("name", [each for each in EACH if FAMILIES[str(each.values[0])].old is not None])
def test_the_layout_of_transformers_4_is_the_same_model(
    saved: Saved, old_layout: Saved, load_model: Loader, name: str, backend: str
) -> None:
    assert furthest(logs_of(load_model(old_layout(name), backend)), plain_torch(saved(name))) < 1e-4


@pytest.mark.parametrize("name", EACH)
def test_a_checkpoint_is_the_same_model_in_plain_transformers_and_plain_mlx_lm(
    saved: Saved, load_model: Loader, name: str, tmp_path: Path
) -> None:
    loop = files.LoopState(
        step=1, cursor=0, updates=0, loss_scale=1.0, loss_scale_good_steps=0, seed=3, samples=9,
        layout_digest="l", data_digest="d",
    )  # fmt: skip
    before = (saved(name) / "config.json").read_bytes()
    state = load_model(saved(name), "torch").export_state()
    files.write(tmp_path / "step-1", "r", loop, state, saved(name))
    plain = plain_torch(saved(name))
    assert furthest(plain_torch(tmp_path / "step-1"), plain) < 1e-4
    if name == "phi3-longrope":  # mlx-lm has its long factors alone, whatever the length
        read = json.loads((tmp_path / "step-1" / "config.json").read_text(encoding="utf-8"))["rope_scaling"]
        assert read == {"type": "longrope", "rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}
    else:
        limit = 2e-3 if FAMILIES[name].kind in ("gemma", "starcoder2") else 1e-4  # mlx-lm's own GELU is another one
        assert furthest(plain_mlx(tmp_path / "step-1"), plain) < limit
    assert (saved(name) / "config.json").read_bytes() == before
    mlx = load_model(saved(name), "mlx")
    mlx.import_state(files.read(tmp_path / "step-1").state)
    assert mlx.export_state().constants == state.constants


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_model_whose_layouts_contradict_each_other_is_refused(
    saved: Saved, load_model: Loader, backend: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(saved("llama"), model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}), encoding="utf-8")
    with pytest.raises(InvalidInputError) as refusal:
        load_model(model, backend)
    assert str(refusal.value) == (
        f"{model / 'config.json'}: rope_parameters has rope_theta = 500000.0, but the older keys have 10000.0; "
        "keep the value that the model was trained with and remove the other"
    )


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_what_a_configuration_says_beside_rope_is_read_as_ever(
    saved: Saved, load_model: Loader, backend: str, tmp_path: Path
) -> None:
    """transformers 5 writes what JSON has no number for in a form of its own."""
    model = tmp_path / "model"
    shutil.copytree(saved("llama"), model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tagged = {"rms_norm_eps": {"__float__": "Infinity"}}
    (model / "config.json").write_text(json.dumps(config | tagged), encoding="utf-8")
    logs = logs_of(load_model(model, backend))
    assert logs == pytest.approx(-np.log(SMALL["vocab_size"])), "all norms are 0"


def test_a_sliding_window_that_mlx_lm_leaves_out_is_refused(saved: Saved, load_model: Loader, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(saved("mistral"), model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": TOKENS}), encoding="utf-8")
    assert furthest(logs_of(load_model(model, "mlx")), plain_torch(model)) < 1e-4, "it is as long as the sequences"
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": 8}), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"^run\.toml: data\.sequence_length: 40 is above .* window of 8; "):
        load_model(model, "mlx")
    assert furthest(logs_of(load_model(model, "torch")), plain_torch(model)) < 1e-4
    qwen2 = json.loads((saved("qwen2") / "config.json").read_text(encoding="utf-8")) | {"sliding_window": 8}
    assert qwen2.pop("use_sliding_window") is False
    (model / "config.json").write_text(json.dumps(qwen2), encoding="utf-8")
    shutil.copyfile(saved("qwen2") / "model.safetensors", model / "model.safetensors")
    assert furthest(logs_of(load_model(model, "mlx")), plain_torch(model)) < 1e-4, "its window is off"


@pytest.mark.parametrize("backend", ["torch", "mlx"])
@pytest.mark.parametrize("name", EACH)
def test_packed_documents_train_as_if_unpacked(saved: Saved, load_model: Loader, name: str, backend: str) -> None:
    model = load_model(saved(name), backend)
    document_mask.check(model, SMALL["vocab_size"], "run.toml")
    chance = np.random.default_rng(4)
    lengths = np.array([9, 14, 7, 5, 20, 1])
    tokens = chance.integers(1, SMALL["vocab_size"], lengths.sum() + len(lengths))
    counted = chance.integers(0, 2, len(tokens)).astype(np.uint8)
    starts = np.cumsum(lengths + 1) - lengths - 1
    packed = batches.packed(tokens, counted, starts, lengths, np.array([0, 0, 0, 1, 1, 2]))
    assert packed.inputs.shape == (3, 30) and packed.tokens == lengths.sum()
    apart = summed(model, batches.gathered(tokens, counted, starts, lengths))
    together = summed(model, packed)
    assert together[0] == pytest.approx(apart[0], rel=1e-6)
    limit = 1e-5 if name == "gemma4" else 2e-6  # its scores aren't scaled down
    assert np.linalg.norm(together[1] - apart[1]) < limit * np.linalg.norm(apart[1])
    wrong = summed(model, dataclasses.replace(packed, positions=None))
    assert abs(wrong[0] / apart[0] - 1) > 1e-4
    assert np.linalg.norm(wrong[1] - apart[1]) > 1e-3 * np.linalg.norm(apart[1])


@pytest.mark.tier("soak")
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_a_quantized_base_have_one_gradient_on_both_backends(
    run_file: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """Widths that groups of 32 divide."""
    wide = {"intermediate_size": 64} | ({"hidden_size_per_layer_input": 32} if name == "gemma4" else {})
    wide |= {"hidden_size": 64} if name == "granite" else {}
    model = quantized_copy(save(name, tmp_path / "model", **wide), "mlx-4bit", 32)
    family, found = TESTED[FAMILIES[name].kind], []
    for backend in ("torch", "mlx"):
        there = {"backend": backend, "device": "cpu", "threads": 1}
        settings = {"data__sequence_length": TOKENS, "adapter": {"kind": "lora", "rank": 4}, "nodes__here": there}
        config = run_file(model__path=str(model), **settings)
        found.append(load(config, config.nodes["here"], "run.toml"))
    torch, mlx = found
    assert furthest(*(one.token_log_probabilities(batch()) for one in found)) <= 1e-4
    expected = {part: values for part, values in gradient_of(torch).items() if values.any()}
    assert len(expected) == len(torch.shapes) // 2, "those of B, as B is 0"
    other = gradient_of(mlx)
    assert_close({part: other[part] for part in expected}, expected, family.gradient)


@pytest.mark.tier("soak")
def test_long_packs_of_ministral_3_are_refused_on_mlx(saved: Saved, run_file: Callable[..., Any]) -> None:
    """mlx-lm scales its queries by their place in the row."""
    changes = {"data__packing": "best-fit", "data__kind": "samples", "nodes__here": {"backend": "mlx", "device": "cpu"}}
    config = run_file(model__path=str(saved("ministral3")), data__sequence_length=TOKENS, **changes)
    with pytest.raises(InvalidInputError, match=r"data\.packing: .* packed samples of more than 32 tokens; set .*"):
        load(config, config.nodes["here"], "run.toml")
    config = run_file(model__path=str(saved("ministral3")), data__sequence_length=32, **changes)
    load(config, config.nodes["here"], "run.toml")


def test_a_model_that_mlx_lm_computes_otherwise_is_refused(saved: Saved, load_model: Loader, tmp_path: Path) -> None:
    shutil.copytree(saved("llama"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "glm"}), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"^run\.toml: model\.path: mlx-lm's glm model differs from .* torch$"):
        load_model(tmp_path / "model", "mlx")


def summed(model: Backend, batch: batches.Batch) -> tuple[float, NDArray[np.float32]]:
    """A batch's loss sum and gradient."""
    model.clear()
    model.forward(batch, 1.0)
    model.backward()
    model.accumulate()
    return model.totals().sums.losses["tokens"], np.concatenate(
        [part.ravel() for part in model.copy_of("accumulators").values()]
    )
