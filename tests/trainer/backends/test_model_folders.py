"""Model folders as other programs leave them, and models that are trained from scratch: the same on both libraries."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.trainer.support.chat_model import make_chat_model
from tests.trainer.support.families import EACH, FAMILIES

from trainctl.protocol.config.run_file import check_paths
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.load import random_weights
from trainctl.trainer.data.permutation import mix, uniform
from trainctl.trainer.exports.verification import mlx_logits, probe_tokens, torch_logits

Arrays = dict[str, np.ndarray]
CLOSE = 2e-4
"""Largest difference of logits that rounding in float32 explains here; the largest logits are above 1."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_chat_model(tmp_path / "model")


def rewrite(model: Path, change: Callable[[Arrays], None], **stated: Any) -> None:
    file = model / "model.safetensors"
    arrays = load_file(file)
    change(arrays)
    save_file(arrays, file, {"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | stated
    (model / "config.json").write_text(json.dumps(config))


def logits(model: Path, library: str) -> np.ndarray:
    tokens = probe_tokens(512)
    if library == "torch":
        from trainctl.trainer.model import torch_model

        return torch_logits(torch_model.read_model(model, "run.toml"), tokens)
    from trainctl.trainer.model import mlx_model

    return mlx_logits(mlx_model.read_model(model, "run.toml", 64), tokens)


def of_transformers(model: Path) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return torch_logits(loaded, probe_tokens(512))


def tied_by_statement(model: Path) -> None:
    """Leave the head, which differs from the embeddings, in the files of a model that says it has none."""
    rewrite(model, lambda arrays: None, tie_word_embeddings=True)


def head_copied(model: Path) -> None:
    def copy(arrays: Arrays) -> None:
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]

    rewrite(model, copy, tie_word_embeddings=True)


def shards_of_an_earlier_save(model: Path) -> None:
    """Two shards that the index names, between four that it doesn't."""
    arrays = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for count, factor in ((2, 1.0), (4, 0.5)):
        for number in range(count):
            part = {name: factor * array for name, array in [*arrays.items()][number::count]}
            save_file(part, model / f"model-{number + 1:05}-of-{count:05}.safetensors", {"format": "pt"})
    placed = {name: f"model-{at % 2 + 1:05}-of-00002.safetensors" for at, name in enumerate(arrays)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


@pytest.mark.parametrize("leave", [tied_by_statement, head_copied, shards_of_an_earlier_save])
@pytest.mark.parametrize("library", ["torch", "mlx"])
def test_the_model_is_that_of_transformers(model: Path, leave: Callable[[Path], None], library: str) -> None:
    leave(model)
    assert np.abs(logits(model, library) - of_transformers(model)).max() < CLOSE


@pytest.mark.parametrize("library", ["torch", "mlx"])
def test_an_adapter_that_was_merged_is_not_added_again(model: Path, library: str) -> None:
    """peft's files stay beside the merged weights. transformers would add the adapter."""
    expected = of_transformers(model)
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]}
    (model / "adapter_config.json").write_text(json.dumps(adapter))
    assert np.abs(logits(model, library) - expected).max() < CLOSE


@pytest.mark.parametrize("library", ["torch", "mlx"])
@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight_scale_inv"]
)
def test_a_weight_without_a_place_is_refused_by_name(model: Path, library: str, name: str) -> None:
    def add(arrays: Arrays) -> None:
        arrays[name] = np.ones(32, np.float32)

    rewrite(model, add)
    with pytest.raises(InvalidInputError, match=name):
        logits(model, library)


def test_buffers_that_older_versions_saved_are_no_weights(model: Path) -> None:
    expected = of_transformers(model)

    def add(arrays: Arrays) -> None:
        arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    rewrite(model, add)
    for library in ("torch", "mlx"):
        assert np.abs(logits(model, library) - expected).max() < CLOSE


@pytest.mark.parametrize("library", ["torch", "mlx"])
def test_code_in_a_model_folder_is_never_run(model: Path, tmp_path: Path, library: str) -> None:
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    rewrite(model, lambda arrays: None, auto_map={"AutoModelForCausalLM": "own.Model", "AutoConfig": "own.Config"})
    assert logits(model, library).size, "a known architecture needs none of it"
    rewrite(model, lambda arrays: None, model_file="own.py")
    with pytest.raises(InvalidInputError, match=r"config\.json names code of its own, model_file = 'own\.py'"):
        logits(model, library)
    rewrite(model, lambda arrays: None, model_file=None, model_type="own", architectures=["Own"])
    with pytest.raises(InvalidInputError, match=r"model\.path: "):
        logits(model, library)
    assert not (tmp_path / "ran").exists()


ONE_OF_EACH = {family.kind: name for name, family in FAMILIES.items()}


@pytest.fixture
def unwritten(tmp_path):
    """A model's folder without weights."""

    def make(name):
        FAMILIES[name].config().save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make


@pytest.mark.parametrize("name", [each for each in EACH if str(each.values[0]) in ONE_OF_EACH.values()])
def test_every_tested_family_starts_alike_on_both_backends_and_at_transformers_scale(unwritten, load_backend, name):
    from trainctl.trainer.model.torch_model import read_model

    model, made = unwritten(name), {}
    for backend in ("torch", "mlx"):
        loaded = load_backend(backend, model__path=str(model), model__init="random")
        made[backend] = loaded.export_state().weights
    assert made["torch"].keys() == made["mlx"].keys()
    assert all(np.array_equal(values, made["mlx"][name]) for name, values in made["torch"].items())
    theirs = dict(read_model(model, "run.toml", with_weights=False).named_parameters())
    matrices: dict[bool, list[Any]] = {True: [], False: []}
    for name, values in made["torch"].items():
        other = theirs[name].detach().numpy()
        if values.ndim == 1:
            assert np.array_equal(values, other), name
        else:
            matrices[True].append(values.ravel())
            matrices[False].append(other.ravel())
    ours, drawn = (np.concatenate(matrices[mine]) for mine in (True, False))
    assert abs(ours.std() / drawn.std() - 1) < 0.03
    assert abs(ours.mean()) < 0.03 * ours.std()


def test_the_seed_and_the_place_of_a_weight_decide_its_values():
    shapes, config = {"a.weight": (4, 6), "b.weight": (4, 6), "c.bias": (4,)}, {"model_type": "llama"}
    one, again, other = (random_weights(shapes, config, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], again[name]) for name in shapes)
    assert not np.array_equal(one["a.weight"], other["a.weight"])
    assert not np.array_equal(one["a.weight"], one["b.weight"])
    assert not one["c.bias"].any()
    assert np.array_equal(one["b.weight"], uniform((4, 6), int(mix(np.array([1], np.uint64))[0]) + 1, 0.02 * 3**0.5))


def test_large_weights_are_drawn_in_pieces_of_one_sequence():
    large = uniform(((1 << 20) + 3,), 5, 1.0)
    assert np.array_equal(large[:7], uniform((7,), 5, 1.0))
    assert len(np.unique(large[-1000:])) > 990
    assert not np.array_equal(large[1 << 20 :], large[:3])


def test_what_cannot_be_trained_from_scratch_is_refused(unwritten, run_file):
    model = unwritten("llama")
    with pytest.raises(InvalidInputError, match=r'no weights .*; model.init = "random" needs none'):
        check_paths(run_file(model__path=str(model), data__kind="text"))
    check_paths(run_file(model__path=str(model), model__init="random", data__tokenizer="bytes"))
    with pytest.raises(InvalidInputError, match=r"model.init: adapters need a trained model"):
        run_file(model__path=str(model), model__init="random", adapter={"kind": "lora"})
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=r"knows the model types cohere, .*, not 'gpt2'"):
        check_paths(run_file(model__path=str(model), model__init="random", data__tokenizer="bytes"))
