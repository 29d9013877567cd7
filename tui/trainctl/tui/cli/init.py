"""The subcommands for a beginning: `init` writes a cluster file and a run file, `config` prints the full screen's
settings, `schema` the JSON Schema of a TOML file, and `help` pages of the documentation.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from trainctl.protocol.client import local_agents
from trainctl.protocol.config.objectives import ObjectiveName
from trainctl.protocol.errors import InvalidInputError, NotCachedError
from trainctl.tui.cli import output, tables
from trainctl.tui.cli.options import Config, Json, subcommands
from trainctl.tui.setup import installed

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
        ObjectiveName | None,
        typer.Option(
            help="Learn every token (pretrain), the answers (sft), or to prefer answers, near a reference (dpo) or"
            " without one (orpo, simpo) [text: pretrain; rows: sft; pairs: dpo]. Encoder-decoder models learn seq2seq."
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
        str | None, typer.Option(metavar="ADDRESS", help="Address this machine's agent listens on [its Unix socket].")
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
    from trainctl.tui.setup import init_work as work
    from trainctl.tui.setup import offers

    if steps is not None and minutes is not None:
        raise InvalidInputError("--minutes", "--steps says how long the run is: leave one of them out")
    given = work.InitOptions(model, data, name, steps, minutes, batch, address, adapter, objective)
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not json
    ask = _ask if asks else None
    try:
        done = work.write(given, run_file, cluster_file, ask)
    except NotCachedError as missing:
        offers.offer_download(missing, may_ask=not json, tell=output.tell)
        done = work.write(replace(given, model=Path(missing.model)), run_file, cluster_file, ask)
    if json:
        output.emit_ok(
            written=[str(file) for file in done.written], kept=done.kept and str(done.kept), remarks=done.remarks
        )
        return 0
    for file in done.written:
        output.say(f"wrote {file}")
    for line in done.remarks:
        output.tell(line)
    agent = "" if local_agents.running() else "run trainctl-agent run in another terminal, then "
    output.tell(f"next: {agent}trainctl run {run_file} --follow")
    return 0


def _ask(question: str, default: str) -> str:
    try:
        answer: str = typer.prompt(question, default=default or None, err=True)
    except UnicodeDecodeError:
        raise InvalidInputError(question, "is not UTF-8 text") from None
    return answer.strip()


@app.command()
def config(config: Config = None, json: Json = False) -> int:
    """Print the full screen's effective settings in config.toml format, and report errors in the file."""
    from trainctl.tui.app import keymap, launch  # Textual: not for `--help`

    found = launch.configuration(config)
    code = InvalidInputError.exit_code if found.problems else 0
    if json:
        problems = [{"line": at.line, "column": at.column, "text": at.text} for at in found.problems]
        keys = {row.name: row.keys.replace(" ", ",") for row in keymap.rows(found.settings.keys)}
        own = {name: None if value == "auto" else value for name, value in msgspec.to_builtins(found.settings).items()}
        own["keys"] = keys
        output.emit({"ok": not code, "path": str(found.path), "exists": found.exists, "problems": problems, **own})
        return code
    output.say(launch.as_file(found))
    for problem in found.problems:
        output.complain(str(problem))
    return code


@app.command()
def schema(
    file: Annotated[
        Literal["run", "cluster", "config"], typer.Argument(help="Whose schema: run.toml, cluster.toml or config.toml.")
    ],
) -> int:
    """Print the JSON Schema of a TOML file, by which editors complete and check it. Works offline."""
    output.say(installed.schema(file).read_text("utf-8").rstrip())
    return 0


def _topics(incomplete: str) -> list[str]:
    return [topic for topic in installed.pages() if topic.startswith(incomplete)]


@app.command(name="help")
def show(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC]", show_default=False, autocompletion=_topics, help="The topic to print."),
    ] = None,
) -> int:
    """Print a documentation page, or list the topics. Works offline."""
    pages = installed.pages()
    if topic is None:
        output.say(tables.table(("topic", "about"), [(page.topic, page.about) for page in pages.values()]))
        return 0
    if topic not in pages:
        raise InvalidInputError("TOPIC", f"no topic {topic!r}; the topics are {', '.join(pages)}")
    output.say(pages[topic].path.read_text("utf-8").rstrip())
    return 0
