"""README.md of an export, pure: what was trained from what, how it went, and how to load it."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainctl.protocol.config.hub_models import reference
from trainctl.protocol.config.objectives import Objective, caches_reference, objective_name, objective_of
from trainctl.protocol.config.run_tables import AdapterTable, ModelTable, RunFile
from trainctl.trainer.checkpoints.files import LoopState
from trainctl.trainer.exports.data_files import DataFile
from trainctl.trainer.exports.history import History
from trainctl.trainer.exports.verification import Form

_OWN_BASE = (
    "mlx-lm looks for the rotary embeddings (RoPE) under older names than the base's `config.json` has. The one in",
    "`base/` has both. The other files there are links to the base on the machine of the export.",
)
_TRAINED_ON_PACKED = (
    "The adapters were trained on a copy of the base in the format {}. Here they are added to the base itself, whose",
    "values differ from the copy's. So its answers differ from those that the run evaluated.",
)
_LIBRARY: dict[Form, str] = {"peft": "peft", "mlx": "mlx", "fused": "transformers", "mlx-4bit": "mlx"}


def model_card(
    run: str, config: RunFile, loop: LoopState, history: History, form: Form, own_base: str = "",
    data: Sequence[DataFile] = (), stored: str = "",
) -> str:  # fmt: skip
    """The card of the export of one checkpoint; `own_base` as in `loading_lines`, from the card's folder. `data`: the
    files of the run's data, as they are on this machine. `stored`: format of the base that was trained on
    if it is a quantized one, such as "mlx-4bit"; peft's adapters are for the whole one."""
    was_packed = bool(stored) and form == "peft"
    base_format = f"{stored} in training, whole here" if was_packed else stored
    rows = [f"| {name} | {value} |" for name, value in _facts(config, loop, history, base_format) if value]
    curve = [f"| {point.step:,} | {point.loss:.4f} |" for point in history.curve]
    head = ["---", f"library_name: {_LIBRARY[form]}", f"pipeline_tag: {_task(config)}", "tags:", "- trainctl"]
    if "/" in (name := base_name(Path(config.model.path))):
        head.append(f"base_model: {name}")
    lines = [*head, "---", "", f"# {run}, step {loop.step:,}", "", "| | |", "| --- | --- |", *rows]
    if was_packed:
        lines += ["", *(line.format(stored) for line in _TRAINED_ON_PACKED)]
    if curve:
        lines += ["", "| from step | mean loss |", "| --- | --- |", *curve]
    if data:
        lines += ["", "| data file | SHA-256, at the export |", "| --- | --- |"]
        lines += [f"| {file.name} | `{file.sha256}` |" for file in data]
    usage = [f"    {line}" for line in loading_lines(form, Path(), config, own_base)]
    if own_base:
        usage += ["", *_OWN_BASE]
    return "\n".join([*lines, "", "To load it, in this folder:", "", *usage, ""])


def loading_lines(form: Form, folder: Path, config: RunFile, own_base: str = "") -> tuple[str, ...]:
    """How to load an export, as code or commands; `own_base`: folder of the base for mlx-lm, "" if the base itself
    does."""
    base = own_base or reference(Path(config.model.path)).name
    full, place = config.adapter.kind == "full", json.dumps(str(folder))
    model = "ForSeq2SeqLM" if encodes_prompts(config) else "ForCausalLM"
    if form == "peft":
        return (f"from peft import AutoPeftModel{model}", f"AutoPeftModel{model}.from_pretrained({place})")
    if form == "fused":
        return (f"from transformers import AutoModel{model}", f"AutoModel{model}.from_pretrained({place})")
    if config.data.tokenizer == "bytes":  # mlx_lm.generate needs a tokenizer's files
        names, loaded = "load_model", f"load_model(Path({place}))[0]"
        if not full and form != "mlx-4bit":
            names, loaded = "load_adapters, load_model", f"load_model(Path({json.dumps(base)}))[0]"
            loaded = f"load_adapters({loaded}, {place})"
        return ("from pathlib import Path", f"from mlx_lm.utils import {names}", f"{loaded}  # its tokens are bytes")
    options = (
        ("--model", str(folder)) if full or form == "mlx-4bit" else ("--model", base, "--adapter-path", str(folder))
    )
    return (f"mlx_lm.generate {shlex.join(options)} --prompt TEXT",)


def encodes_prompts(config: RunFile) -> bool:
    """Whether a run trains an encoder-decoder model."""
    return objective_of(config.objective, config.data.kind).encodes_prompts


def _task(config: RunFile) -> str:
    """By the hub's names."""
    return "text2text-generation" if encodes_prompts(config) else "text-generation"


def llama_cpp_lines(folder: Path) -> tuple[str, str]:
    """How llama.cpp's own programs convert a fused model, and quantise it."""
    whole, small = f"{folder.name}.gguf", f"{folder.name}-Q4_K_M.gguf"
    return (
        f"python convert_hf_to_gguf.py {shlex.join((str(folder), '--outfile', whole))}",
        f"llama-quantize {shlex.join((whole, small))} Q4_K_M",
    )


def base_name(model: Path) -> str:
    """The hub's name of a model in the Hugging Face cache, else the name of its folder."""
    found = reference(model).name
    return model.name if found == str(model) else found


def _facts(config: RunFile, loop: LoopState, history: History, base_format: str) -> list[tuple[str, str]]:
    optimizer, held_out, longest = config.optimizer, history.held_out, config.data.sequence_length
    objective = objective_of(config.objective, config.data.kind)
    unit, of_samples = objective.loss_unit, objective.sample_unit
    kind = "AdamW" if optimizer.kind == "adamw" else f"AdamW ({optimizer.kind})"
    return [
        ("base", base_name(Path(config.model.path))),
        ("base format", _nf4(config.model) if config.model.base == "nf4" else base_format),
        ("trained", _recipe(config.adapter)),
        ("steps", f"{loop.step:,} of {config.run.steps:,}, {config.batch.global_:,} {of_samples} each"),
        ("objective", ", ".join([objective_name(config.objective, config.data.kind), *_settings(config)])),
        ("optimizer", f"{kind}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule} schedule"),
        ("warm-up", f"{optimizer.warmup(config.run.steps):,} steps"),
        ("weight decay", f"{optimizer.weight_decay:g}"),
        ("seed", str(loop.seed)),
        ("data", f"{config.data.kind}, {loop.samples:,} {of_samples} of up to {longest:,} tokens{_each(objective)}"),
        ("data digest", loop.data_digest),
        ("held-out data", Path(config.data.held_out_path).name),
        ("computed in", config.model.dtype),
        ("loss", f"{history.loss:.4f} {unit}" if history.loss is not None else ""),
        ("held-out loss", f"{held_out.loss:.4f} {unit} at step {held_out.step:,}" if held_out is not None else ""),
    ]


def _each(objective: Objective) -> str:
    """What has the given number of tokens, if it isn't the sample."""
    if objective.has_pairs:
        return " for the prompt with each answer"
    return " for the prompt, and for the completion" if objective.encodes_prompts else ""


def _settings(config: RunFile) -> list[str]:
    """Those of the objective that act, with their values."""
    table, adapter = config.objective, config.adapter.kind != "full"
    values: dict[str, str] = {
        "loss": table.loss, "beta": f"{table.beta:g}",
        "label_smoothing": f"{table.label_smoothing:g}" if table.loss == "robust" else "",
        "reference": "cached" if caches_reference(table, has_adapter=adapter) else "adapter-off",
    }  # fmt: skip
    named = objective_of(table, config.data.kind).settings
    return [f"{name.replace('_', ' ')} {values[name]}" for name in named if values[name]]


def _nf4(model: ModelTable) -> str:
    double = ", scales quantized too" if model.double_quantization else ""
    return f"nf4{double}, computed in {model.compute_dtype or model.computed}"


def _recipe(adapter: AdapterTable) -> str:
    if adapter.kind == "full":
        return "all weights"
    name = {"lora": "LoRA", "rslora": "rsLoRA"}[adapter.kind]
    where = "all linear layers" if adapter.targets == "linear" else ", ".join(adapter.targets)
    layers = f" of the last {adapter.layers} decoder layers" if adapter.layers else ""
    return f"{name}, rank {adapter.rank}, alpha {adapter.alpha:g}, on {where}{layers}"
