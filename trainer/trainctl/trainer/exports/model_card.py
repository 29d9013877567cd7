"""README.md of an export: what was trained from what, how it went, and how to load it."""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainctl.protocol.config.data_files import data_files, glob_root, is_glob
from trainctl.protocol.config.hub_models import reference
from trainctl.protocol.config.objectives import Objective, caches_reference, objective_name, objective_of
from trainctl.protocol.config.run_tables import AdapterTable, RunFile
from trainctl.protocol.record.checkpoints import digest_of
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.checkpoints.files import LoopState
from trainctl.trainer.exports.trained_model import TrainedModel
from trainctl.trainer.exports.verification import Form

MAX_FILES = 64
"""Data files that are listed; of more, the first ones."""
_POINTS = 10
"""Points of the curve of losses."""
_OWN_BASE = (
    "mlx-lm looks for the rotary embeddings (RoPE) under older names than the base's `config.json` has. The one in",
    "`base/` has both. The other files there are links to the base on the machine of the export.",
)
_TRAINED_ON_PACKED = (
    "The adapters were trained on a copy of the base in the format {}. Here they are added to the base itself, whose",
    "values differ from the copy's. So its answers differ from those that the run evaluated.",
)
_LIBRARY: dict[Form, str] = {"peft": "peft", "mlx": "mlx", "fused": "transformers", "mlx-4bit": "mlx"}


@dataclass(frozen=True)
class History:
    """The record of a run up to one step."""

    loss: float | None  # in the objective's unit, of the step itself; None: not recorded
    held_out: Evaluation | None  # newest up to the step
    curve: tuple[tuple[int, float], ...]  # the first of some steps, and the mean loss over them


def read_history(record: RecordReader, step: int) -> History:
    """Return what the record says of a step. Raises InvalidInputError if it cannot be read."""
    steps, _ = record.steps(after=step - 1, limit=1)
    loss = next((row.loss for row in steps if row.step == step), None)
    evaluated = [row for row in record.evaluations() if row.step <= step and math.isfinite(row.loss)]
    series = record.series("loss", last_step=step, columns=_POINTS)
    curve = tuple((max(1, first), mean) for first, mean in zip(series.steps, series.mean, strict=True))
    return History(loss, evaluated[-1] if evaluated else None, curve)


def read_data_files(config: RunFile) -> dict[str, str]:
    """Return the digests of a run's data files on this machine, which `sha256sum` prints too, by names from the data's
    folder; the held-out ones follow. {} if they aren't here. Raises OSError."""
    nodes, digests = [*config.nodes.values()], dict[str, str]()
    for paths in (
        [config.data.path, *(node.data_path for node in nodes)],
        [config.data.held_out_path, *(node.held_out_path for node in nodes)],
    ):
        places = (Path(path) for path in paths if path)
        files = next((files for place in places if (files := _files(place, config))), {})
        for name, file in [*files.items()][: MAX_FILES - len(digests)]:
            digests[name] = digest_of(file)
    return digests


def _files(path: Path, config: RunFile) -> dict[str, Path]:
    root = path if path.is_dir() else glob_root(path) if is_glob(path) else path.parent
    files = [file for file in data_files(path, config.data.kind) if file.is_file()]
    return {file.relative_to(root).as_posix(): file for file in files}


def model_card(
    run: str, trained: TrainedModel, history: History, form: Form, *, own_base: str = "", stored: str = ""
) -> str:
    """Return the card of the export of one checkpoint; `own_base` as in `loading_lines`, from the card's folder.
    `stored`: format of the base that was trained on if it is a quantized one, such as "mlx-4bit"; peft's adapters are
    for the whole one."""
    config, step = trained.config, trained.loop.step
    was_packed = bool(stored) and form == "peft"
    base_format = f"{stored} in training, whole here" if was_packed else stored
    task = "text2text-generation" if encodes_prompts(config) else "text-generation"
    lines = ["---", f"library_name: {_LIBRARY[form]}", f"pipeline_tag: {task}", "tags:", "- trainctl"]
    if "/" in (name := base_name(Path(config.model.path))):
        lines.append(f"base_model: {name}")
    lines += ["---", "", f"# {run}, step {step:,}", "", "| | |", "| --- | --- |"]
    lines += [f"| {fact} | {value} |" for fact, value in _facts(config, trained.loop, history, base_format) if value]
    if was_packed:
        lines += ["", *(line.format(stored) for line in _TRAINED_ON_PACKED)]
    if history.curve:
        lines += ["", "| from step | mean loss |", "| --- | --- |"]
        lines += [f"| {first:,} | {loss:.4f} |" for first, loss in history.curve]
    if digests := read_data_files(config):
        lines += ["", "| data file | SHA-256, at the export |", "| --- | --- |"]
        lines += [f"| {file} | `{digest}` |" for file, digest in digests.items()]
    lines += ["", "To load it, in this folder:", ""]
    lines += [f"    {line}" for line in loading_lines(form, Path(), config, own_base)]
    if own_base:
        lines += ["", *_OWN_BASE]
    return "\n".join([*lines, ""])


def loading_lines(form: Form, folder: Path, config: RunFile, own_base: str = "") -> tuple[str, ...]:
    """Return how to load an export, as code or commands; `own_base`: folder of the base for mlx-lm, "" if the base
    itself does."""
    base = own_base or reference(Path(config.model.path)).name
    is_whole, place = config.adapter.kind == "full" or form == "mlx-4bit", json.dumps(str(folder))
    model = "ForSeq2SeqLM" if encodes_prompts(config) else "ForCausalLM"
    if form == "peft":
        return (f"from peft import AutoPeftModel{model}", f"AutoPeftModel{model}.from_pretrained({place})")
    if form == "fused":
        return (f"from transformers import AutoModel{model}", f"AutoModel{model}.from_pretrained({place})")
    if config.data.tokenizer == "bytes":  # mlx_lm.generate needs a tokenizer's files
        names, loaded = "load_model", f"load_model(Path({place}))[0]"
        if not is_whole:
            names, loaded = "load_adapters, load_model", f"load_model(Path({json.dumps(base)}))[0]"
            loaded = f"load_adapters({loaded}, {place})"
        return ("from pathlib import Path", f"from mlx_lm.utils import {names}", f"{loaded}  # its tokens are bytes")
    options = ["--model", str(folder)] if is_whole else ["--model", base, "--adapter-path", str(folder)]
    return (f"mlx_lm.generate {shlex.join(options)} --prompt TEXT",)


def encodes_prompts(config: RunFile) -> bool:
    """Return whether a run trains an encoder-decoder model."""
    return objective_of(config.objective, config.data.kind).encodes_prompts


def llama_cpp_lines(folder: Path) -> tuple[str, str]:
    """Return how llama.cpp's own programs convert a fused model, and quantise it."""
    whole, small = f"{folder.name}.gguf", f"{folder.name}-Q4_K_M.gguf"
    return (
        f"python convert_hf_to_gguf.py {shlex.join((str(folder), '--outfile', whole))}",
        f"llama-quantize {shlex.join((whole, small))} Q4_K_M",
    )


def base_name(model: Path) -> str:
    """Return the hub's name of a model in the Hugging Face cache, else the name of its folder."""
    name = reference(model).name
    return model.name if name == str(model) else name


def _facts(config: RunFile, loop: LoopState, history: History, base_format: str) -> list[tuple[str, str]]:
    optimizer, held_out, model = config.optimizer, history.held_out, config.model
    objective = objective_of(config.objective, config.data.kind)
    unit, of_samples = objective.loss_unit, objective.sample_unit
    kind = "AdamW" if optimizer.kind == "adamw" else f"AdamW ({optimizer.kind})"
    if model.base == "nf4":
        double = ", scales quantized too" if model.double_quantization else ""
        base_format = f"nf4{double}, computed in {model.compute_dtype or model.computed}"
    each = ""  # what has the given number of tokens, if it isn't the sample
    if objective.has_pairs:
        each = " for the prompt with each answer"
    elif objective.encodes_prompts:
        each = " for the prompt, and for the completion"
    tokens = f"of up to {config.data.sequence_length:,} tokens{each}"
    return [
        ("base", base_name(Path(model.path))),
        ("base format", base_format),
        ("trained", _recipe(config.adapter)),
        ("steps", f"{loop.step:,} of {config.run.steps:,}, {config.batch.global_:,} {of_samples} each"),
        ("objective", ", ".join([objective_name(config.objective, config.data.kind), *_settings(config, objective)])),
        ("optimizer", f"{kind}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule} schedule"),
        ("warm-up", f"{optimizer.warmup(config.run.steps):,} steps"),
        ("weight decay", f"{optimizer.weight_decay:g}"),
        ("seed", str(loop.seed)),
        ("data", f"{config.data.kind}, {loop.samples:,} {of_samples} {tokens}"),
        ("data digest", loop.data_digest),
        ("held-out data", Path(config.data.held_out_path).name),
        ("computed in", model.dtype),
        ("loss", f"{history.loss:.4f} {unit}" if history.loss is not None else ""),
        ("held-out loss", f"{held_out.loss:.4f} {unit} at step {held_out.step:,}" if held_out is not None else ""),
    ]


def _settings(config: RunFile, objective: Objective) -> Sequence[str]:
    """Return those of the objective that act, with their values."""
    table, has_adapter = config.objective, config.adapter.kind != "full"
    values: dict[str, str] = {
        "loss": table.loss,
        "beta": f"{table.beta:g}",
        "label_smoothing": f"{table.label_smoothing:g}" if table.loss == "robust" else "",
        "reference": "cached" if caches_reference(table, has_adapter=has_adapter) else "adapter-off",
    }
    return [f"{name.replace('_', ' ')} {values[name]}" for name in objective.settings if values[name]]


def _recipe(adapter: AdapterTable) -> str:
    if adapter.kind == "full":
        return "all weights"
    name = {"lora": "LoRA", "rslora": "rsLoRA"}[adapter.kind]
    where = "all linear layers" if adapter.targets == "linear" else ", ".join(adapter.targets)
    layers = f" of the last {adapter.layers} decoder layers" if adapter.layers else ""
    return f"{name}, rank {adapter.rank}, alpha {adapter.alpha:g}, on {where}{layers}"
