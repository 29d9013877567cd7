"""Every form of an export opens in its own library as the model that was trained; what cannot be made is one line."""

import contextlib
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.support.chat_model import make_chat_model
from tests.trainer.support.opened_exports import by_mlx, by_torch, difference
from tests.trainer.support.trained_run import TrainedRun

from trainctl.protocol.config.model_facts import stored_tensors
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.exports import export_model, trained_model
from trainctl.trainer.exports.quantize_model import ORIGIN_FILE, quantize
from trainctl.trainer.exports.trained_model import open_trained
from trainctl.trainer.exports.verification import verify_export

LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
RSLORA = {"kind": "rslora", "rank": 4, "alpha": 8.0, "layers": 1, "targets": ["q_proj", "mlp.down_proj"]}
RUNS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "torch-lora": ("torch", LORA), "mlx-lora": ("mlx", LORA), "torch-rslora": ("torch", RSLORA),
    "mlx-rslora": ("mlx", RSLORA), "torch-full": ("torch", {}), "mlx-full": ("mlx", {}),
}  # fmt: skip
EXACT, ROUNDED = 1e-5, 1e-2
ALL = pytest.mark.tier("all")
Export = Callable[..., dict[str, Any]]


def in_tier(name):
    """Return a run's name as an argument: `make test` has adapters and all weights once each."""
    return pytest.param(name, marks=[] if name in ("mlx-rslora", "torch-full") else [ALL])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_chat_model(tmp_path_factory.mktemp("base") / "model", hidden=64, intermediate=128)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("{{ messages }}", "utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A run by its name in RUNS, trained once."""
    made: dict[str, TrainedRun] = {}

    def train(name):
        if name not in made:
            made[name] = TrainedRun(tmp_path_factory.mktemp(name) / "run-1", model, *RUNS[name])
        return made[name]

    return train


@pytest.fixture
def export(tmp_path, capsys):
    """Export into `tmp_path`/out, where nothing is left of an export before; what was said, with the exit status."""

    def run(paths, form, *options):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        words = [f"--run-directory={paths.directory}", f"--to={form}", f"--output={tmp_path / 'out'}", *options]
        status = export_model.main(words)
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        return {**json.loads(out), "status": status}

    return run


@pytest.fixture
def verified(export):
    def run(paths, form, *options):
        made = export(paths, form, *options)
        assert made["status"] == 0 and made["difference"] <= made["tolerance"] <= 100 * EXACT, made
        return made

    return run


@pytest.fixture
def refusal(export, tmp_path):
    """Return the error of an export that can't be made, and check that it leaves nothing."""

    def run(paths, form, *options):
        made = export(paths, form, *options)
        assert made["status"] == 2 and not (tmp_path / "out").exists(), made
        return f"{made['where']}: {made['problem']}"

    return run


@pytest.mark.parametrize("name", [in_tier(name) for name in RUNS])
def test_peft_mlx_lm_and_transformers_open_what_is_made_for_them(trained, verified, name, tmp_path, model):
    run, out, adapted = trained(name), tmp_path / "out", not name.endswith("full")
    assert difference(by_torch(model, run), run) > 10 * ROUNDED, "it has to have learned for this to mean anything"
    if adapted:
        assert verified(run.paths, "peft")["dtype"] is None
        assert difference(by_torch(out, run), run) <= EXACT
        names = {path.name for path in out.iterdir()}
        assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"} <= names
        assert (out / "additional_chat_templates" / "short.jinja").read_text("utf-8") == "{{ messages }}"
    assert verified(run.paths, "mlx")["warning"] is None
    assert difference(by_mlx(out, run, model if adapted else None), run) <= EXACT
    assert not (out / "base").exists()
    assert verified(run.paths, "fused")["dtype"] == "float32"
    assert max(difference(by_torch(out, run), run), difference(by_mlx(out, run), run)) <= EXACT
    made = verified(run.paths, "fused", "--dtype=bfloat16")
    assert made["dtype"] == "bfloat16" and EXACT < made["rounding"] <= ROUNDED


@pytest.mark.parametrize("name", [in_tier("mlx-rslora"), in_tier("torch-full")])
def test_mlx_in_4_bits_has_the_logits_of_its_own_dequantised_weights(trained, verified, name, tmp_path):
    run = trained(name)
    verified(run.paths, "mlx-4bit")
    kept = {tensor.dtype for name, tensor in stored_tensors(tmp_path / "out").items() if name.endswith("proj.weight")}
    assert kept == {"U32"}
    assert difference(by_mlx(tmp_path / "out", run), run) < 1.0
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


@pytest.mark.parametrize(("form", "file", "right", "wrong"), [
    ("peft", "adapter_config.json", '"lora_alpha": 16.0', '"lora_alpha": 16.1'),
    ("mlx", "adapter_config.json", '"scale": 4.0', '"scale": 4.02'),
    ("fused", "config.json", '"rope_theta": 10000.0', '"rope_theta": 11000.0'),
])  # fmt: skip
def test_verification_fails_for_what_is_slightly_wrong(trained, export, form, file, right, wrong, tmp_path):
    run = trained("torch-lora")
    export(run.paths, form)
    path = tmp_path / "out" / file
    stated = path.read_text("utf-8")
    assert right in stated
    path.write_text(stated.replace(right, wrong), "utf-8")
    found = verify_export(open_trained(run.paths, None, best=False, evaluations=()), form, tmp_path / "out")
    assert not found.agrees and found.difference > 10 * EXACT


def test_a_16_bit_export_of_slightly_other_weights_fails_verification(trained, export, tmp_path):
    """Its logits are within what rounding changes."""
    import torch
    from safetensors.torch import load_file, save_file

    run, weights = trained("torch-full"), tmp_path / "out" / "model.safetensors"
    rounding = export(run.paths, "fused", "--dtype=bfloat16")["rounding"]
    stored = load_file(weights)
    stored["model.layers.0.mlp.up_proj.weight"][0] *= torch.tensor(1 + 2**-7, dtype=torch.bfloat16)
    save_file(stored, weights, {"format": "pt"})
    found = verify_export(open_trained(run.paths, None, best=False, evaluations=()), "fused", tmp_path / "out")
    assert not found.agrees and found.difference < 2 * rounding


def rewritten(model, folder, config):
    """A copy of the model with another config.json."""
    shutil.copytree(model, folder)
    stated = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config(stated)), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("library", "adapter"), [("torch", LORA), *(pytest.param("mlx", one, marks=ALL) for one in (LORA, {}))]
)
def test_fused_files_and_types_are_those_of_the_base(model, verified, tmp_path, monkeypatch, library, adapter):
    base = rewritten(model, tmp_path / "base", lambda config: config | {"dtype": "bfloat16"})
    in_two_files(base)
    run = TrainedRun(tmp_path / "runs" / "run-1", base, library, adapter)
    monkeypatch.setattr(trained_model, "has_torch", lambda: library == "torch")
    assert verified(run.paths, "fused")["dtype"] == "bfloat16"
    written, expected = (
        {name: (tensor.file.name, tensor.dtype, tensor.shape) for name, tensor in stored_tensors(folder).items()}
        for folder in (tmp_path / "out", base)
    )
    assert written == expected
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert (config["dtype"], config["rope_theta"]) == ("bfloat16", config["rope_parameters"]["rope_theta"])
    assert difference(by_torch(tmp_path / "out", run), run) <= ROUNDED


def in_two_files(base):
    import torch
    from safetensors.torch import load_file, save_file

    whole = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    stored = {name: tensor if "norm" in name else tensor.to(torch.bfloat16) for name, tensor in whole.items()}
    placed = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in stored}
    for file in sorted(set(placed.values())):
        save_file({name: stored[name] for name in stored if placed[name] == file}, base / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())}, "weight_map": placed}
    (base / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS = {"default": {"rope_type": "default"}, "llama3": {"rope_type": "llama3", **LLAMA3}}


@pytest.mark.parametrize(("scaling", "linked"), [("default", False), ("llama3", True)])
def test_beside_a_base_that_mlx_lm_misreads_is_one_that_it_reads(
    model, verified, tmp_path, monkeypatch, scaling, linked
):
    """transformers 5 writes `rope_parameters` alone; mlx-lm then takes its own theta."""

    def of_transformers_5(config):
        kept = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
        return kept | {"rope_parameters": {"rope_theta": 500_000.0, **SCALINGS[scaling]}}

    base = rewritten(model, tmp_path / "base", of_transformers_5)
    run = TrainedRun(tmp_path / "runs" / "run-1", base, "torch", LORA)
    if not linked:
        monkeypatch.setattr(Path, "symlink_to", unlinked)
    made = verified(run.paths, "mlx")
    own = tmp_path / "out" / "base"
    assert (own / "model.safetensors").is_symlink() == linked
    assert f"--model {own} --adapter-path" in made["load"][0]
    assert str(own) in made["warning"]
    assert "--model base --adapter-path ." in (tmp_path / "out" / "README.md").read_text("utf-8")
    assert difference(by_mlx(tmp_path / "out", run, own), run) <= EXACT
    assert difference(by_mlx(tmp_path / "out", run, base), run) > 10 * EXACT, "else it needn't be there"


def unlinked(*_):
    raise OSError(1, "Operation not permitted")


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory):
    """Checkpoints of steps 1, 2 and 4, evaluated at 1, 2 and 3. Step 2 is the best."""
    folder = tmp_path_factory.mktemp("kept") / "run-1"
    return TrainedRun(folder, model, "torch", LORA, saved=(1, 2, 4), held_out={1: 2.5, 2: 0.25, 3: 0.5})


@pytest.mark.parametrize(("options", "step"), [((), 4), (("--step=1",), 1), (("--best",), 2)])
def test_a_checkpoint_is_chosen_and_the_card_says_what_it_is(kept, export, options, step, tmp_path):
    assert export(kept.paths, "peft", *options)["step"] == step
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    loss = {1: "2.5000", 2: "0.2500", 4: "0.5000"}[step]
    data = hashlib.sha256(kept.paths.directory.with_name("rows.jsonl").read_bytes()).hexdigest()
    for fact in (f"run-1, step {step}", f"{loss} nats per token", "LoRA, rank 4, alpha 16", "objective | sft", data):
        assert fact in card
    curve = card[card.index("| from step |") : card.index("| data file |")]
    assert [line.split()[1] for line in curve.splitlines()[2:-1]] == [str(point) for point in range(1, step + 1)]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A run on a base of 4 bits with tied embeddings, of weights in bfloat16, in files that part a layer's tensors."""
    import mlx.core as mx

    folder = tmp_path_factory.mktemp("quantized")
    whole = make_chat_model(folder / "whole", hidden=64, intermediate=128)
    config = json.loads((whole / "config.json").read_text("utf-8")) | {"tie_word_embeddings": True}
    (whole / "config.json").write_text(json.dumps(config), "utf-8")
    weights: Any = mx.load(str(whole / "model.safetensors"))
    kept = {name: array.astype(mx.bfloat16) for name, array in weights.items() if name != "lm_head.weight"}
    mx.save_safetensors(str(whole / "model.safetensors"), kept, {"format": "mlx"})
    quantize(str(whole), "mlx-4bit", None, folder / "model")
    packed: Any = mx.load(str(folder / "model" / "model.safetensors"))
    (folder / "model" / "model.safetensors").unlink()
    placed: dict[str, str] = {}
    for number, part in enumerate(("weight", "scales", "biases"), 1):
        mine = {name: array for name, array in packed.items() if name.endswith(f".{part}")}
        file = f"model-0000{number}-of-00003.safetensors"
        mx.save_safetensors(str(folder / "model" / file), mine, {"format": "mlx"})
        placed |= dict.fromkeys(mine, file)
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}), "utf-8")
    return TrainedRun(folder / "run-1", folder / "model", "torch", LORA)


@pytest.mark.parametrize("library", ["torch", pytest.param("mlx", marks=ALL)])
def test_adapters_of_a_quantized_base_are_fused_into_its_unpacked_weights(
    quantized, verified, tmp_path, library, monkeypatch
):
    monkeypatch.setattr(trained_model, "has_torch", lambda: library == "torch")
    assert verified(quantized.paths, "fused", "--dtype=float32")["dtype"] == "float32"
    assert difference(by_torch(tmp_path / "out", quantized), quantized) <= EXACT
    assert "quantization" not in json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert {tensor.dtype for tensor in stored_tensors(tmp_path / "out").values()} == {"F32"}
    made = verified(quantized.paths, "fused")
    assert made["dtype"] == "bfloat16" and made["tolerance"] < made["rounding"]


def test_peft_opens_adapters_of_a_quantized_base_on_the_model_it_was_made_from(quantized, verified, tmp_path):
    whole = quantized.paths.directory.parent / "whole"
    assert verified(quantized.paths, "peft")["warning"].startswith("the adapters were trained on mlx-4bit values")
    stated = json.loads((tmp_path / "out" / "adapter_config.json").read_text("utf-8"))
    assert stated["base_model_name_or_path"] == str(whole)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "| base | whole |" in card and "trained on a copy of the base in the format mlx-4bit. " in card
    assert EXACT < difference(by_torch(tmp_path / "out", quantized), quantized) < 1.0, "of quantization"


def test_adapters_of_a_quantized_base_need_the_model_it_was_made_from_but_for_mlx_lm(
    quantized, verified, refusal, tmp_path
):
    folder = quantized.paths.directory.parent
    weights, noted = folder / "whole" / "model.safetensors", folder / "model" / ORIGIN_FILE
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "aren't those that the base was made from" in refusal(quantized.paths, "peft")
    weights.write_bytes(content)
    for away, says in (
        (weights.with_name("config.json"), f"{weights.parent}, which isn't on this machine"),
        (noted, f"no {ORIGIN_FILE}"),
    ):
        away.rename(tmp_path / "away")
        assert says in refusal(quantized.paths, "peft")
        (tmp_path / "away").rename(away)
    assert refusal(quantized.paths, "mlx-4bit").startswith("--to: ")
    verified(quantized.paths, "mlx")
    assert difference(by_mlx(tmp_path / "out", quantized, folder / "model"), quantized) <= EXACT


def test_what_does_not_fit_is_one_line(trained, kept, refusal, tmp_path_factory):
    assert "use --to fused" in refusal(trained("torch-full").paths, "peft")
    says = refusal(kept.paths, "peft", "--step=3")
    assert says.startswith("--step: no complete checkpoint of step 3; there is one of 4, 2, 1")
    assert refusal(kept.paths, "peft", "--dtype=bfloat16").startswith("--dtype: peft holds adapters alone, in float32")
    paths = RunPaths(tmp_path_factory.mktemp("own") / "run-1")
    shutil.copytree(kept.paths.directory, paths.directory)
    with contextlib.closing(sqlite3.connect(paths.record)) as record, record:
        record.execute("DELETE FROM evaluations")
    says = refusal(paths, "peft", "--best")
    assert says.startswith("--best: ") and "none was evaluated (4, 2, 1)" in says
    path = paths.checkpoint(4) / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes(255 - byte for byte in content[-9:]))
    assert refusal(paths, "peft").startswith(f"{path}: ")
    for step in (1, 2):
        shutil.rmtree(paths.checkpoint(step))
    (paths.checkpoint(4) / "state.json").unlink()
    assert "no complete checkpoint" in refusal(paths, "peft")


def test_a_folder_that_is_there_is_left_alone(kept, tmp_path, capsys):
    assert export_model.main([f"--run-directory={kept.paths.directory}", "--to=peft", f"--output={tmp_path}"]) == 2
    assert json.loads(capsys.readouterr().out)["where"] == str(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_base_that_is_gone_or_another_is_refused(model, export, refusal, tmp_path):
    base = rewritten(model, tmp_path / "base", lambda config: config)
    adapted, whole = (
        TrainedRun(tmp_path / name / "run-1", base, "torch", adapter, steps=1, saved=(1,))
        for name, adapter in (("adapted", LORA), ("whole", {}))
    )
    with (base / "config.json").open("a") as config:
        config.write(" ")
    for problem in ("its files differ", "is gone"):
        says = refusal(adapted.paths, "fused")
        assert says.startswith(f"{base}: ") and problem in says
        shutil.rmtree(base, ignore_errors=True)
    assert export(whole.paths, "fused")["dtype"] == "float32"
