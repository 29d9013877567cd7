"""The subcommands over the runs that agents keep: `ls` lists them, `runs rename` and `runs remove` change them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.tui.cli import agent_call, output, run_lookup, tables
from trainctl.tui.cli.options import ClusterFile, Connect, Json, subcommands, subgroup, where
from trainctl.tui.cli.run_lookup import RunArgument
from trainctl.tui.text.formatting import space

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from trainctl.protocol.client.client import Client

app = subcommands()
T = TypeVar("T")
CHANGE_SECONDS = 300.0
"""Seconds that an agent may take to remove a run's files."""
group = subgroup("Rename and remove runs.")
app.add_typer(group, name="runs")


@app.command(name="ls")
def list_runs(ctx: typer.Context, connect: Connect = None, cluster: ClusterFile = None, json: Json = False) -> int:
    """List the runs that the agents know, newest first, with the space that each takes on their disks."""
    at = where(ctx, connect, cluster)
    runs = agent_call.all_runs(at.addresses)
    text = tables.runs_table(runs) if runs else ""
    return output.answer(text, json=json, none="no runs yet; start one with trainctl run RUN.toml", runs=runs)


@group.command()
def rename(
    ctx: typer.Context,
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Its new name.")],
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Give a run another name, by which all commands find it. Its id stays."""
    if name == run_lookup.LAST:
        raise InvalidInputError(name, "means the newest run: give another name")
    addresses = where(ctx, connect, cluster).addresses
    row = _find(addresses, run)
    _on_all(addresses, row, lambda client: client.rename_run(row.run, name))
    return output.answer(f"{row.run} is named {name}", json=json, run=row.run, name=name)


@group.command()
def remove(
    ctx: typer.Context,
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Remove a run that has ended, with its record, checkpoints and logs, from the disks of all nodes that answer."""
    addresses = where(ctx, connect, cluster).addresses
    row = _find(addresses, run)
    if row.state in m.ACTIVE_RUN_STATES:
        raise RefusedError(f"{row.run} is {row.state}: stop it first with trainctl send stop --run {row.run}")
    if not yes:
        if json or not sys.stdin.isatty():
            raise InvalidInputError("--yes", f"removing {row.run} can't be undone: confirm it with --yes")
        question = f"Remove {row.run} ({row.state} at step {row.step:,}), and free {space(row.size_bytes)}?"
        typer.confirm(question, abort=True, err=True)
    freed = sum(_on_all(addresses, row, lambda client: client.remove_run(row.run)))
    return output.answer(f"removed {row.run}: freed {space(freed)}", json=json, run=row.run, freed_bytes=freed)


def _find(addresses: tuple[str, ...], run: str) -> m.RunSummary:
    rows = agent_call.all_runs(addresses)
    meant = run_lookup.match(Path(run).name, {row.run: row.name for row in reversed(rows)})
    row = next((each for each in rows if each.run == meant), None)
    if row is None:
        raise InvalidInputError(run, "no agent knows a run of that name; trainctl ls lists all")
    return row


def _on_all(addresses: tuple[str, ...], row: m.RunSummary, change: "Callable[[Client], Awaitable[T]]") -> list[T]:
    """Return what `change` gives at each agent that answers and has the run, and name those that don't answer. Raises
    RefusedError naming those where it failed."""
    done, failed = list[T](), list[str]()
    for address in addresses:
        try:
            rows = agent_call.call(address, lambda client: client.runs()).runs
        except TrainctlError as error:
            output.tell(f"not changed there: {error}")
            continue
        try:
            if any(own.run == row.run for own in rows):
                done.append(agent_call.call(address, change, answer_seconds=CHANGE_SECONDS))
        except TrainctlError as error:
            failed.append(f"{address}: {error}")
    if failed:
        raise RefusedError(f"{row.run} is unchanged on {len(failed)} of {len(addresses)} nodes: {'; '.join(failed)}")
    return done
