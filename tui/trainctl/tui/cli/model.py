"""`trainctl model`: a run's trained model for other programs (`export`), and a model made ready for training
(`quantize`)."""

import json
import subprocess
import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trainctl.protocol.config.quantization import QuantizedFormat
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.tui.cli import output, runs
from trainctl.tui.cli.options import ClusterFile, Connect, Json, subcommands, subgroup
from trainctl.tui.cli.output import stage_if_slow
from trainctl.tui.cli.runs import RunArgument

app = subcommands()
group = subgroup("Export a trained model; make a quantized copy of one.")
app.add_typer(group, name="model")
ModelForm = Literal["peft", "mlx", "fused", "mlx-4bit"]
Dtype = Literal["float32", "bfloat16"]


@group.command()
def export(
    ctx: typer.Context,
    run: RunArgument,
    to: Annotated[ModelForm, typer.Option("--to", help="peft or mlx: adapters; fused, mlx-4bit: the whole model.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint [newest].", show_default=False)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Export the checkpoint with the lowest held-out loss.")] = False,
    output_folder: Annotated[
        Path | None, typer.Option("--output", help="Folder to make [RUN-step-N-FORM].", show_default=False)
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Type of a whole model's weights [the base's].", show_default=False)
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Don't compare the export's logits with the trained model's.")
    ] = False,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Write a run's trained model for peft, mlx-lm, transformers or llama.cpp, from its checkpoints on this machine."""
    if step is not None and best:
        raise InvalidInputError("--best", "can't be combined with --step: give only one")
    directory = runs.find_or_ask(ctx, run, connect, cluster)
    given = {"--to": to, "--step": step, "--output": output_folder, "--dtype": dtype}
    words = [f"{option}={value}" for option, value in given.items() if value is not None]
    words += [option for option, on in (("--best", best), ("--no-verify", no_verify)) if on]
    compared = "" if no_verify else ", then its logits are compared (--no-verify leaves that out)"
    doing = output.one_line(f"model export: {to} of {directory.name}{compared}")
    with stage_if_slow(doing):
        made = make_model([f"--run-directory={directory}", *words])
    return output.answer(_description(made), json=json, **made)


@group.command()
def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hugging Face model folder, or model id (ORG/NAME) in the cache.")
    ],
    to: Annotated[
        QuantizedFormat, typer.Option("--to", help="Format of the weights; mlx-4bit and mlx-8bit are affine.")
    ],
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Values that share a scale: 32, 64 or 128 for mlx-4bit and mlx-8bit [64].", show_default=False
        ),
    ] = None,
    output_folder: Annotated[
        Path | None, typer.Option("--output", help="Folder to make [MODEL-FORMAT].", show_default=False)
    ] = None,
    json: Json = False,
) -> int:
    """Make a quantized copy of a model in MLX's format. Nodes with torch and with MLX can train adapters on it (QLoRA).
    It needs mlx-lm, and never overwrites a folder."""
    given = {"--to": to, "--group-size": group_size, "--output": output_folder}
    words = [f"{option}={value}" for option, value in given.items() if value is not None]
    with stage_if_slow(output.one_line(f"model quantize: {model} to {to}")):
        made = make_model([*words, "--", model], "trainctl.trainer.exports.quantize_model")
    text = f"{made['folder']}: {to}, groups of {made['group_size']}, {made['bytes']:,} bytes\n"
    text += f'to train on it, set in the run file: model.path = {dumps(made["folder"])}, adapter.kind = "lora"'
    return output.answer(text, json=json, **made)


EXPORT_MODEL = "trainctl.trainer.exports.export_model"
"""Module that exports a run's trained model."""


def make_model(words: list[str], module: str = EXPORT_MODEL) -> dict[str, Any]:
    """Return what the trainer made. Raises TrainctlError with what it said."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        name, reason = module.rpartition(".")[2], said[-1] if said else "no reason given"
        raise TrainctlError(f"{name} ended with status {done.returncode}: {reason}")
    answer: dict[str, Any] = json.loads(lines[-1])
    if done.returncode == InvalidInputError.exit_code:
        raise InvalidInputError(answer["where"], answer["problem"])
    if done.returncode == RefusedError.exit_code:
        raise RefusedError(answer["problem"])
    if done.returncode:
        raise TrainctlError(answer["problem"])
    return answer


def _description(made: dict[str, Any]) -> str:
    """Return what was made, and how to use it, as lines."""
    weights = f", {made['dtype']}" if made["dtype"] and made["form"] != "mlx-4bit" else ""
    lines = [f"{made['folder']}: {made['form']} of step {made['step']:,}{weights}, {made['bytes']:,} bytes"]
    if made["not_verified"]:
        lines.append(f"not verified: {made['not_verified']}")
    if made["difference"] is not None:
        lines.append(f"verified: logits differ by at most {made['difference']:.1e} (allowed: {made['tolerance']:.1e})")
    if made["rounding"] is not None:
        lines.append(
            f"rounded to {made['dtype']}: logits differ from those of the trained model by {made['rounding']:.1e}"
        )
    if made["library"] is not None:
        lines.append(f"mlx-lm computes this family unlike transformers: its logits differ by {made['library']:.1e}")
    if made["warning"]:
        lines.append(f"warning: {made['warning']}")
    lines += ["to load it:", *(f"    {line}" for line in made["load"])]
    if made["llama_cpp"]:
        lines += ["for llama.cpp, by its own programs:", *(f"    {line}" for line in made["llama_cpp"])]
    return "\n".join(lines)
