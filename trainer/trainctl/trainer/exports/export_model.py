"""`python -m trainctl.trainer.exports.export_model`: a checkpoint of a run as other libraries open it.

One JSON line on standard output says what was made, or what is wrong, with the exit status that fits. The folder
appears under its name only when whole, and after it was compared with what the run's own backend makes of the
checkpoint.
"""

import argparse
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from trainctl.protocol.config.quantization import DEFAULTS, format_of, quantization_key
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError, check_installed
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer.common.atomic_folder import make_folder, part_of
from trainctl.trainer.common.errors import answer
from trainctl.trainer.common.model_files import model_config
from trainctl.trainer.exports.model_card import (
    encodes_prompts,
    llama_cpp_lines,
    loading_lines,
    model_card,
    read_history,
)
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
from trainctl.trainer.exports.verification import Comparison, Form, unverifiable, verify_export


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
    if stored and form == "peft":
        trained = _on_original(trained)
    folder: Path = (arguments.output or Path(f"{run}-step-{trained.loop.step}-{form}")).absolute()
    if folder.exists():
        raise InvalidInputError(str(folder), "already exists: remove it, or give a different --output")
    facts: dict[str, Any] = {"run": run, "step": trained.loop.step, "form": form, "folder": str(folder)}
    facts["not_verified"] = (unverifiable(trained, form) if arguments.verify else "--no-verify was given") or None

    def write(work: Path) -> None:
        whole = part_of(work.with_name(f"{work.name}-fused")) if form == "mlx-4bit" else nullcontext()
        with whole as unpacked:
            facts["dtype"] = _write(trained, form, dtype, work, unpacked)
            compared = None if facts["not_verified"] else _verified(trained, form, work, unpacked)
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


def _on_original(trained: TrainedModel) -> TrainedModel:
    """Return the model with the whole one that its quantized base was made from as the base. Raises InvalidInputError
    if that isn't named, or isn't on this machine."""
    original = original_of(trained.model)
    if original is None:
        why = f"peft can't open a base in MLX's format, and no {ORIGIN_FILE} in {trained.model} names the whole model"
        raise InvalidInputError("--to", f"{why}: use --to mlx (adapters), or --to fused")
    return replace(trained, base=original, config=on_base(trained.config, original))


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


def _verified(trained: TrainedModel, form: Form, work: Path, unpacked: Path | None) -> Comparison:
    """Return the comparison. Raises RefusedError if the export isn't the trained model."""
    compared = verify_export(trained, form, work, unpacked)
    if not compared.agrees:
        differ = f"logits differ by {compared.difference:.1e}, and {compared.tolerance:.1e} is allowed"
        raise RefusedError(f"verification failed: {differ}; nothing was written (--no-verify exports unverified)")
    return compared


def _advice(config: RunFile, form: Form, folder: Path, stored: str) -> dict[str, Any]:
    """Return what to do with the folder next."""
    own, warning = "", None
    if (folder / OWN_BASE).exists():
        own = str(folder / OWN_BASE)
        misread = f"mlx-lm would misread the base's config.json (RoPE): use {own} as --model"
        warning = f"{misread}; its weights are links to the base"
    if stored and form == "peft":
        warning = f"the adapters were trained on {stored} values, and peft adds them to those of {config.model.path}"
    next_lines = llama_cpp_lines(folder) if form == "fused" else ()
    return {"load": loading_lines(form, folder, config, own), "llama_cpp": next_lines, "warning": warning}


if __name__ == "__main__":
    sys.exit(main())
