"""The subcommands that prepare a first run: `init` writes a cluster file and a run file to start from, `quantize` makes
a quantized copy of a model."""

import sys
from contextlib import nullcontext
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainctl.protocol.client import local_agents
from trainctl.protocol.config.quantization import QuantizedFormat
from trainctl.protocol.errors import InvalidInputError, NotCachedError
from trainctl.tui.cli import output
from trainctl.tui.cli.options import Json, subcommands
from trainctl.tui.demo.stages import stage

app = subcommands()


@app.command()
def init(
    model: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Hugging Face model folder, or model id (ORG/NAME) in the local cache."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Training data, a file or a folder: *.txt, *.jsonl or *.parquet."),
    ] = None,
    objective: Annotated[
        Literal["pretrain", "sft", "dpo", "orpo", "seq2seq"] | None,
        typer.Option(
            help="Learn every token (pretrain), the answers (sft), or to prefer answers, near a reference (dpo) or"
            " without one (orpo) [text: pretrain; rows: sft; pairs: dpo]. Encoder-decoder models learn seq2seq."
        ),
    ] = None,
    adapter: Annotated[
        Literal["full", "lora", "rslora"] | None,
        typer.Option(help="Train all weights (full) or adapters (lora, rslora) [lora unless pretrain]."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Run name [taken from the model folder].")] = None,
    steps: Annotated[int | None, typer.Option(min=1, max=2**40, help="Steps to train [1 to 3 epochs].")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.1, max=10**5, help="Train the steps that fit this time, by some passes timed here."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=2**40, help="Samples per step across all nodes [16,384 tokens].")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Address this machine's agent listens on [its Unix socket]."),
    ] = None,
    run_file: Annotated[Path, typer.Option(metavar="FILE", help="Run file to write.")] = Path("run.toml"),
    cluster_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Cluster file to write [where agents look for it]. An existing file is kept."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Create a starter run.toml, and with a TCP address also a cluster.toml. On a terminal, it asks for missing
    options. It never overwrites a file. The run file passes `trainctl check`. On a terminal, it offers to download a
    model id that isn't in the cache.
    """
    from trainctl.tui.setup import hub_download
    from trainctl.tui.setup import init_work as work

    if steps is not None and minutes is not None:
        raise InvalidInputError("--minutes", "--steps says how long the run is: leave one of them out")
    given = work.Given(model, data, name, steps, minutes, batch, address, adapter, objective)
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not json
    ask = _ask if asks else None
    try:
        done = work.write(given, run_file, cluster_file, ask)
    except NotCachedError as missing:
        hub_download.offer(missing, may_ask=not json, tell=output.tell)
        done = work.write(given._replace(model=Path(missing.model)), run_file, cluster_file, ask)
    if json:
        output.emit_ok(written=[str(file) for file in done.written], kept=done.kept and str(done.kept),
                       remarks=done.remarks)  # fmt: skip
        return 0
    for file in done.written:
        output.say(f"wrote {file}")
    for line in done.remarks:
        output.tell(line)
    agent = "" if local_agents.running() else "run trainctl-agent run in another terminal, then "
    output.tell(f"next: {agent}trainctl run {run_file} --follow")
    return 0


@app.command()
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
    from trainctl.tui.export.model_export import make

    given = {"--to": to, "--group-size": group_size, "--output": output_folder}
    words = [f"{option}={value}" for option, value in given.items() if value is not None]
    seen = stage(output.one_line(f"quantize: {model} to {to}")) if sys.stderr.isatty() else nullcontext()
    with seen:
        made = make([*words, "--", model], "trainctl.trainer.exports.quantize_model")
    text = f"{made['folder']}: {to}, groups of {made['group_size']}, {made['bytes']:,} bytes\n"
    text += f'to train on it, set in the run file: model.path = {dumps(made["folder"])}, adapter.kind = "lora"'
    return output.answer(text, json=json, **made)


def _ask(question: str, default: str) -> str:
    try:
        answer: str = typer.prompt(question, default=default or None, err=True)
    except UnicodeDecodeError:
        raise InvalidInputError(question, "is not UTF-8 text") from None
    return answer.strip()
