"""Run directories on this machine: by their path, or by the run's id in any node's folder."""

import contextlib
import os
from pathlib import Path

import typer

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths, runs_directory, state_root
from trainctl.protocol.security import received_names
from trainctl.tui.cli import agent_call
from trainctl.tui.cli.options import address_of


def find(given: str, root: Path | None = None) -> Path:
    """Find a run directory by path or run id. Raises InvalidInputError with the folders it searched."""
    path = Path(given)
    if path.name == "record.db" and path.is_file():
        return path.parent.absolute()
    if path.is_dir():
        if RunPaths(path).record.is_file():
            return path.absolute()
        raise InvalidInputError(given, "not a run directory: it has no record.db; trainctl ls lists runs")
    if "/" in given:
        raise InvalidInputError(given, "no such run directory: check the path")
    folder = root or state_root()
    found = [runs_directory(node) / given for node in _nodes(folder)]
    there = [run for run in found if RunPaths(run).record.is_file()]
    if not there:
        raise InvalidInputError(given, f"no such run directory, and no run with that id in {folder}")
    # Of several nodes of this machine, the one that conducted it has the most in its record.
    return max(there, key=lambda run: RunPaths(run).record.stat().st_size)


def find_here(given: str) -> Path | None:
    """Like `find`, but None for an id that no local folder has: an agent may know that run. Raises InvalidInputError
    for a path that is not a run directory.
    """
    if "/" in given or Path(given).exists():
        return find(given)
    with contextlib.suppress(InvalidInputError):
        return find(given)
    return None


def find_or_ask(ctx: typer.Context, run: str) -> Path:
    """The run directory that is meant: by its path, by the id in this user's folders, or by the id at the agent that
    was named, if what that has is on this machine."""
    try:
        return find(run)
    except InvalidInputError:
        named = os.environ.get("TRAINCTL_CONNECT") or ctx.find_root().params.get("connect")
        if "/" in run or not named:
            raise
        known = agent_call.call(address_of(ctx, None, None), lambda client: client.runs(), lead=True).runs
        there = next((directory_of(one) for one in known if one.run == run), None)
        if there is None or not RunPaths(there).record.is_file():
            raise
        return there


def directory_of(row: m.RunSummary) -> Path | None:
    """Return the directory that an agent names if its name is the run's ID, for the agent may be another machine's.
    Raises InvalidInputError for a link."""
    path = Path(row.directory)
    return received_names.below(path.parent, row.run) if path.is_absolute() and path.name == row.run else None


def _nodes(folder: Path) -> list[Path]:
    try:
        return sorted(node for node in folder.iterdir() if node.is_dir())
    except OSError:
        return []
