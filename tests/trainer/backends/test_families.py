"""Each family, saved by transformers as it saves today, is one model in transformers and in both of our backends."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.families import EACH, FACTORS, FAMILIES, SMALL, save
from tests.trainer.support.passes import blocks, furthest, loss_and_gradient, packs
from tests.trainer.support.quantized_model import quantized_copy
from tests.trainer.support.written_checkpoints import loop_of

from trainctl.protocol.config.families import TESTED
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.load import check_documents
from trainctl.trainer.checkpoints import files

TOKENS = 40  # more than the short context of llama3 below, fewer than that of longrope
BATCH = blocks(2, TOKENS, first=1, stop=SMALL["vocab_size"])
BACKENDS = pytest.mark.parametrize("backend", ["torch", "mlx"])


@pytest.fixture
def load_model(load_backend):
    return lambda model, backend, **changes: load_backend(
        backend, **({"model__path": str(model), "data__sequence_length": TOKENS} | changes)
    )


@pytest.fixture
def altered(family, tmp_path):
    """A copy of a family's model with another config.json."""

    def make(name, *without, **changes):
        shutil.copytree(family(name), tmp_path / "altered", dirs_exist_ok=True)
        config = json.loads((family(name) / "config.json").read_text(encoding="utf-8")) | changes
        kept = {key: value for key, value in config.items() if key not in without}
        (tmp_path / "altered" / "config.json").write_text(json.dumps(kept), encoding="utf-8")
        return tmp_path / "altered"

    return make


def picked(logits):
    """Return the log-probability of each target of BATCH, [B, L]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    logs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return np.take_along_axis(logs, BATCH.targets[..., None].astype(np.int64), -1)[..., 0]


def torch_logs(model):
    import torch

    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor(BATCH.inputs, dtype=torch.int64)).logits
    return picked(logits.numpy())


def mlx_logs(model):
    import mlx.core as mx

    return picked(np.array(model(mx.array(BATCH.inputs))))


def logs_of(backend):
    return (torch_logs if backend.name == "torch" else mlx_logs)(backend._model)


def plain_torch(model):
    """None of ours: as transformers loads it."""
    import torch
    import transformers

    return torch_logs(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))


def plain_mlx(model):
    """None of ours: as mlx-lm loads it."""
    from mlx_lm.utils import load_model as load_plain

    return mlx_logs(load_plain(model)[0])


def apart(one, other):
    return float(np.abs(one - other).max())


def two_losses(backend):
    """Before and after one step of AdamW."""
    first, _ = loss_and_gradient(backend, BATCH, scale=1 / BATCH.weight)
    backend.update(1e-3, 1.0)
    return [first, backend.evaluate(BATCH).losses["tokens"]]


@pytest.mark.parametrize("name", EACH)
def test_both_backends_train_the_model_that_transformers_saved(family, load_model, name):
    torch, mlx = (load_model(family(name), backend) for backend in ("torch", "mlx"))
    plain, allowed = plain_torch(family(name)), TESTED[FAMILIES[name].kind]
    assert apart(logs_of(torch), plain) < 1e-4
    assert apart(logs_of(mlx), plain) < 1e-4
    one, other = two_losses(torch), two_losses(mlx)
    assert one[0] == pytest.approx(-plain.sum(), rel=1e-5)
    assert other == pytest.approx(one, rel=allowed.gradient)
    assert one[1] < one[0]


def eager_gradient(model):
    """None of ours: transformers' own loss, with attention written out."""
    import torch
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    whole = loader.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").train()
    inputs, targets = (torch.tensor(array, dtype=torch.int64) for array in (BATCH.inputs, BATCH.targets))
    logits = whole(input_ids=inputs, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    return {name: parameter.grad.numpy() for name, parameter in whole.named_parameters()}


def test_each_tested_family_is_tried_here_and_on_the_page():
    assert {family.kind for family in FAMILIES.values()} == TESTED.keys()
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| `(\w+)` \| ([-\de.]+) \|$", page, re.MULTILINE)
    assert {kind: float(gradient) for _, kind, gradient in rows} == {
        kind: family.gradient for kind, family in TESTED.items()
    }
    assert all(TESTED[kind].title in title for title, kind, _ in rows)


@pytest.mark.parametrize("name", EACH)
def test_gradients_agree_within_the_family_s_tolerance(family, load_model, name):
    expected = eager_gradient(family(name))
    for backend in ("torch", "mlx"):
        _, gradient = loss_and_gradient(load_model(family(name), backend), BATCH)
        assert furthest(gradient, expected) <= TESTED[FAMILIES[name].kind].gradient


@BACKENDS
@pytest.mark.parametrize("name", EACH)
def test_a_chunked_loss_and_checkpointed_layers_give_the_same_gradient(family, load_model, name, backend):
    """Soft-capped logits, tied embeddings, masks of a sliding window."""
    saving = {"model__chunked_loss": "on", "model__gradient_checkpointing": "all"}
    plain, small = load_model(family(name), backend), load_model(family(name), backend, **saving)
    chunks: Any = small.passes.chunks
    chunks.chunking = chunks.chunking._replace(logits=SMALL["vocab_size"] * 9)
    assert furthest(loss_and_gradient(small, BATCH)[1], loss_and_gradient(plain, BATCH)[1]) <= 2e-6


@BACKENDS
@pytest.mark.parametrize("name", [each for each in EACH if FAMILIES[str(each.values[0])].old is not None])
def test_the_layout_of_transformers_4_is_the_same_model(family, altered, load_model, name, backend):
    old = altered(name, "rope_parameters", **(FAMILIES[name].old or {}))
    assert apart(logs_of(load_model(old, backend)), plain_torch(family(name))) < 1e-4


@pytest.mark.parametrize("name", EACH)
def test_a_checkpoint_is_the_same_model_in_plain_transformers_and_plain_mlx_lm(family, load_model, name, tmp_path):
    before = (family(name) / "config.json").read_bytes()
    state = load_model(family(name), "torch").export_state()
    files.write(tmp_path / "step-1", "r", loop_of(1), state, family(name))
    plain = plain_torch(family(name))
    assert apart(plain_torch(tmp_path / "step-1"), plain) < 1e-4
    if name == "phi3-longrope":  # mlx-lm has its long factors alone, whatever the length
        read = json.loads((tmp_path / "step-1" / "config.json").read_text(encoding="utf-8"))["rope_scaling"]
        assert read == {"type": "longrope", "rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}
    else:
        limit = 2e-3 if FAMILIES[name].kind in ("gemma", "starcoder2") else 1e-4  # mlx-lm's own GELU is another one
        assert apart(plain_mlx(tmp_path / "step-1"), plain) < limit
    assert (family(name) / "config.json").read_bytes() == before
    mlx = load_model(family(name), "mlx")
    mlx.import_state(files.read(tmp_path / "step-1").state)
    assert mlx.export_state().constants == state.constants


@BACKENDS
def test_what_a_configuration_says_beside_rope_is_read_as_ever(altered, load_model, backend):
    """transformers 5 writes what JSON has no number for in a form of its own."""
    logs = logs_of(load_model(altered("llama", rms_norm_eps={"__float__": "Infinity"}), backend))
    assert logs == pytest.approx(-np.log(SMALL["vocab_size"])), "all norms are 0"


def test_a_sliding_window_that_mlx_lm_leaves_out_is_refused(family, altered, load_model):
    model = altered("mistral", sliding_window=TOKENS)
    assert apart(logs_of(load_model(model, "mlx")), plain_torch(model)) < 1e-4, "it is as long as the sequences"
    altered("mistral", sliding_window=8)
    with pytest.raises(InvalidInputError, match=r"^run\.toml: data\.sequence_length: 40 is above .* window of 8; "):
        load_model(model, "mlx")
    assert apart(logs_of(load_model(model, "torch")), plain_torch(model)) < 1e-4
    assert json.loads((family("qwen2") / "config.json").read_text(encoding="utf-8"))["use_sliding_window"] is False
    altered("qwen2", "use_sliding_window", sliding_window=8)
    assert apart(logs_of(load_model(model, "mlx")), plain_torch(model)) < 1e-4, "its window is off"


@BACKENDS
@pytest.mark.parametrize("name", EACH)
def test_packed_documents_train_as_if_unpacked(family, load_model, name, backend):
    model = load_model(family(name), backend)
    check_documents(model, SMALL["vocab_size"], "run.toml")
    packed, unpacked = packs(SMALL["vocab_size"])
    assert packed.inputs.shape == (3, 30) and packed.tokens == unpacked.tokens
    loss, whole = flat(model, unpacked)
    together, same = flat(model, packed)
    assert together == pytest.approx(loss, rel=1e-6)
    limit = 1e-5 if name == "gemma4" else 2e-6  # its scores aren't scaled down
    assert np.linalg.norm(same - whole) < limit * np.linalg.norm(whole)
    wrong, other = flat(model, dataclasses.replace(packed, positions=None))
    assert abs(wrong / loss - 1) > 1e-4
    assert np.linalg.norm(other - whole) > 1e-3 * np.linalg.norm(whole)


def flat(model, batch):
    loss, gradient = loss_and_gradient(model, batch)
    return loss, np.concatenate([part.ravel() for part in gradient.values()])


@pytest.mark.tier("soak")
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_of_a_quantized_base_have_one_gradient_on_both_backends(load_model, tmp_path, name):
    """Widths that groups of 32 divide."""
    wide = {"intermediate_size": 64} | ({"hidden_size_per_layer_input": 32} if name == "gemma4" else {})
    wide |= {"hidden_size": 64} if name == "granite" else {}
    model = quantized_copy(save(name, tmp_path / "model", **wide), "mlx-4bit", 32)
    torch, mlx = (load_model(model, backend, adapter={"kind": "lora", "rank": 4}) for backend in ("torch", "mlx"))
    assert apart(*(one.token_log_probabilities(BATCH) for one in (torch, mlx))) <= 1e-4
    expected = {part: values for part, values in loss_and_gradient(torch, BATCH)[1].items() if values.any()}
    assert len(expected) == len(torch.shapes) // 2, "those of B, as B is 0"
    other = loss_and_gradient(mlx, BATCH)[1]
    assert furthest({part: other[part] for part in expected}, expected) <= TESTED[FAMILIES[name].kind].gradient


@pytest.mark.tier("soak")
def test_long_packs_of_ministral_3_are_refused_on_mlx(family, load_model):
    """mlx-lm scales its queries by their place in the row."""
    changes = {"data__packing": "best-fit", "data__kind": "samples"}
    with pytest.raises(InvalidInputError, match=r"data\.packing: .* packed samples of more than 32 tokens; set .*"):
        load_model(family("ministral3"), "mlx", **changes)
    load_model(family("ministral3"), "mlx", **changes, data__sequence_length=32)


def test_a_model_that_mlx_lm_computes_otherwise_is_refused(altered, load_model):
    with pytest.raises(InvalidInputError, match=r"^run\.toml: model\.path: mlx-lm's glm model differs from .* torch$"):
        load_model(altered("llama", model_type="glm"), "mlx")
