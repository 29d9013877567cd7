"""The subcommands over a run's record: `replay` shows it in the screens, `export` writes it as a table."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths
from trainctl.tui.cli import agent_call, output, run_lookup
from trainctl.tui.cli.options import ClusterFile, Connect, address_of, subcommands
from trainctl.tui.cli.output import has_screen

app = subcommands()
Format = Literal["csv", "jsonl", "parquet"]
What = Literal["steps", "ranks", "metrics", "events", "hosts"]

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or the id of a run on this machine.")]


@app.command()
def replay(
    ctx: typer.Context,
    run: RunArgument,
    speed: Annotated[
        float, typer.Option(min=0.25, max=4096, help="Playback speed; 2 is twice as fast as the run.")
    ] = 8.0,
) -> int:
    """Replay a run in the full screen, from its directory. You can play, pause and seek, but not send commands."""
    directory = _directory(ctx, run)
    if not has_screen():
        raise InvalidInputError(
            "terminal",
            "a replay needs a terminal on standard input, output and error; use trainctl export for its figures",
        )
    from trainctl.tui.replay.replay_app import run_replay  # Textual: only for the full screen

    return run_replay(directory, speed)


def _directory(ctx: typer.Context, run: str) -> Path:
    """The run directory that is meant: by its path, by the id in this user's folders, or by the id at the agent that
    was named, if what that has is on this machine."""
    try:
        return run_lookup.find(run)
    except InvalidInputError:
        named = os.environ.get("TRAINCTL_CONNECT") or ctx.find_root().params.get("connect")
        if "/" in run or not named:
            raise
        known = agent_call.call(address_of(ctx, None, None), lambda client: client.runs(), lead=True).runs
        there = next((Path(one.directory) for one in known if one.run == run), None)
        if there is None or not RunPaths(there).record.is_file():
            raise
        return there


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
    """Export a run as a table. Reads the run's directory, or asks an agent with --connect or if the run isn't on this
    machine."""
    from trainctl.tui.export.rows import of_record
    from trainctl.tui.export.writers import destination, open_writer

    if format == "parquet" and output_file is None:
        raise InvalidInputError("--output", "parquet can't go to standard output: name a file")
    directory = run_lookup.find_here(run) if connect is None and cluster is None else None
    with destination(output_file) as stream:
        writer = open_writer(format, what, stream)
        count = 0
        if directory is not None:
            for rows in of_record(directory, what):
                writer.write(rows)
                count += len(rows)
        else:
            count = agent_call.call(
                address_of(ctx, connect, cluster), lambda client: _through(client, run, what, writer)
            )
        writer.close()
    if output_file is not None:
        output.tell(f"{output_file}: {count:,} rows")
    return 0


async def _through(client: Any, run: str, what: What, writer: Any) -> int:
    from trainctl.tui.export.rows import of_agent

    count = 0
    async for rows in of_agent(client, run, what):
        writer.write(rows)
        count += len(rows)
    return count
