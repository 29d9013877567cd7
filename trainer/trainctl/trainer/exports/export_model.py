"""`python -m trainctl.trainer.exports.export_model`: a checkpoint of a run as other libraries open it.

One JSON line on standard output says what was made, or what is wrong, with the exit status that fits. The folder
appears under its name only when whole, and after it was compared with what the run's own backend makes of the
checkpoint. Its README.md says what was trained from what, how it went, and how to load it.
"""

import argparse
import json
import math
import shlex
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from trainctl.protocol.config.data_files import data_files, glob_root, is_glob
from trainctl.protocol.config.model_facts import reference
from trainctl.protocol.config.objectives import caches_reference, objective_name, objective_of
from trainctl.protocol.config.quantization import DEFAULTS, format_of, quantization_key
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError, check_installed
from trainctl.protocol.record.checkpoints import digest_of
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.checkpoints.files import LoopState
from trainctl.trainer.common.atomic_folder import make_folder, part_of
from trainctl.trainer.common.errors import answer
from trainctl.trainer.common.model_files import model_config
from trainctl.trainer.exports.quantize_model import ORIGIN_FILE, original_of, write_quantized
from trainctl.trainer.exports.trained_model import (
    OWN_BASE,
    TrainedModel,
    on_base,
    open_trained,
    write_fused,
    write_mlx,
    write_peft,
)
from trainctl.trainer.exports.verification import Form, unverifiable, verify_export

MAX_FILES = 64
"""Data files that are listed; of more, the first ones."""
_POINTS = 10
"""Points of the curve of losses."""
_OWN_BASE = (
    "mlx-lm looks for the rotary embeddings (RoPE) under older names than the base's `config.json` has. The one in",
    "`base/` has both. The weights there are links to the base's on the machine of the export.",
)
_TRAINED_ON_PACKED = (
    "The adapters were trained on a copy of the base in the format {}. Here they are added to the base itself, whose",
    "values differ from the copy's. So its answers differ from those that the run evaluated.",
)
_LIBRARY: dict[Form, str] = {"peft": "peft", "mlx": "mlx", "fused": "transformers", "mlx-4bit": "mlx"}


def main(argv: list[str] | None = None) -> int:
    """Export once; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainctl.trainer.exports.export_model", description="A checkpoint in another library's form."
    )
    parser.add_argument("--run-directory", type=Path, required=True, metavar="DIR")
    parser.add_argument("--to", dest="form", choices=get_args(Form), required=True)
    checkpoint = parser.add_mutually_exclusive_group()
    checkpoint.add_argument("--step", type=int, metavar="N")
    checkpoint.add_argument("--best", action="store_true")
    parser.add_argument("--output", type=Path, metavar="FOLDER")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--no-verify", dest="verify", action="store_false")
    arguments = parser.parse_args(argv)
    return answer(arguments.form, lambda: _export_model(arguments))


def _export_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the folder; return the facts of it. Raises TrainctlError and what libraries raise; then there is none."""
    paths, form, dtype = RunPaths(arguments.run_directory), arguments.form, arguments.dtype
    with RecordReader(paths) as record:
        trained = open_trained(paths, arguments.step, arguments.best, record.evaluations())
        run, history = record.run, read_history(record, trained.loop.step)
    _check_form(trained, form, dtype)
    stored = format_of(model_config(trained.model)) or ""
    if stored and form == "peft":  # peft adds adapters to the whole model that the quantized base was made from
        base = original_of(trained.model)
        if base is None:
            why = (
                f"peft can't open a base in MLX's format, and no {ORIGIN_FILE} in {trained.model} names the whole model"
            )
            raise InvalidInputError("--to", f"{why}: use --to mlx (adapters), or --to fused")
        trained = replace(trained, base=base, config=on_base(trained.config, base))
    folder: Path = (arguments.output or Path(f"{run}-step-{trained.loop.step}-{form}")).absolute()
    if folder.exists():
        raise InvalidInputError(str(folder), "already exists: remove it, or give a different --output")
    facts: dict[str, Any] = {"run": run, "step": trained.loop.step, "form": form, "folder": str(folder)}
    facts["not_verified"] = (unverifiable(trained, form) if arguments.verify else "--no-verify was given") or None

    def write(work: Path) -> None:
        whole = part_of(work.with_name(f"{work.name}-fused")) if form == "mlx-4bit" else nullcontext()
        with whole as unpacked:
            facts["dtype"] = _write(trained, form, dtype, work, unpacked)
            compared = None if facts["not_verified"] else verify_export(trained, form, work, unpacked)
        if compared is not None and not compared.agrees:
            differ = f"logits differ by {compared.difference:.1e}, and {compared.tolerance:.1e} is allowed"
            raise RefusedError(f"verification failed: {differ}; nothing was written (--no-verify exports unverified)")
        own = OWN_BASE if (work / OWN_BASE).exists() else ""
        card = model_card(run, trained, history, form, own_base=own, stored=stored)
        (work / "README.md").write_text(card, encoding="utf-8")
        files = (path for path in work.rglob("*") if path.is_file() and not path.is_symlink())
        facts["bytes"] = sum(path.stat().st_size for path in files)
        for name in ("difference", "tolerance", "rounding", "library"):
            facts[name] = getattr(compared, name, None)

    make_folder(folder, write)
    return facts | _advice(trained.config, form, folder, stored)


def _check_form(trained: TrainedModel, form: Form, dtype: str | None) -> None:
    """Check that the form can hold what was trained. Raises InvalidInputError."""
    if form == "peft" and trained.lora is None:
        raise InvalidInputError("--to", "peft holds adapters, and this run trained all weights: use --to fused")
    if form == "mlx-4bit" and quantization_key(model_config(trained.model)):
        why = "quantizing again loses what was learned"
        raise InvalidInputError("--to", f"{why}: use --to mlx (adapters), or --to fused")
    if dtype is not None and form in ("peft", "mlx") and trained.lora is not None:
        raise InvalidInputError("--dtype", f"{form} holds adapters alone, in float32: leave it out, or use --to fused")
    if form in ("mlx", "mlx-4bit") and encodes_prompts(trained.config):
        problem = f"mlx-lm has no encoder-decoder models, so there is no {form}: use --to fused, or peft for adapters"
        raise InvalidInputError("--to", problem)
    if form == "mlx-4bit":
        check_installed("mlx-lm", "mlx", "--to", form)


def _write(trained: TrainedModel, form: Form, dtype: str | None, work: Path, unpacked: Path | None) -> str | None:
    """Fill the folder; return the type of most weights, None for adapters alone. `unpacked`: the folder for the whole
    model that is quantized."""
    if unpacked is not None:
        kept = write_fused(trained, unpacked, dtype)
        write_quantized(unpacked, work, DEFAULTS["mlx-4bit"])
        return kept
    if trained.lora is None or form == "fused":
        return write_fused(trained, work, dtype)
    write = write_peft if form == "peft" else write_mlx
    write(trained, trained.lora, work)
    return None


def _advice(config: RunFile, form: Form, folder: Path, stored: str) -> dict[str, Any]:
    """Return what to do with the folder next."""
    own, warning = "", None
    if (folder / OWN_BASE).exists():
        own = str(folder / OWN_BASE)
        misread = f"mlx-lm would misread the base's config.json (RoPE): use {own} as --model"
        warning = f"{misread}; its weights are links to the base"
    if stored and form == "peft":
        warning = f"the adapters were trained on {stored} values, and peft adds them to those of {config.model.path}"
    llama_cpp: tuple[str, ...] = ()  # commands of its own programs that convert a fused model, and quantise it
    if form == "fused":
        whole, small = f"{folder.name}.gguf", f"{folder.name}-Q4_K_M.gguf"
        llama_cpp = (
            f"python convert_hf_to_gguf.py {shlex.join((str(folder), '--outfile', whole))}",
            f"llama-quantize {shlex.join((whole, small))} Q4_K_M",
        )
    return {"load": loading_lines(form, folder, config, own), "llama_cpp": llama_cpp, "warning": warning}


# ------------------------------------------------------------ the card


@dataclass(frozen=True)
class History:
    """The record of a run up to one step."""

    loss: float | None  # in the objective's unit, of the step itself; None: not recorded
    held_out: Evaluation | None  # newest up to the step
    curve: tuple[tuple[int, float], ...]  # the first of some steps, and the mean loss over them


def read_history(record: RecordReader, step: int) -> History:
    """Return what the record says about a step. Raises InvalidInputError if it cannot be read."""
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
        for place in places:
            root = place if place.is_dir() else glob_root(place) if is_glob(place) else place.parent
            if files := [file for file in data_files(place, config.data.kind) if file.is_file()]:
                for file in files[: MAX_FILES - len(digests)]:
                    digests[file.relative_to(root).as_posix()] = digest_of(file)
                break
    return digests


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
    table, has_adapter = config.objective, config.adapter.kind != "full"
    reference = "cached" if caches_reference(table, has_adapter=has_adapter) else "adapter-off"
    acting = [name for name in objective.settings if name != "label_smoothing" or table.loss == "robust"]
    values = {name: reference if name == "reference" else getattr(table, name) for name in acting}
    settings = [
        f"{name.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"
        for name, value in values.items()
    ]
    adapter, trained = config.adapter, "all weights"
    if has_adapter:
        name = {"lora": "LoRA", "rslora": "rsLoRA"}[adapter.kind]
        where = "all linear layers" if adapter.targets == "linear" else ", ".join(adapter.targets)
        layers = f" of the last {adapter.layers} decoder layers" if adapter.layers else ""
        trained = f"{name}, rank {adapter.rank}, alpha {adapter.alpha:g}, on {where}{layers}"
    tokens = f"of up to {config.data.sequence_length:,} tokens{each}"
    return [
        ("base", base_name(Path(model.path))),
        ("base format", base_format),
        ("trained", trained),
        ("steps", f"{loop.step:,} of {config.run.steps:,}, {config.batch.global_:,} {of_samples} each"),
        ("objective", ", ".join([objective_name(config.objective, config.data.kind), *settings])),
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


if __name__ == "__main__":
    sys.exit(main())
