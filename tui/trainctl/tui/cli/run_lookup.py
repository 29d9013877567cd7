"""Runs by what a person calls them: their directories on this machine, and the agents that know them."""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from trainctl.protocol import messages as m
from trainctl.protocol.client import local_agents
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import verbs
from trainctl.protocol.record.paths import RunPaths, state_root
from trainctl.protocol.security import received_names
from trainctl.tui.cli import agent_call
from trainctl.tui.cli.options import COMPLETION_SECONDS, agents_of, where
from trainctl.tui.demo.folder import default_folder

LAST: Final = "last"
"""Stands for the newest run."""
_WHOLE_ID = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}\Z")
"""The end of a hosted run's id."""


def complete_runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the runs that begin like this, for the shell."""
    ids = [LAST, *runs_in(local_folders())]
    with contextlib.suppress(TrainctlError):
        ids += [row.run for row in agent_call.all_runs(agents_of(ctx).addresses, COMPLETION_SECONDS)]
    return [run for run in dict.fromkeys(ids) if run.startswith(incomplete)]


_RUN = "its id, the beginning or name of it, or last"
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help=f"A run: {_RUN}; or its directory.", autocompletion=complete_runs)
]
RunAtAgent = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help=f"A run: {_RUN}. Default: the active run, or the newest.", autocompletion=complete_runs
    ),
]
Run = Annotated[
    str | None,
    typer.Option("--run", help=f"A run: {_RUN}. Default: the active run, or the newest.", autocompletion=complete_runs),
]


class RunAt(NamedTuple):
    """An agent, and the run that it is asked about; None: the active run, or the newest."""

    address: str
    run: str | None


def at_agent(ctx: typer.Context, connect: str | None, cluster: Path | None, run: str | None = None) -> RunAt:
    """Return the agent to connect to, and the id of `run`: its lead, or that of the only active run. Raises
    UnreachableError if no agent in the cluster answers, and InvalidInputError if it isn't clear which run is meant."""
    addresses = where(ctx, connect, cluster).addresses
    run = id_at(addresses, run)
    return RunAt(agent_call.find_lead(addresses, run), run)


def id_at(addresses: Sequence[str], run: str | None) -> str | None:
    """Return the id of a run that these agents know, given as `match` takes it. What no run is called is returned as
    it is: the agent says that it has no such run. Raises InvalidInputError if several could be meant."""
    if run is None or _WHOLE_ID.search(run):
        return run
    rows = agent_call.all_runs(addresses)
    return match(run, {row.run: row.name for row in reversed(rows)}) or run


def with_ids(addresses: Sequence[str], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `start-run` with the id of the run that they resume or branch off."""
    named = dict(args)
    if (resume := named.get("resume")) is not None:
        named["resume"] = id_at(addresses, resume)
    if (branch := named.get("branch")) is not None:
        run, _ = verbs.branch_point(branch)
        named["branch"] = f"{id_at(addresses, run)}{branch.removeprefix(run)}"
    return named


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
    here = runs_in([folder] if root is not None else local_folders())
    if given not in here:
        given = match(given, {run: RunPaths(directory).given_name for run, directory in here.items()}) or given
    if given not in here:
        raise InvalidInputError(given, f"no such run directory, and no run with that id in {folder}")
    return here[given]


def local_folders() -> list[Path]:
    """Return the state folders of this user, of the agents that run here, and of the demos."""
    running = (Path(agent.state) for agents in local_agents.running() for agent in agents if agent.state)
    return [*dict.fromkeys((state_root(), *running, *default_folder().glob("demo-*/state")))]


def match(given: str, runs: dict[str, str]) -> str | None:
    """Return the id that is meant among the names of runs by their ids, oldest first: the same one, `last`, the newest
    of that name, or the only one that begins like it. Raises InvalidInputError if several begin like it."""
    if given in runs:
        return given
    if given == LAST:
        return next(reversed(runs), None)
    named = [run for run, name in runs.items() if given in (name, run.rsplit("-", 3)[0])]  # NAME-DATE-TIME-LETTERS
    begin = [run for run in runs if given and run.startswith(given)]
    if len(begin) > 1 and not named:
        raise InvalidInputError(given, f"several runs begin like that: {', '.join(begin[-5:])}; give more of its id")
    return next(reversed(named or begin), None)


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


def find_or_ask(ctx: typer.Context, run: str, connect: str | None, cluster: Path | None) -> Path:
    """Return the directory of the run that is meant: by its path; with an agent or a cluster named, by what that knows,
    if its directory is on this machine; else in this user's folders. Raises InvalidInputError."""
    is_path, is_chosen = "/" in run or Path(run).exists(), connect is not None or cluster is not None
    if is_path or not is_chosen:
        try:
            return find(run)
        except InvalidInputError:
            if is_path or not (os.environ.get("TRAINCTL_CONNECT") or ctx.find_root().params.get("connect")):
                raise
    at = at_agent(ctx, connect, cluster, run)
    rows = agent_call.call(at.address, lambda client: client.runs(), lead=True).runs
    row = next((row for row in rows if row.run == at.run), None)
    if row is None:
        raise InvalidInputError(run, f"no run with that id at {at.address}; trainctl ls lists its runs")
    directory = directory_of(row)
    if directory is None or not RunPaths(directory).record.is_file():
        raise InvalidInputError(run, f"its record is on {row.lead or at.address}, and this reads it here: run it there")
    return directory


def directory_of(row: m.RunSummary) -> Path | None:
    """Return the directory that an agent names if its name is the run's ID, for the agent may be another machine's.
    Raises InvalidInputError for a link."""
    path = Path(row.directory)
    return received_names.below(path.parent, row.run) if path.is_absolute() and path.name == row.run else None
