"""The pure parts of exports: which file holds a weight, what a card says, when logits agree."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from trainctl.protocol.config.objectives import ObjectiveTable
from trainctl.protocol.config.run_tables import (
    AdapterTable,
    BatchTable,
    DataTable,
    ModelTable,
    NodeTable,
    OptimizerTable,
    RunFile,
    RunTable,
)
from trainctl.protocol.config.stored_weights import StoredTensor
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.adapters.mlx_lora import mlx_config
from trainctl.trainer.checkpoints.files import LoopState
from trainctl.trainer.exports.data_files import read_data_files
from trainctl.trainer.exports.fused import change_of, shards
from trainctl.trainer.exports.history import History, read_history
from trainctl.trainer.exports.model_card import base_name, llama_cpp_lines, model_card
from trainctl.trainer.exports.origin import ORIGIN_FILE, original_of, write_origin
from trainctl.trainer.exports.verification import Form, compare, probe_tokens

NAN = float("nan")


def test_weights_go_into_the_files_of_the_base() -> None:
    base = {name: StoredTensor(Path(f"{at}.safetensors"), "F32", (1,), 0, 4) for name, at in (("a", 2), ("b", 1))}
    assert shards(["a", "b", "new"], base) == {"2.safetensors": ["a"], "1.safetensors": ["b", "new"]}
    assert shards(["a"], {}) == {"model.safetensors": ["a"]}


def test_a_quantized_copy_knows_its_model_by_id_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))  # read once, at import
    commit, copy = "a" * 40, tmp_path / "copy"
    whole = tmp_path / "models--org--name" / "snapshots" / commit
    for folder in (whole, copy):
        folder.mkdir(parents=True)
    (whole / "config.json").write_text("{}", "utf-8")
    (whole / "model.safetensors").write_bytes(b"weights")
    assert original_of(copy) is None
    write_origin(whole, copy)
    noted = json.loads((copy / ORIGIN_FILE).read_text("utf-8"))
    assert (noted["model"], noted["revision"], len(noted["weights"])) == ("org/name", commit, 64)
    assert original_of(copy) == whole
    (whole / "config.json").unlink()
    with pytest.raises(InvalidInputError, match=rf"org/name \(commit {commit}\), which isn.t .*: download it"):
        original_of(copy)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"model": "org/name"}'])
def test_a_damaged_note_of_a_quantized_copy_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ORIGIN_FILE).write_bytes(content)
    with pytest.raises(InvalidInputError, match=rf"{ORIGIN_FILE}: cannot read it: "):
        original_of(tmp_path)


def test_an_adapter_adds_its_scaled_product() -> None:
    lora = Lora(AdapterTable(kind="rslora", rank=4, alpha=8.0), {"m.layers.0.q": (2, 3)}, 1)
    down, up = np.arange(12, dtype=np.float32).reshape(4, 3), np.ones((2, 4), np.float32)
    stored = {
        "base_model.model.m.layers.0.q.lora_A.weight": down, "base_model.model.m.layers.0.q.lora_B.weight": up,
    }  # fmt: skip
    change = change_of("m.layers.0.q.weight", lora, stored)
    assert change is not None
    assert np.array_equal(change, 4.0 * (up @ down))
    assert change_of("m.layers.0.q.bias", lora, stored) is None
    assert change_of("m.layers.1.q.weight", lora, stored) is None
    assert change_of("m.layers.0.q.weight", None, {}) is None


def test_mlx_lm_is_given_layers_within_a_decoder_layer() -> None:
    layers = {
        f"model.layers.{layer}.{name}": (2, 2) for layer in (6, 7) for name in ("mlp.up_proj", "self_attn.q_proj")
    }
    lora = Lora(AdapterTable(kind="lora", rank=4, alpha=32.0, layers=2), layers, 8)
    assert mlx_config(lora) == {
        "fine_tune_type": "lora", "num_layers": 2,
        "lora_parameters": {"rank": 4, "scale": 8.0, "dropout": 0.0, "keys": ["mlp.up_proj", "self_attn.q_proj"]},
    }  # fmt: skip
    assert mlx_config(Lora(AdapterTable(kind="lora"), layers, 8))["num_layers"] == 8


@pytest.mark.parametrize(("path", "name"), [
    ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
    ("/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2", "Qwen/Qwen3-0.6B"),
])  # fmt: skip
def test_a_base_in_the_cache_has_its_name_on_the_hub(path: str, name: str) -> None:
    assert base_name(Path(path)) == name


def test_commands_can_be_pasted() -> None:
    convert, quantise = llama_cpp_lines(Path("/my models/a b"))
    assert convert == "python convert_hf_to_gguf.py '/my models/a b' --outfile 'a b.gguf'"
    assert quantise == "llama-quantize 'a b.gguf' 'a b-Q4_K_M.gguf' Q4_K_M"


def test_logits_agree_within_a_tolerance_that_grows_with_them() -> None:
    logits = np.full((1, 2, 3), 0.5, np.float32)
    assert compare(logits, logits + np.float32(8e-6)).agrees
    assert not compare(logits, logits + np.float32(3e-5)).agrees
    assert compare(logits * 40, logits * 40 + np.float32(1e-4)).agrees
    assert not compare(logits, logits * np.float32(NAN)).agrees
    rounded = compare(logits, logits, unrounded=logits + 1)
    assert (rounded.agrees, rounded.rounding) == (True, 1.0), "rounding is reported, and no error"


def test_a_curve_begins_at_step_1() -> None:
    """The first column of a series begins at 0, a step that there isn't."""
    series = SimpleNamespace(steps=[0, 64], mean=[2.0, 1.0])
    record: Any = SimpleNamespace(steps=lambda **_: ([], 0), evaluations=lambda: [], series=lambda *_, **__: series)
    assert [point.step for point in read_history(record, 100).curve] == [1, 64]


def test_data_files_are_named_from_their_folder(tmp_path: Path) -> None:
    (tmp_path / "data" / "b").mkdir(parents=True)
    for name in ("a.txt", "b/c.txt", "d.md"):
        (tmp_path / "data" / name).write_text(name, "utf-8")
    config = RunFile(
        run=RunTable(name="a", steps=1), model=ModelTable(path="m"), data=DataTable(path=str(tmp_path / "data")),
        batch=BatchTable(global_=1, micro=1), optimizer=OptimizerTable(learning_rate=1e-3),
    )  # fmt: skip
    sums = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a.txt", "b/c.txt")}
    assert dict(read_data_files(config)) == sums
    gone = msgspec.structs.replace(config, data=DataTable(path=str(tmp_path / "none")))
    assert read_data_files(gone) == ()
    elsewhere = msgspec.structs.replace(gone, nodes={"b": NodeTable(data_path=config.data.path)})
    assert dict(read_data_files(elsewhere)) == sums


def test_the_probe_spreads_over_the_vocabulary() -> None:
    tokens = probe_tokens(1000)
    assert tokens.shape == (2, 32)
    assert 0 <= tokens.min() < 50
    assert 950 < tokens.max() < 1000
    assert len(np.unique(tokens)) > 50


def card_of(
    data_kind: str, model: dict[str, Any], objective: dict[str, Any], stored: str = "", form: Form = "peft"
) -> str:
    config = RunFile(
        run=RunTable(name="a", steps=9), model=ModelTable(path="m", **model), data=DataTable(path="d", kind=data_kind),
        batch=BatchTable(global_=8, micro=1), optimizer=OptimizerTable(learning_rate=1e-3),
        adapter=AdapterTable(kind="lora"), objective=ObjectiveTable(**objective),
    )  # fmt: skip
    loop = LoopState(
        step=9, cursor=72, updates=9, loss_scale=1, loss_scale_good_steps=0, seed=3, samples=40, layout_digest="",
        data_digest="",
    )  # fmt: skip
    history = History(0.5, Evaluation(8, 0.0, 0.25, 4.0, 1.0), ())
    return model_card("a", config, loop, history, form, stored=stored)


@pytest.mark.parametrize(("objective", "model", "facts"), [
    ({"kind": "dpo"}, {}, [
        "objective | dpo, loss sigmoid, beta 0.1, reference adapter-off", "steps | 9 of 9, 8 pairs each",
        "data | rows, 40 pairs of up to 512 tokens for the prompt with each answer",
        "loss | 0.5000 per pair", "held-out loss | 0.2500 per pair at step 8",
    ]),
    ({"kind": "dpo", "loss": "robust", "label_smoothing": 0.2, "reference": "cached"}, {"base": "nf4"}, [
        "objective | dpo, loss robust, beta 0.1, label smoothing 0.2, reference cached",
        "base format | nf4, computed in float32",
    ]),
    ({"kind": "orpo", "beta": 0.25}, {"base": "nf4", "double_quantization": True, "compute_dtype": "bfloat16"}, [
        "objective | orpo, beta 0.25", "loss | 0.5000 nats per token + per pair",
        "base format | nf4, scales quantized too, computed in bfloat16",
    ]),
])  # fmt: skip
def test_a_card_has_the_objectives_settings_and_units(
    objective: dict[str, Any], model: dict[str, Any], facts: list[str]
) -> None:
    card = card_of("rows", model, objective)
    for fact in facts:
        assert f"| {fact} |\n" in card


def test_a_card_of_text_has_no_more_than_it_needs() -> None:
    card = card_of("text", {}, {})
    for fact in ("objective | pretrain", "steps | 9 of 9, 8 samples each", "loss | 0.5000 nats per token"):
        assert f"| {fact} |\n" in card
    assert "| base format |" not in card
    assert "| base format | mlx-4bit |\n" in card_of("text", {}, {}, stored="mlx-4bit", form="mlx")


def test_a_card_says_that_adapters_for_the_whole_base_were_trained_on_a_quantized_one() -> None:
    card = card_of("text", {}, {}, stored="mlx-4bit")
    assert "| base format | mlx-4bit in training, whole here |\n" in card
    assert "trained on a copy of the base in the format mlx-4bit. " in card
    assert "trained on a copy" not in card_of("text", {}, {}, stored="mlx-4bit", form="mlx")
