"""Every form of an export opens in its own library as the model that was trained; what cannot be made is one line."""

import contextlib
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.chat_model import make_chat_model
from tests.trainer.support.trained_run import TrainedRun

from trainctl.protocol.config.stored_weights import stored_tensors
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.exports import export_model, tensor_files
from trainctl.trainer.exports.origin import ORIGIN_FILE
from trainctl.trainer.exports.quantize_model import quantize
from trainctl.trainer.exports.trained_model import open_trained
from trainctl.trainer.exports.verification import Form, Logits, mlx_logits, torch_logits, verify_export

LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
RSLORA = {"kind": "rslora", "rank": 4, "alpha": 8.0, "layers": 1, "targets": ["q_proj", "mlp.down_proj"]}
RUNS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "torch-lora": ("torch", LORA), "mlx-lora": ("mlx", LORA), "torch-rslora": ("torch", RSLORA),
    "mlx-rslora": ("mlx", RSLORA), "torch-full": ("torch", {}), "mlx-full": ("mlx", {}),
}  # fmt: skip
ADAPTED = [name for name in RUNS if not name.endswith("full")]
EXACT, ROUNDED = 1e-5, 1e-2
Export = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_chat_model(tmp_path_factory.mktemp("base") / "model", hidden=64, intermediate=128)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("{{ messages }}", "utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TrainedRun]:
    """A run by its name in RUNS, trained once."""
    made: dict[str, TrainedRun] = {}

    def train(name: str) -> TrainedRun:
        if name not in made:
            made[name] = TrainedRun(tmp_path_factory.mktemp(name) / "run-1", model, *RUNS[name])
        return made[name]

    return train


@pytest.fixture
def export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Export into `tmp_path`/out; what was said, and the exit status as "status"."""

    def run(paths: RunPaths, form: str, *options: str) -> dict[str, Any]:
        words = [f"--run-directory={paths.directory}", f"--to={form}", f"--output={tmp_path / 'out'}", *options]
        status = export_model.main(words)
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        return {**json.loads(out), "status": status}

    return run


def by_torch(folder: Path, run: TrainedRun) -> Logits:
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    adapted = (folder / "adapter_config.json").exists()
    kind: Any = AutoPeftModelForCausalLM if adapted else AutoModelForCausalLM
    return torch_logits(kind.from_pretrained(folder), run.batch.inputs.astype(np.int64))


def by_mlx(folder: Path, run: TrainedRun, base: Path | None = None) -> Logits:
    from mlx_lm import load

    found: Any = load(str(base), adapter_path=str(folder)) if base else load(str(folder))
    return mlx_logits(found[0], run.batch.inputs.astype(np.int64))


def difference(logits: Logits, run: TrainedRun) -> float:
    """From the log-probabilities that the training backend gave the targets, the largest."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_probabilities, run.batch.targets[..., None].astype(np.int64), -1)[..., 0]
    return float(np.abs(picked - run.log_probabilities)[run.batch.counted > 0].max())


@pytest.mark.parametrize("name", ADAPTED)
def test_peft_opens_adapters(trained: Callable[[str], TrainedRun], export: Export, name: str, tmp_path: Path) -> None:
    run = trained(name)
    made = export(run.paths, "peft", "--verify")
    assert (made["status"], made["dtype"]) == (0, None)
    assert made["difference"] <= EXACT
    assert difference(by_torch(tmp_path / "out", run), run) <= EXACT
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"} <= names
    assert (tmp_path / "out" / "additional_chat_templates" / "short.jinja").read_text("utf-8") == "{{ messages }}"


@pytest.mark.parametrize("name", RUNS)
def test_mlx_lm_opens_adapters_and_whole_models(
    trained: Callable[[str], TrainedRun], export: Export, name: str, tmp_path: Path, model: Path
) -> None:
    run = trained(name)
    made = export(run.paths, "mlx", "--verify")
    assert made["status"] == 0
    assert made["difference"] <= EXACT
    base = model if name in ADAPTED else None
    assert difference(by_mlx(tmp_path / "out", run, base), run) <= EXACT
    assert (made["warning"], (tmp_path / "out" / "base").exists()) == (None, False)


@pytest.mark.parametrize("name", RUNS)
def test_transformers_and_mlx_lm_open_fused_models(
    trained: Callable[[str], TrainedRun], export: Export, name: str, tmp_path: Path, model: Path
) -> None:
    run = trained(name)
    untrained = difference(by_torch(model, run), run)
    assert untrained > 10 * ROUNDED, "it has to have learned for this to mean anything"
    made = export(run.paths, "fused", "--verify")
    assert (made["status"], made["dtype"]) == (0, "float32")
    assert made["difference"] <= EXACT
    assert difference(by_torch(tmp_path / "out", run), run) <= EXACT
    assert difference(by_mlx(tmp_path / "out", run), run) <= EXACT
    assert [line.split()[0] for line in made["llama_cpp"]] == ["python", "llama-quantize"]
    shutil.rmtree(tmp_path / "out")
    made = export(run.paths, "fused", "--verify", "--dtype=bfloat16")
    assert (made["status"], made["dtype"]) == (0, "bfloat16")
    assert made["difference"] <= made["tolerance"] <= 10 * EXACT, "of the rounded weights"
    assert EXACT < made["rounding"] <= ROUNDED


@pytest.mark.parametrize("name", ["torch-lora", "mlx-rslora", "torch-full"])
def test_mlx_in_4_bits_has_the_logits_of_its_own_dequantised_weights(
    trained: Callable[[str], TrainedRun], export: Export, name: str, tmp_path: Path
) -> None:
    run = trained(name)
    made = export(run.paths, "mlx-4bit", "--verify")
    assert made["status"] == 0
    assert made["difference"] <= EXACT
    kept = {tensor.dtype for name, tensor in stored_tensors(tmp_path / "out").items() if name.endswith("proj.weight")}
    assert kept == {"U32"}
    assert difference(by_mlx(tmp_path / "out", run), run) < 1.0
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


@pytest.mark.parametrize(("form", "file", "right", "wrong"), [
    ("peft", "adapter_config.json", '"lora_alpha": 16.0', '"lora_alpha": 16.1'),
    ("mlx", "adapter_config.json", '"scale": 4.0', '"scale": 4.02'),
    ("fused", "config.json", '"rope_theta": 10000.0', '"rope_theta": 11000.0'),
])  # fmt: skip
def test_verification_fails_for_what_is_slightly_wrong(
    trained: Callable[[str], TrainedRun], export: Export, form: Form, file: str, right: str, wrong: str, tmp_path: Path
) -> None:
    run = trained("torch-lora")
    export(run.paths, form)
    path = tmp_path / "out" / file
    stated = path.read_text("utf-8")
    assert right in stated
    path.write_text(stated.replace(right, wrong), "utf-8")
    found = verify_export(open_trained(run.paths, None, best=False, evaluations=()), form, tmp_path / "out")
    assert not found.agrees
    assert found.difference > 10 * EXACT


# ---------------------------------------------------------------- bases as people have them


def test_a_16_bit_export_of_slightly_other_weights_fails_verification(
    trained: Callable[[str], TrainedRun], export: Export, tmp_path: Path
) -> None:
    """Its logits are within what rounding changes."""
    import torch
    from safetensors.torch import load_file, save_file

    run = trained("torch-lora")
    rounding = export(run.paths, "fused", "--verify", "--dtype=bfloat16")["rounding"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight"][0] *= torch.tensor(1 + 2**-7, dtype=torch.bfloat16)
    save_file(stored, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    found = verify_export(open_trained(run.paths, None, best=False, evaluations=()), "fused", tmp_path / "out")
    assert not found.agrees
    assert found.difference < 2 * rounding


def rewritten(model: Path, folder: Path, config: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A copy of the model with another config.json."""
    shutil.copytree(model, folder)
    stated = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config(stated)), "utf-8")
    return folder


@pytest.mark.parametrize("adapter", [LORA, {}], ids=["lora", "full"])
@pytest.mark.parametrize("library", ["torch", "mlx"])
def test_fused_files_and_types_are_those_of_the_base(
    model: Path, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: Mapping[str, Any],
    library: str,
) -> None:  # fmt: skip
    """Of a base in two files, all but the norms in bfloat16."""
    base = rewritten(model, tmp_path / "base", lambda config: config | {"dtype": "bfloat16"})
    in_two_files(base)
    run = TrainedRun(tmp_path / "runs" / "run-1", base, library, adapter)
    monkeypatch.setattr(tensor_files, "LIBRARIES", tuple(x for x in tensor_files.LIBRARIES if x[0] == library))
    made = export(run.paths, "fused", "--verify")
    assert (made["status"], made["dtype"]) == (0, "bfloat16")
    written, expected = (
        {name: (tensor.file.name, tensor.dtype, tensor.shape) for name, tensor in stored_tensors(folder).items()}
        for folder in (tmp_path / "out", base)
    )
    assert written == expected
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert (config["dtype"], config["rope_theta"]) == ("bfloat16", config["rope_parameters"]["rope_theta"])
    assert difference(by_torch(tmp_path / "out", run), run) <= ROUNDED


def in_two_files(base: Path) -> None:
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
    model: Path, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaling: str, linked: bool
) -> None:
    """transformers 5 writes `rope_parameters` alone; mlx-lm then takes its own theta."""

    def of_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
        return kept | {"rope_parameters": {"rope_theta": 500_000.0, **SCALINGS[scaling]}}

    base = rewritten(model, tmp_path / "base", of_transformers_5)
    run = TrainedRun(tmp_path / "runs" / "run-1", base, "torch", LORA)
    if not linked:
        monkeypatch.setattr(Path, "symlink_to", no_links)
    made = export(run.paths, "mlx", "--verify")
    assert (made["status"], made["difference"] <= EXACT) == (0, True)
    own = tmp_path / "out" / "base"
    assert (own / "model.safetensors").is_symlink() == linked
    assert f"--model {own} --adapter-path" in made["load"][0]
    assert str(own) in made["warning"]
    assert "--model base --adapter-path ." in (tmp_path / "out" / "README.md").read_text("utf-8")
    assert difference(by_mlx(tmp_path / "out", run, own), run) <= EXACT
    assert difference(by_mlx(tmp_path / "out", run, base), run) > 10 * EXACT, "else it needn't be there"


def no_links(*_: Any) -> None:
    raise OSError(1, "Operation not permitted")


# ---------------------------------------------------------------- which checkpoint, and what cannot be made


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Checkpoints of steps 1, 2 and 4, evaluated at 1, 2 and 3. Step 2 is the best."""
    folder = tmp_path_factory.mktemp("kept") / "run-1"
    return TrainedRun(folder, model, "torch", LORA, saved=(1, 2, 4), held_out={1: 2.5, 2: 0.25, 3: 0.5})


def test_a_checkpoint_with_a_compressed_optimizer_is_exported(model: Path, export: Export, tmp_path: Path) -> None:
    table = {"compression": "zstd"}
    run = TrainedRun(tmp_path / "runs" / "run-1", model, "torch", LORA, steps=1, saved=(1,), checkpoint=table)
    assert (run.paths.checkpoint(1) / "optimizer.safetensors.zst").is_file()
    made = export(run.paths, "peft", "--verify")
    assert (made["status"], made["step"]) == (0, 1)
    assert made["difference"] <= EXACT
    assert difference(by_torch(tmp_path / "out", run), run) <= EXACT


@pytest.mark.parametrize(("options", "step"), [((), 4), (("--step=1",), 1), (("--best",), 2)])
def test_a_checkpoint_is_chosen(
    kept: TrainedRun, export: Export, options: tuple[str, ...], step: int, tmp_path: Path
) -> None:
    assert export(kept.paths, "peft", *options)["step"] == step
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    held_out = {1: ("2.5000", 1), 2: ("0.2500", 2), 4: ("0.5000", 3)}[step]
    assert f"# run-1, step {step}\n" in card
    assert f"| held-out loss | {held_out[0]} nats per token at step {held_out[1]} |" in card
    assert "| held-out data |" not in card, "a fraction of the data has no name"
    assert "| trained | LoRA, rank 4, alpha 16, on all linear layers |" in card
    for fact in ("objective | sft", "warm-up | 0 steps", "weight decay | 0", "seed | 3"):
        assert f"| {fact} |" in card
    data = kept.paths.directory.with_name("rows.jsonl").read_bytes()
    assert f"| rows.jsonl | `{hashlib.sha256(data).hexdigest()}` |" in card
    curve = card[card.index("| from step |") : card.index("| data file |")]
    assert [line.split()[1] for line in curve.splitlines()[2:-1]] == [str(point) for point in range(1, step + 1)]


@pytest.mark.parametrize(("form", "options", "says"), [
    ("peft", ("--step=3",), "--step: no complete checkpoint of step 3; there is one of 4, 2, 1"),
    ("peft", ("--dtype=bfloat16",), "--dtype: peft holds adapters alone, in float32"),
    ("mlx", ("--dtype=bfloat16",), "--dtype: mlx holds adapters alone, in float32"),
])  # fmt: skip
def test_what_does_not_fit_is_one_line(
    kept: TrainedRun, export: Export, form: str, options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    refused = export(kept.paths, form, *options)
    assert refused["status"] == 2
    assert f"{refused['where']}: {refused['problem']}".startswith(says)
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
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


@pytest.mark.parametrize("library", ["torch", "mlx"])
def test_adapters_of_a_quantized_base_are_fused_into_its_unpacked_weights(
    quantized: TrainedRun, export: Export, tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "LIBRARIES", [pair for pair in tensor_files.LIBRARIES if pair[0] == library])
    made = export(quantized.paths, "fused", "--verify", "--dtype=float32")
    assert made["status"] == 0, made
    assert made["dtype"] == "float32"
    assert made["difference"] <= made["tolerance"]
    assert difference(by_torch(tmp_path / "out", quantized), quantized) <= EXACT
    assert "quantization" not in json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert {tensor.dtype for tensor in stored_tensors(tmp_path / "out").values()} == {"F32"}
    shutil.rmtree(tmp_path / "out")
    made = export(quantized.paths, "fused", "--verify")
    assert (made["status"], made["dtype"]) == (0, "bfloat16"), made
    assert made["difference"] <= made["tolerance"] < made["rounding"]


def test_adapters_of_a_quantized_base_are_for_mlx_lm_alone(
    quantized: TrainedRun, export: Export, tmp_path: Path
) -> None:
    """Of one whose directory doesn't say what it was made from."""
    noted = quantized.paths.directory.parent / "model" / ORIGIN_FILE
    kept = noted.rename(tmp_path / "kept")
    try:
        for form in ("peft", "mlx-4bit"):
            refused = export(quantized.paths, form)
            assert (refused["status"], refused["where"]) == (2, "--to") and not (tmp_path / "out").exists()
        assert f"no {ORIGIN_FILE}" in export(quantized.paths, "peft")["problem"]
    finally:
        kept.rename(noted)
    made = export(quantized.paths, "mlx", "--verify")
    assert made["status"] == 0 and made["difference"] <= made["tolerance"], made
    base = quantized.paths.directory.parent / "model"
    assert difference(by_mlx(tmp_path / "out", quantized, base), quantized) <= EXACT


def test_peft_opens_adapters_of_a_quantized_base_on_the_model_it_was_made_from(
    quantized: TrainedRun, export: Export, tmp_path: Path
) -> None:
    whole = quantized.paths.directory.parent / "whole"
    made = export(quantized.paths, "peft", "--verify")
    assert made["status"] == 0 and made["difference"] <= made["tolerance"], made
    assert made["warning"].startswith("the adapters were trained on mlx-4bit values")
    stated = json.loads((tmp_path / "out" / "adapter_config.json").read_text("utf-8"))
    assert stated["base_model_name_or_path"] == str(whole)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "| base | whole |" in card and "trained on a copy of the base in the format mlx-4bit. " in card
    assert EXACT < difference(by_torch(tmp_path / "out", quantized), quantized) < 1.0, "of quantization"
    shutil.rmtree(tmp_path / "out")


def test_a_model_that_a_base_was_not_made_from_is_refused(
    quantized: TrainedRun, export: Export, tmp_path: Path
) -> None:
    weights = quantized.paths.directory.parent / "whole" / "model.safetensors"
    config, content = weights.with_name("config.json"), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        refused = export(quantized.paths, "peft")
        assert (refused["status"], refused["where"]) == (2, str(weights.parent))
        assert "aren't those that the base was made from" in refused["problem"]
    finally:
        weights.write_bytes(content)
    away = config.rename(tmp_path / "away")
    try:
        refused = export(quantized.paths, "peft")
        assert refused["status"] == 2 and f"{weights.parent}, which isn't on this machine" in refused["problem"]
    finally:
        away.rename(config)
    assert not [*tmp_path.iterdir()]


def test_peft_is_refused_for_a_whole_model(trained: Callable[[str], TrainedRun], export: Export) -> None:
    refused = export(trained("torch-full").paths, "peft")
    assert (refused["status"], refused["where"]) == (2, "--to")
    assert "use --to fused" in refused["problem"]


def test_a_folder_that_is_there_is_left_alone(kept: TrainedRun, export: Export, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refused = export(kept.paths, "peft")
    assert (refused["status"], refused["where"]) == (2, str(tmp_path / "out"))
    assert not [*(tmp_path / "out").iterdir()]


@pytest.fixture
def own(kept: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A copy of that run, to damage."""
    folder = tmp_path_factory.mktemp("own") / "run-1"
    shutil.copytree(kept.paths.directory, folder)
    return RunPaths(folder)


def test_without_checkpoints_or_evaluations_a_line_says_so(own: RunPaths, export: Export) -> None:
    with contextlib.closing(sqlite3.connect(own.record)) as record, record:
        record.execute("DELETE FROM evaluations")
    refused = export(own, "peft", "--best")
    assert (refused["status"], refused["where"]) == (2, "--best")
    assert "none was evaluated (4, 2, 1)" in refused["problem"]
    for step in (1, 2):
        shutil.rmtree(own.checkpoint(step))
    (own.checkpoint(4) / "state.json").unlink()
    refused = export(own, "peft")
    assert refused["status"] == 2
    assert "no complete checkpoint" in refused["problem"]


def test_altered_weights_are_refused(own: RunPaths, export: Export) -> None:
    path = own.checkpoint(4) / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes(255 - byte for byte in content[-9:]))
    refused = export(own, "peft")
    assert (refused["status"], refused["where"]) == (2, str(path))


def test_a_base_that_is_gone_or_another_is_refused(model: Path, export: Export, tmp_path: Path) -> None:
    base = rewritten(model, tmp_path / "base", lambda config: config)
    adapted = TrainedRun(tmp_path / "runs" / "run-1", base, "torch", LORA, steps=1, saved=(1,))
    whole = TrainedRun(tmp_path / "runs" / "run-2", base, "torch", {}, steps=1, saved=(1,))
    stated = (base / "config.json").read_text("utf-8")
    (base / "config.json").write_text(stated + " ", "utf-8")
    refused = export(adapted.paths, "fused")
    assert (refused["status"], refused["where"]) == (2, str(base))
    assert "its files differ" in refused["problem"]
    shutil.rmtree(base)
    refused = export(adapted.paths, "fused")
    assert (refused["status"], refused["where"]) == (2, str(base))
    assert "is gone" in refused["problem"]
    assert export(whole.paths, "fused")["dtype"] == "float32"
