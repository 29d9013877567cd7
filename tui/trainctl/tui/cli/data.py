"""`trainctl data`: what a run would train on."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from trainctl.protocol.batch.data_statistics import DataStatistics, ShownSample
from trainctl.protocol.config.names import node_name
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.cli import output
from trainctl.tui.cli.options import Json, Set, subcommands, subgroup
from trainctl.tui.commands import arguments

app = subcommands()
group = subgroup("Look at what a run would train on.")
app.add_typer(group, name="data")

_COUNTED, _CONTEXT, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


@group.command()
def preview(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False)],
    samples: Annotated[int, typer.Option("--samples", "-n", min=0, max=1000, help="Samples to print.")] = 3,
    node: Annotated[
        str | None, typer.Option(metavar="NODE", help="Use this node's paths [this machine's].", show_default=False)
    ] = None,
    set_: Set = None,
    json: Json = False,
) -> int:
    """Print statistics of a run's data, and its first samples with the tokens that count in the loss."""
    overrides = arguments.pairs(set_ or [], "--set")
    changed = [f"--set={key}={value}" for key, value in overrides.items()]
    done = subprocess.run(
        [
            sys.executable, "-m", "trainctl.trainer.data.preview", str(file), "--node", node or node_name(),
            "--samples", str(samples), *changed,
        ], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        place, _, problem = (lines[-1] if lines else f"preview: ended with {done.returncode}").partition(": ")
        raise InvalidInputError(place, problem)
    found = msgspec.json.decode(done.stdout, type=DataStatistics)
    if json:
        output.emit_ok(**msgspec.to_builtins(found))
        return 0
    for line in statistics_lines(found):
        output.say(line)
    for sample in found.shown:
        output.say(f"\n{output.one_line(sample.place)}")
        output.say(sample_text(sample, color=output.has_color()))
    return 0


def statistics_lines(found: DataStatistics) -> list[str]:
    """One fact per line."""
    whole = ", ".join(f"{'longest' if name == 'p100' else name} {value:,}" for name, value in found.lengths.items())
    return [
        f"samples     {found.samples:,}, of which {found.held_out:,} are held out",
        f"tokens      {found.tokens:,}; {found.counted:,} count in the loss ({found.counted / found.tokens:.1%})",
        f"lengths     {whole} tokens; sequence_length {found.sequence_length:,}",
        f"truncated   {found.truncated:,} samples ({found.truncated / found.samples:.1%})",
        f"not used    {found.skipped:,} more samples",
        f"duplicates  {found.duplicates:,} samples",
        f"padding     {found.padding:.1%} of a micro-batch of {found.micro_batch}",
    ]


def sample_text(sample: ShownSample, *, color: bool) -> str:
    """The sample's text. What counts is green, or without colours between » and «."""
    begin, end = (_COUNTED, _PLAIN + _CONTEXT) if color else ("»", "«")
    text, before = _CONTEXT if color else "", False
    for piece, counted in sample.tokens:
        text += (begin if counted else end) if counted != before else ""
        text += output.log_text(piece, raw=False)
        before = counted
    return text + (end if before else "") + (_PLAIN if color else "")
