"""The facts of a diagnosis: plain values, of a live run or of a record. What isn't known is None or absent."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import AlertView, Event, HostReading, RankStep, RunView, StepCommitted
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader


@dataclass(frozen=True)
class LiveFacts:
    """The facts that only the run's agent knows; a record doesn't have them."""

    view: RunView  # as it is now
    alerts: tuple[AlertView, ...] = ()  # open ones
    profiles: Mapping[int, ProfileSummary] = field(default_factory=dict)  # calibrations by rank
    readings: Mapping[str, tuple[HostReading, ...]] = field(default_factory=dict)  # by node, oldest first, of the
    # last minute or more; they are used instead of the record's from the first of them on
    step_age_seconds: float | None = None  # since the last commit, without pauses
    doing: str = "train"  # kind of the newest plan


@dataclass(frozen=True, kw_only=True)
class DiagnosisFacts:
    """One run at one time. Steps, parts, events and readings are oldest first."""

    at: float  # Unix seconds: now, or the time of the last fact in a record
    is_live: bool = False  # False: read from a record, where nothing changes any more
    view: RunView | None = None  # ranks with node, state, share, micro-batch, device, precision and curve; state
    # and reason say whether the run is paused, or waits for data
    config: RunFile | None = None  # as it was started: precision, checkpointing, packing, prefetch ...
    steps: tuple[StepCommitted, ...] = ()  # the newest ones that stand
    parts: tuple[RankStep, ...] = ()  # the ranks' parts of these steps: phases, samples, memory, metrics by name
    readings: Mapping[str, tuple[HostReading, ...]] = field(default_factory=dict)  # by node
    events: tuple[Event, ...] = ()
    alerts: tuple[AlertView, ...] = ()
    profiles: Mapping[int, ProfileSummary] = field(default_factory=dict)  # calibrations by rank, with their links
    checkpoint_step: int | None = None  # of the newest complete checkpoint; None: there is none, or it isn't known
    step_age_seconds: float | None = None  # live: since the last commit, without pauses
    doing: str = "train"  # live: kind of the newest plan


STEPS_READ = 400
"""Newest steps that are looked at: the last ones are compared with those before them."""
MOST_PARTS = 20_000
"""Ranks' parts that are read at most; with many ranks fewer steps are."""
LEAST_STEPS = 120
"""Steps that are read even with many ranks."""
EVENTS_READ = 300
"""Newest events."""
CHECKPOINTS_READ = 20
"""Newest events about checkpoints, which are read even if they are older."""
READINGS_READ = 720
"""Newest readings of all nodes; a record has one of each node every 10 s."""


def config_of(paths: RunPaths) -> RunFile | None:
    """The run file in a run directory; None if there is none that this program can read."""
    with contextlib.suppress(InvalidInputError, OSError):
        return run_file.read(paths.run_file)
    return None


def facts_of_record(
    reader: RecordReader,
    config: RunFile | None = None,
    *,
    live: LiveFacts | None = None,
    at: float | None = None,
    last_step: int | None = None,
) -> DiagnosisFacts:
    """The newest facts, or those up to `last_step`. `live`: what the run's agent adds, with `at`, the present time.
    Raises InvalidInputError if the record cannot be read."""
    newest = reader.last_step()
    last = min(newest.step, last_step or newest.step) if newest is not None else 0
    view = live.view if live is not None else _view(reader)
    count = _steps_read(len(view.ranks) if view is not None else 1)
    steps = reader.steps(max(last - count, 0), count)[0] if last else ()
    steps = tuple(step for step in steps if step.step <= last)
    is_past = newest is not None and last < newest.step
    until = steps[-1].committed_at if is_past and steps else None
    events = _events(reader, until)
    readings = _readings(reader, live, until)
    return DiagnosisFacts(
        at=at if at is not None else _last_time(steps, events),
        is_live=live is not None,
        view=view,
        config=config,
        steps=steps,
        parts=reader.parts_between(steps[0].step, last) if steps else (),
        readings=readings,
        events=events,
        alerts=live.alerts if live is not None else (),
        profiles=live.profiles if live is not None else {},
        checkpoint_step=_checkpoint(events),
        step_age_seconds=live.step_age_seconds if live is not None else None,
        doing=live.doing if live is not None else "train",
    )


def _steps_read(ranks: int) -> int:
    return max(LEAST_STEPS, min(STEPS_READ, MOST_PARTS // max(ranks, 1)))


def _view(reader: RecordReader) -> RunView | None:
    """Return the view that the run's agent kept last; None for a version that this program can't read."""
    with contextlib.suppress(msgspec.MsgspecError):
        return reader.view()
    return None


def _events(reader: RecordReader, until: float | None) -> tuple[Event, ...]:
    newest = reader.newest_events(EVENTS_READ, until)
    older = reader.newest_events(CHECKPOINTS_READ, until, CheckpointWritten.category)
    return (*(one for one in older if newest and one.id < newest[0].id), *newest)


def _last_time(steps: tuple[StepCommitted, ...], events: tuple[Event, ...]) -> float:
    return max([*(step.committed_at for step in steps[-1:]), *(event.at for event in events[-1:])], default=0.0)


def _readings(reader: RecordReader, live: LiveFacts | None, until: float | None) -> dict[str, tuple[HostReading, ...]]:
    found: dict[str, list[HostReading]] = {}
    for reading in reader.newest_host_readings(READINGS_READ, until):
        found.setdefault(reading.node, []).append(reading)
    for node, newer in (live.readings if live is not None else {}).items():
        kept = [one for one in found.get(node, []) if newer and one.read_at < newer[0].read_at]
        found[node] = [*kept, *newer]
    return {node: tuple(readings) for node, readings in found.items()}


def _checkpoint(events: tuple[Event, ...]) -> int | None:
    return max((event.data.step for event in events if isinstance(event.data, CheckpointWritten)), default=None)
