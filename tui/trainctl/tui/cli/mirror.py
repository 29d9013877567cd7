"""The subcommand that copies a run for other programs' viewers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.security import received_names
from trainctl.tui.cli import output, run_lookup
from trainctl.tui.cli.options import ClusterFile, Connect, RunArgument, subcommands

if TYPE_CHECKING:
    from trainctl.tui.export.mirror.run_source import RunSource

app = subcommands()
To = Literal["tensorboard", "wandb"]
DEFAULT_PROJECT = "trainctl"


@app.command()
def mirror(
    ctx: typer.Context,
    run: RunArgument,
    to: Annotated[To, typer.Option("--to", help="Viewer to write for; needs the extra with that name.")],
    output_folder: Annotated[
        Path,
        typer.Option("--output", help="Output folder; each run gets its own subfolder.", show_default=True),
    ] = Path("mirrors"),
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep copying until the run ends or Ctrl-C.")] = False,
    project: Annotated[str | None, typer.Option(help=f"W&B project [{DEFAULT_PROJECT}].", show_default=False)] = None,
    offline: Annotated[bool, typer.Option("--offline", help="With wandb: write a folder and upload nothing.")] = False,
    connect: Connect = None,
    cluster: ClusterFile = None,
) -> int:
    """Copy a run to TensorBoard or W&B. Reads the run's directory, or asks an agent with --connect or if the run isn't
    on this machine. The run isn't changed. Calling it again continues where it stopped."""
    from trainctl.tui.export.mirror import session

    if to != "wandb" and (project is not None or offline):
        raise InvalidInputError(
            "--project" if project is not None else "--offline", "applies only to --to wandb: remove it"
        )
    with _source(ctx, run, connect, cluster) as source:
        folder = received_names.below(output_folder, source.run)
        wanted = session.MirrorOptions(to, folder, follow, project or DEFAULT_PROJECT, offline, output.tell)
        place = session.run(source, wanted)
    output.tell(f"{folder}: mirrored to step {place.step:,}")
    return 0


@contextlib.contextmanager
def _source(ctx: typer.Context, run: str, connect: str | None, cluster: Path | None) -> Iterator["RunSource"]:
    from trainctl.protocol.client.blocking import BlockingClient
    from trainctl.tui.export.mirror.run_source import AgentSource, DirectorySource

    directory = run_lookup.find_here(run) if connect is None and cluster is None else None
    if directory is not None:
        with contextlib.closing(DirectorySource(directory)) as source:
            yield source
        return
    at = run_lookup.at_agent(ctx, connect, cluster, run)
    with BlockingClient(at.address) as client:
        yield AgentSource(client, at.run or run)
