"""Run directories on this machine: by their path, or by a run's id, the beginning of it, or its name."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import typer

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths, state_root
from trainctl.protocol.security import received_names
from trainctl.tui.cli import agent_call
from trainctl.tui.cli.options import address_of
from trainctl.tui.demo.folder import default_folder

LAST: Final = "last"
"""Stands for the newest run."""


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
    folders = [folder] if root is not None else [folder, *default_folder().glob("demo-*/state")]
    here = runs_in(folders)
    return here[match(given, [*here], f"no such run directory, and no run with that id in {folder}")]


def match(given: str, runs: Sequence[str], lacking: str) -> str:
    """Return the id that is meant among `runs`, oldest first: the same one, `last`, the newest of that name, or the
    only one that begins like it. Raises InvalidInputError, with `lacking` if there is none."""
    if given in runs:
        return given
    if given == LAST and runs:
        return runs[-1]
    named = [run for run in runs if run.rsplit("-", 3)[0] == given]  # NAME-DATE-TIME-LETTERS
    begin = [run for run in runs if given and run.startswith(given)]
    if named or len(begin) == 1:
        return (named or begin)[-1]
    if begin:
        raise InvalidInputError(given, f"several runs begin like that: {', '.join(begin[-5:])}; give more of its id")
    raise InvalidInputError(given, lacking)


def runs_in(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the directories of the runs of all nodes' folders in `folders` by their ids, the oldest first.

    Of several nodes of this machine, the one that led a run has the most in its record.
    """
    runs: dict[str, tuple[float, int, Path]] = {}
    for record in (record for folder in folders for record in folder.glob("*/runs/*/record.db")):
        with contextlib.suppress(OSError):
            size, run_file = record.stat().st_size, RunPaths(record.parent).run_file
            known = runs.get(record.parent.name)
            if known is None or size > known[1]:
                begun = (run_file if run_file.exists() else record).stat().st_mtime
                runs[record.parent.name] = begun, size, record.parent
    return {run: path for run, (_, _, path) in sorted(runs.items(), key=lambda item: (item[1][0], item[0]))}


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
