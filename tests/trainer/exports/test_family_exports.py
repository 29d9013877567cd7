"""Exports of each family, also of encoder-decoder models, open in peft, transformers and mlx-lm."""

import io
import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.support.chat_model import write_rows
from tests.trainer.support.families import FAMILIES, MIXTURES, learnable_samples
from tests.trainer.support.opened_exports import by_mlx, by_torch, difference
from tests.trainer.support.seq2seq_model import make_seq2seq_model
from tests.trainer.support.trained_run import TrainedRun

from trainctl.protocol.config.model_facts import stored_tensors
from trainctl.protocol.errors import RefusedError
from trainctl.trainer.exports import export_model, trained_model, verification
from trainctl.trainer.exports.trained_model import open_trained
from trainctl.trainer.exports.trained_model import places as own_places
from trainctl.trainer.model import rope_config

LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
ADAPTERS: dict[str, dict[str, Any]] = {"lora": LORA, "full": {}}
QUICK = ("mistral", "mixtral")
CASES = [
    pytest.param(
        name, library, adapter, marks=[] if name in QUICK and library == "torch" else [pytest.mark.tier("soak")]
    )
    for name in (*FAMILIES, *MIXTURES)
    for library in ("torch", *(["mlx"] if name in FAMILIES else []))
    for adapter in ADAPTERS
]
ALLOWED = 1e-4
"""Largest difference in nats, as docs/training.md promises it for two libraries."""
NOT_IN_MLX = {
    "phi3-longrope": "logits differ by", "deepseek_v2": "mlx-lm can't open", "gpt_oss": "mlx-lm can't open",
    "hunyuan_v1_moe": "mlx-lm can't open", "jamba": "mlx-lm can't open",
    "deepseek_v3 lora mlx": "mlx-lm can't open",  # which folds a matrix of attention into others
}  # fmt: skip
"""Words about families that mlx-lm computes otherwise or can't open, some only in one form."""
UNLIKE_IN_MLX = ("gemma", "starcoder2")
"""Families of which mlx-lm computes other logits, as is reported."""


@pytest.fixture
def trained(family, tmp_path):
    def train(
        name: str, library: str, kind: str, *, adapter: dict[str, Any] | None = None, **changes: Any
    ) -> TrainedRun:
        rows = write_rows(tmp_path / "samples.jsonl", learnable_samples())
        data = {"path": str(rows), "kind": "samples", "sequence_length": 20, "tokenizer": "bytes"}
        return TrainedRun(tmp_path / "run-1", family(name, **changes), library, adapter or ADAPTERS[kind], data=data)

    return train


def export(run: TrainedRun, form: str, folder: Path, *options: str) -> dict[str, Any]:
    """Return what was said of an export into a new `folder`, with the exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    with redirect_stdout(io.StringIO()) as out:
        words = [f"--run-directory={run.paths.directory}", f"--to={form}", f"--output={folder}", *options]
        status = export_model.main(words)
    return {**json.loads(out.getvalue()), "status": status}


@pytest.mark.parametrize(("name", "library", "adapter"), CASES)
def test_peft_transformers_and_mlx_lm_open_the_trained_model(family, trained, name, library, adapter, tmp_path):
    run, base, out, widest = trained(name, library, adapter), family(name), tmp_path / "out", 0.0
    for form, *options in (("peft",), ("fused",), ("fused", "--dtype=bfloat16"), ("mlx",), ("mlx-4bit",)):
        if form == "peft" and adapter == "full":
            continue
        made = export(run, form, out, *options)
        says = NOT_IN_MLX.get(name) or NOT_IN_MLX.get(f"{name} {adapter} {form}")
        if form.startswith("mlx") and says:
            assert made["status"] == 3 and says in made["problem"] and not out.exists(), made
            continue
        assert made["status"] == 0 and made["difference"] <= made["tolerance"], made
        if form.startswith("mlx"):
            assert (made["library"] is not None) == (name in UNLIKE_IN_MLX), made
        if options or form == "mlx-4bit":
            continue
        if form == "fused":
            assert stored_tensors(out).keys() == stored_tensors(base).keys()
        adapted = form == "mlx" and adapter == "lora"
        if form != "mlx":
            widest = max(widest, difference(by_torch(out, run), run))
        if form != "peft" and not says and name not in UNLIKE_IN_MLX:
            own = out / "base" if (out / "base").exists() else base
            widest = max(widest, difference(by_mlx(out, run, own if adapted else None), run))
    print(name, library, adapter, f"{widest:.1e}")
    assert widest <= ALLOWED


def test_a_checkpoint_of_experts_keeps_transformers_names_and_its_export_the_family_s(family, trained, tmp_path):
    """Those that `save_pretrained` gave the base, in its types."""
    import torch
    from safetensors.torch import load_file, save_file

    base = tmp_path / "base"
    shutil.copytree(family("mixtral"), base)
    stored = load_file(base / "model.safetensors")
    kept = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in stored.items()}
    save_file(kept, base / "model.safetensors", {"format": "pt"})
    rows = write_rows(tmp_path / "samples.jsonl", learnable_samples())
    data = {"path": str(rows), "kind": "samples", "sequence_length": 20, "tokenizer": "bytes"}
    run = TrainedRun(tmp_path / "run-1", base, "torch", {}, data=data)
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored_tensors(run.paths.checkpoint(4))
    made = export(run, "fused", tmp_path / "out")
    assert made["dtype"] == "bfloat16" and made["difference"] <= made["tolerance"] < made["rounding"], made
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in written.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in kept.items()
    }
    w1 = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    whole = load_file(run.paths.checkpoint(4) / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(written[w1], whole[2, : len(written[w1])].bfloat16())


def test_without_torch_stacked_experts_are_not_exported(trained, monkeypatch, tmp_path):
    run = trained("mixtral", "torch", "full")
    monkeypatch.setattr(trained_model, "has_torch", lambda: False)
    made = export(run, "fused", tmp_path / "out")
    assert made["status"] == 2 and "holds all experts of a layer" in made["problem"], made
    assert not (tmp_path / "out").exists()


def test_a_fault_that_our_mlx_backend_shares_with_the_export_fails_verification(trained, monkeypatch, tmp_path):
    """Both take the places of matrices from one function, so only the backend that trained can tell."""
    run = trained("mistral", "torch", "lora")

    def swapped(lora):
        found = own_places(lora)
        return {name: found[name.replace("gate_proj", "x").replace("up_proj", "gate_proj").replace("x", "up_proj")]
                for name in found}  # fmt: skip

    for module in ("adapters.mlx_lora", "exports.trained_model"):
        monkeypatch.setattr(f"trainctl.trainer.{module}.places", swapped)
    made = export(run, "mlx", tmp_path / "out")
    assert made["status"] == 3 and made["problem"].startswith("verification failed: logits differ by"), made
    assert not (tmp_path / "out").exists()


def test_what_an_export_is_for_may_be_missing(trained, monkeypatch, tmp_path):
    from importlib import util

    run, find = trained("mistral", "torch", "lora"), util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "mlx_lm" else find(name))
    made = export(run, "mlx", tmp_path / "out")
    assert made["status"] == 0 and made["difference"] is None, made
    assert made["not_verified"].startswith("mlx-lm isn't installed here; "), made
    assert export(run, "peft", tmp_path / "out")["not_verified"] is None
    unwanted = export(run, "peft", tmp_path / "out", "--no-verify")
    assert (unwanted["not_verified"], unwanted["difference"]) == ("--no-verify was given", None)


def test_an_export_that_its_library_cannot_open_is_refused(trained, tmp_path):
    run = trained("mistral", "torch", "full")
    opened = open_trained(run.paths, None, best=False, evaluations=())
    export(run, "fused", tmp_path / "out")
    config = rope_config.read(tmp_path / "out") | {"model_type": "unheard_of"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(RefusedError, match="transformers can't open this model: "):
        verification.verify_export(opened, "fused", tmp_path / "out")


@pytest.mark.tier("all")
def test_experts_in_4_bits_stand_for_the_trained_ones(trained, tmp_path):
    run = trained("mixtral", "torch", "full", hidden_size=64, intermediate_size=64)
    made = export(run, "mlx-4bit", tmp_path / "out")
    assert made["status"] == 0 and made["difference"] <= made["tolerance"], made
    experts = [tensor for name, tensor in stored_tensors(tmp_path / "out").items() if "switch_mlp" in name]
    assert experts and {tensor.dtype for tensor in experts if len(tensor.shape) == 3} == {"U32", "F32"}
    assert ALLOWED < difference(by_mlx(tmp_path / "out", run), run) < 3.0, "of quantization"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_adapters_of_layers_beside_experts_are_open_to_peft(family, trained, tmp_path, dropout):
    """peft takes `gate_proj` and the like for the experts' own, which transformers has stacked."""
    from peft import AutoPeftModelForCausalLM

    run = trained("dots1", "torch", "lora", adapter={**LORA, "dropout": dropout})
    made = export(run, "peft", tmp_path / "out")
    assert made["status"] == 0 and made["difference"] <= made["tolerance"], made
    opened: Any = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    adapted = {name for name, _ in opened.named_parameters() if ".lora_A." in name}
    assert not [name for name in adapted if ".experts." in name or ".gate." in name]
    assert {name.split(".lora_A.")[0].rpartition(".")[2] for name in adapted} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "adapter", "forms"), [("t5", LORA, ("peft", "fused")), ("bart", {}, ("fused",))], ids=["t5", "bart"]
)
def test_each_form_is_the_trained_model(tmp_path, capsys, name, adapter, forms):
    model = make_seq2seq_model(tmp_path / "model", name)
    run = TrainedRun(tmp_path / "run-1", model, "torch", adapter, objective="seq2seq")
    capsys.readouterr()

    def export(form):
        words = [f"--run-directory={run.paths.directory}", f"--to={form}", f"--output={tmp_path / form}"]
        status = export_model.main(words)
        return {**json.loads(capsys.readouterr().out), "status": status}

    for form in forms:
        made = export(form)
        assert (made["status"], made["difference"] <= 1e-5) == (0, True), made
        assert "ForSeq2SeqLM" in made["load"][0]
        assert "pipeline_tag: text2text-generation" in (tmp_path / form / "README.md").read_text("utf-8")
    if "peft" in forms:
        assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    refused = export("mlx")
    assert refused["problem"].startswith("mlx-lm has no encoder-decoder models, so there is no mlx: use --to fused")
    assert not (tmp_path / "mlx").exists()
