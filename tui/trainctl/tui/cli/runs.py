"""Runs by what a person calls them: their directories on this machine, and the agents that know them. `ls` lists them,
`runs rename` and `runs remove` change them.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from trainctl.protocol.client import local_agents
from trainctl.protocol.config.names import NAME_PATTERN, state_root
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError, UnreachableError
from trainctl.protocol.messages import ACTIVE_RUN_STATES, EditRun, RunsRequest, RunSummary, SnapshotRequest, verbs
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.security import received_names
from trainctl.tui.cli import agent_call, output, tables
from trainctl.tui.cli.options import (
    COMPLETION_SECONDS,
    ClusterFile,
    Connect,
    Json,
    agents_of,
    subcommands,
    subgroup,
    where,
)
from trainctl.tui.demo.folder import default_folder
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


@dataclass(frozen=True)
class RunAt:
    """An agent, and the run that it is asked about; None: the active run, or the newest."""

    address: str
    run: str | None


def at_agent(ctx: typer.Context, connect: str | None, cluster: Path | None, run: str | None = None) -> RunAt:
    """Return the agent to connect to, and the id of `run`: its lead, or that of the only active run. Raises
    UnreachableError if no agent in the cluster answers, and InvalidInputError if it isn't clear which run is meant."""
    addresses = where(ctx, connect, cluster).addresses
    run = id_at(addresses, run)
    return RunAt(agent_call.find_agent(addresses, run), run)


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
    """Find a run as `find` does; None for an id that no local folder has: an agent may know that run.

    Raises InvalidInputError for a path that is not a run directory.
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
            if is_path or not os.environ.get("TRAINCTL_CONNECT"):
                raise
    at = at_agent(ctx, connect, cluster, run)
    rows = agent_call.call(at.address, lambda client: client.ask(RunsRequest), lead=True).runs
    row = next((row for row in rows if row.run == at.run), None)
    if row is None:
        raise InvalidInputError(run, f"no run with that id at {at.address}; trainctl ls lists its runs")
    directory = directory_of(row)
    if directory is None or not RunPaths(directory).record.is_file():
        raise InvalidInputError(run, f"its record is on {row.lead or at.address}, and this reads it here: run it there")
    return directory


@contextlib.contextmanager
def record_of(ctx: typer.Context, run: str, connect: str | None, cluster: Path | None) -> Iterator[Path]:
    """Yield a folder with the record of the run that is meant: its directory if that is on this machine, else one with
    a copy from the agent that led it last, which is removed afterwards. Raises InvalidInputError for a path that is no
    run directory, and what the client does."""
    directory = find_here(run) if connect is None and cluster is None else None
    if directory is not None:
        yield directory
        return
    try:
        at = at_agent(ctx, connect, cluster, run)
        rows = agent_call.call(at.address, lambda client: client.ask(RunsRequest)).runs
    except UnreachableError:
        if not (connect or cluster or os.environ.get("TRAINCTL_CONNECT")):
            find(run)  # says which folders were searched
        raise
    own = next((directory_of(row) for row in rows if row.run == at.run), None)
    if own is not None and RunPaths(own).record.is_file():
        yield own
        return
    from trainctl.protocol.client.downloads import COPY_SECONDS, download_record

    with tempfile.TemporaryDirectory(prefix="trainctl-record-") as folder:
        with output.stage_if_slow(output.one_line(f"copying the record of {at.run} from {at.address}")):
            copy = agent_call.call(
                at.address,
                lambda client: download_record(client, at.run, Path(folder)),
                answer_seconds=COPY_SECONDS,
            )
        yield copy


def directory_of(row: RunSummary) -> Path | None:
    """Return the directory that an agent names if its name is the run's ID, for the agent may be another machine's.
    Raises InvalidInputError for a link."""
    path = Path(row.directory)
    return received_names.below(path.parent, row.run) if path.is_absolute() and path.name == row.run else None


@app.command(name="ls")
def list_runs(ctx: typer.Context, connect: Connect = None, cluster: ClusterFile = None, json: Json = False) -> int:
    """List the runs that the agents know, newest first, with the space that each takes on their disks."""
    addresses = where(ctx, connect, cluster).addresses
    if len(addresses) == 1:
        peers = agent_call.call(addresses[0], lambda client: client.ask(SnapshotRequest, 0)).peers
        addresses = (*addresses, *(peer.address for peer in peers if peer.state != "unknown"))
    runs = agent_call.all_runs(addresses)
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
    if name == LAST:
        raise InvalidInputError(name, "means the newest run: give another name")
    if not re.match(NAME_PATTERN, name):
        raise InvalidInputError(name, "a name has at most 64 lower-case letters, digits, dots, dashes and underscores")
    addresses = where(ctx, connect, cluster).addresses
    row = _summary_of(addresses, run)
    _on_all(addresses, row, lambda client: client.ask(EditRun, row.run, name))
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
    row = _summary_of(addresses, run)
    if row.state in ACTIVE_RUN_STATES:
        raise RefusedError(f"{row.run} is {row.state}: stop it first with trainctl send stop --run {row.run}")
    if not yes:
        if json or not sys.stdin.isatty():
            raise InvalidInputError("--yes", f"removing {row.run} can't be undone: confirm it with --yes")
        question = f"Remove {row.run} ({row.state} at step {row.step:,}), and free {space(row.size_bytes)}?"
        typer.confirm(question, abort=True, err=True)
    freed = sum(edited.freed_bytes for edited in _on_all(addresses, row, lambda client: client.ask(EditRun, row.run)))
    return output.answer(f"removed {row.run}: freed {space(freed)}", json=json, run=row.run, freed_bytes=freed)


def _summary_of(addresses: tuple[str, ...], run: str) -> RunSummary:
    rows = agent_call.all_runs(addresses)
    meant = match(Path(run).name, {row.run: row.name for row in reversed(rows)})
    row = next((each for each in rows if each.run == meant), None)
    if row is None:
        raise InvalidInputError(run, "no agent knows a run of that name; trainctl ls lists all")
    return row


def _on_all(addresses: tuple[str, ...], row: RunSummary, change: "Callable[[Client], Awaitable[T]]") -> list[T]:
    """Return what `change` gives at each agent that answers and has the run, and name those that don't answer. Raises
    RefusedError naming those where it failed."""
    done, failed = list[T](), list[str]()
    for address in addresses:
        try:
            rows = agent_call.call(address, lambda client: client.ask(RunsRequest)).runs
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
