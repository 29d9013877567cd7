"""The subcommands that write a run for other programs: `export` as a table, `mirror` for viewers, and `score`, what its
model says about rows."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import WorkView
from trainctl.protocol.security import received_names
from trainctl.tui.cli import agent_call, output, runs
from trainctl.tui.cli.options import ClusterFile, Connect, subcommands
from trainctl.tui.cli.runs import RunArgument

if TYPE_CHECKING:
    from trainctl.tui.export.mirror.run_source import RunSource

app = subcommands()
Format = Literal["csv", "jsonl", "parquet"]
MirrorTo = Literal["tensorboard", "wandb"]
DEFAULT_PROJECT = "trainctl"
What = Literal["steps", "ranks", "metrics", "evaluations", "samples", "events", "hosts"]


@app.command()
def export(
    ctx: typer.Context,
    run: RunArgument,
    format: Annotated[  # noqa: A002
        Format, typer.Option("--format", help="File format; parquet needs the extra with that name.")
    ] = "csv",
    what: Annotated[
        What, typer.Option(help="Rows to write; ranks: each rank's part of each step; hosts: machine readings.")
    ] = "steps",
    output_file: Annotated[
        Path | None, typer.Option("--output", help="File to write [standard output].", show_default=False)
    ] = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
) -> int:
    """Export a run as a table. Reads the run's record in its directory, or a copy of it from an agent with --connect or
    if the run isn't on this machine."""
    from trainctl.tui.export.rows import of_record
    from trainctl.tui.export.writers import destination, open_writer

    if format == "parquet" and output_file is None:
        raise InvalidInputError("--output", "parquet can't go to standard output: name a file")
    with runs.record_of(ctx, run, connect, cluster) as directory, destination(output_file) as stream:
        writer = open_writer(format, what, stream)
        count = 0
        for rows in of_record(directory, what):
            writer.write(rows)
            count += len(rows)
        writer.close()
    if output_file is not None:
        output.tell(f"{output_file}: {count:,} rows")
    return 0


@app.command()
def mirror(
    ctx: typer.Context,
    run: RunArgument,
    to: Annotated[MirrorTo, typer.Option("--to", help="Viewer to write for; needs the extra with that name.")],
    output_folder: Annotated[
        Path, typer.Option("--output", help="Output folder; each run gets its own subfolder.", show_default=True)
    ] = Path("mirrors"),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep copying until the run ends or Ctrl-C.")] = False,
    project: Annotated[str | None, typer.Option(help=f"W&B project [{DEFAULT_PROJECT}].", show_default=False)] = None,
    offline: Annotated[bool, typer.Option("--offline", help="With wandb: write a folder and upload nothing.")] = False,
    connect: Connect = None,
    cluster: ClusterFile = None,
) -> int:
    """Copy a run to TensorBoard or W&B. Reads the run's record in its directory, or a copy of it from an agent with
    --connect or if the run isn't on this machine; with --follow it asks that agent for what is new. The run isn't
    changed. Calling it again continues where it stopped."""
    from trainctl.tui.export.mirror import session

    if to != "wandb" and (project is not None or offline):
        raise InvalidInputError(
            "--project" if project is not None else "--offline", "applies only to --to wandb: remove it"
        )
    with _mirror_source(ctx, run, connect, cluster, follow=follow) as source:
        folder = received_names.below(output_folder, source.run)
        wanted = session.MirrorOptions(to, folder, follow, project or DEFAULT_PROJECT, offline, output.tell)
        if follow:
            output.tell(f"{folder}: copying {source.run} until it ends; Ctrl-C stops the copying")
        place = session.run(source, wanted)
    output.tell(f"{folder}: mirrored to step {place.step:,}")
    return 0


@contextlib.contextmanager
def _mirror_source(
    ctx: typer.Context, run: str, connect: str | None, cluster: Path | None, *, follow: bool
) -> Iterator["RunSource"]:
    """Yield the record, or an agent whose new steps are followed: a copy of a long record every 2 s would cost too
    much."""
    from trainctl.protocol.client.blocking import BlockingClient
    from trainctl.tui.export.mirror.run_source import AgentSource, DirectorySource

    is_here = connect is None and cluster is None and runs.find_here(run) is not None
    if is_here or not follow:
        with (
            runs.record_of(ctx, run, connect, cluster) as directory,
            contextlib.closing(DirectorySource(directory)) as source,
        ):
            yield source
        return
    at = runs.at_agent(ctx, connect, cluster, run)
    with BlockingClient(at.address) as client:
        yield AgentSource(client, at.run or run)


@app.command()
def score(
    ctx: typer.Context,
    run: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL file with rows as for training.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint [newest].", show_default=False)
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Use the checkpoint with the lowest held-out loss.")] = False,
    answers: Annotated[bool, typer.Option("--answers", help="Write the model's answer to each row's prompt.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens per answer [128].", show_default=False)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Randomness; 0 is the likeliest token [0].", show_default=False)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens of this total probability [1].", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers [0].", show_default=False)] = None,
    use_generation_config: Annotated[
        bool, typer.Option("--use-generation-config", help="Apply the model's generation_config.json too; torch only.")
    ] = False,
    nodes: Annotated[
        str | None, typer.Option(metavar="NODE,...", help="Nodes that take part [all of the run].", show_default=False)
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", help="File to write [standard output].", show_default=False)
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Continue work whose agent was unreachable.", show_default=False)
    ] = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
) -> int:
    """Compute log-probabilities of a file's rows, or answers to them, with a run's model on all nodes of the run.

    Each node takes the next rows when it is ready. The output has one line per row, in the order of the file."""
    from trainctl.tui.export import row_scores
    from trainctl.tui.export.writers import destination

    if step is not None and best:
        raise InvalidInputError("--best", "can't be combined with --step: give only one")
    chosen = tuple(name for name in (nodes or "").split(",") if name)
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    given["use_generation_config"] = use_generation_config or None
    options = row_scores.answer_options(given, answers=answers)
    rows = row_scores.read_file(file, prompts=answers)
    at = runs.at_agent(ctx, connect, cluster, Path(run).name)
    run_id = at.run or run
    wanted = row_scores.ScoreRequest(resume or row_scores.new_id(), run_id, step, best, chosen, options)
    shown = _Progress(f"score {wanted.work}: {rows.rows:,} rows of {file.name} with {run_id}")
    with destination(output_file) as stream, shown:
        failed = agent_call.call(
            at.address, lambda client: row_scores.Scoring(client, rows, wanted, stream, shown.show).run()
        )
    if failed:
        output.complain(row_scores.lacking(failed, rows.rows))
        return RefusedError.exit_code
    return 0


class _Progress:
    """The state of separate work on standard error: one line that changes on a terminal, else a line at the start."""

    def __init__(self, title: str) -> None:
        output.tell(title)
        self._is_terminal, self._shown = sys.stderr.isatty(), False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\n")

    def show(self, view: WorkView) -> None:
        if self._is_terminal:
            from trainctl.tui.export.row_scores import progress_line

            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r" + output.one_line(progress_line(view))[:width].ljust(width))
            sys.stderr.flush()
            self._shown = True
