"""Folders of an agent's runs: marks of those that are being made, and facts about the others. A damaged agent.db is
made again from these: no run is lost, and no command is carried out twice."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.records.agent_db import run_column
from trainctl.node_agent.records.keys import DURABLE_KEY, GENERATION_KEY
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.files.durable_files import make_folder
from trainctl.protocol.messages import ACTIVE_RUN_STATES, FINAL_COMMAND_STATES, Event, Generation, RunState, RunView
from trainctl.protocol.messages.events import RunStateChanged
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import UNREADABLE

_STARTING = ".starting-"
"""Prefix of the mark beside a run's folder, made before the folder; it goes once the agent's database knows the run."""
UNKNOWN_DIGEST = ""
"""Stands for the digest of a command's body where only its id is known."""
_PAGE = 500
_ENDED = """
    INSERT INTO commands (id, digest, verb, args, by, run, received_at, ttl_seconds, state, step, reason, ended_at,
      undoes)
    VALUES (?, ?, ?, '{}', ?, ?, ?, 0, ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET run = excluded.run, state = excluded.state, step = excluded.step
"""
_OPEN = "INSERT OR IGNORE INTO commands (id, digest, verb, args, by, run, node, received_at, ttl_seconds, state)"
_OPEN += " VALUES (?, ?, ?, '{}', ?, ?, ?, ?, 0, 'accepted')"


def mark_unstarted(directory: Path) -> None:
    """Call it before the run's directory is made: the next agent removes what one that died has left of it. A disk that
    refuses it will refuse the directory too."""
    with contextlib.suppress(OSError):
        make_folder(directory.parent)
        _mark_of(directory).touch()


def unmark(directory: Path) -> None:
    """The run is known, or nothing is left of it."""
    with contextlib.suppress(OSError):
        _mark_of(directory).unlink()


def remove_unstarted(runs: Path, is_known: Callable[[str], bool]) -> None:
    """Remove marked runs in the folder `runs` that aren't known, and all marks. No run may be opened meanwhile."""
    for mark in [*runs.glob(f"{_STARTING}*")]:
        directory = runs / mark.name.removeprefix(_STARTING)
        if not is_known(directory.name):
            shutil.rmtree(directory, ignore_errors=True)
        unmark(directory)


def _mark_of(directory: Path) -> Path:
    return directory.with_name(f"{_STARTING}{directory.name}")


def add_runs(node: str, runs: Path, connection: sqlite3.Connection) -> None:
    """Add to agent.db what it lacks of the runs in the folder `runs` of this node: themselves, who leads them, their
    commands, and the highest generation."""
    for directory in sorted(path for path in runs.glob("*") if path.is_dir()):
        if _mark_of(directory).exists():
            continue  # it never began
        with contextlib.suppress(*UNREADABLE):
            _add_run(node, RunPaths(directory), connection)


def _add_run(node: str, paths: RunPaths, connection: sqlite3.Connection) -> None:
    run, view, durable, events = paths.directory.name, None, None, list[Event]()
    generations = []
    with contextlib.suppress(TrainctlError), RecordReader(paths) as reader:
        metas = reader.metas()
        with contextlib.suppress(msgspec.MsgspecError):
            view = reader.view()
        with contextlib.suppress(msgspec.MsgspecError, KeyError):
            durable = msgspec.json.decode(metas[DURABLE_KEY], type=Durable)
        with contextlib.suppress(ValueError, TypeError, KeyError):
            generations.append(Generation(*map(int, metas[GENERATION_KEY].split("."))))
        last = reader.last_step()
        generations += [last.generation] if last is not None else []
        events += _command_events(reader)
    generations += [durable.generation] if durable is not None else []
    name, started_at = (view.name, view.started_at) if view is not None else (_name(paths), 0.0)
    if not name:
        return  # no folder of a run
    name = paths.given_name or name
    state, reason = _state(view, events)
    row = (run, name, run_column(run), started_at, state, reason, view.kind if view is not None else "hosted")
    connection.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    if view is not None and view.kind == "hosted" and view.lead != node:
        rank = next((rank.rank for rank in view.ranks if rank.node == node), -1)
        connection.execute("INSERT OR IGNORE INTO followed VALUES (?, ?, ?, '')", (run, rank, view.lead))
    for event in events:
        if event.command is not None and event.outcome in FINAL_COMMAND_STATES:
            ended = (event.outcome, event.step, event.text[:1000], event.at)
            asked = (event.command, UNKNOWN_DIGEST, event.verb or "", event.by, run, event.at)
            connection.execute(_ENDED, (*asked, *ended, event.undoes))
    for id, carried in (durable.carried if durable is not None else {}).items():
        at = events[-1].at if events else 0.0
        connection.execute(_OPEN, (id, UNKNOWN_DIGEST, carried.verb, carried.by, run, carried.node, at))
    if generations:
        _raise_generation(max(generations), connection)


def _command_events(reader: RecordReader) -> Iterator[Event]:
    """The events of commands, and those by which the run's state changed."""
    after, more = 0, True
    while more:
        page, more = reader.events(after, _PAGE)
        yield from (event for event in page if event.command is not None or isinstance(event.data, RunStateChanged))
        after = page[-1].id if page else after


def _state(view: RunView | None, events: list[Event]) -> tuple[RunState, str]:
    """By the newest event that ended or resumed it, or else as it was last shown."""
    changes = [event.data.after for event in events if isinstance(event.data, RunStateChanged)]
    newest = next((after for after in reversed(changes) if after in ("finished", "stopped", "failed", "resumed")), "")
    if newest in ("finished", "stopped", "failed"):
        return newest, view.reason if view is not None else ""  # type: ignore[return-value]
    if view is None:
        return "failed", "its record could not be read when the agent's database was made again; resume it"
    return ("running" if newest == "resumed" and view.state not in ACTIVE_RUN_STATES else view.state), view.reason


def _name(paths: RunPaths) -> str:
    with contextlib.suppress(TrainctlError, OSError):
        return run_file.read(paths.run_file).run.name
    return ""


def _raise_generation(found: Generation, connection: sqlite3.Connection) -> None:
    known = None
    with contextlib.suppress(*UNREADABLE):
        (text,) = connection.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()
        known = Generation(*map(int, text.split(".")))
    if known is None or found > known:
        connection.execute("REPLACE INTO meta VALUES ('generation', ?)", (f"{found.term}.{found.n}",))
