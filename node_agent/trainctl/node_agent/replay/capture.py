"""Makes a recording from a finished run's directory."""

from pathlib import Path
from typing import TypeVar

from trainctl.node_agent.records.keys import VIEW_KEY
from trainctl.node_agent.replay import format as r
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, ProtocolError
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.security import received_names
from trainctl.protocol.wire import codec
from trainctl.protocol.wire.json_text import decode_json

T = TypeVar("T")
_PAGE = 500
LOG_CHARACTERS = 4000
MOST_STEPS = 2000
"""More make a file that is no longer small."""


def of_run(directory: Path) -> r.Recording:
    """Raises InvalidInputError if there is no record, it has no step, or too many."""
    paths = RunPaths(directory)
    with RecordReader(paths) as reader:
        text = reader.meta(VIEW_KEY)
        steps, more = reader.steps(limit=MOST_STEPS)
        if text is None or not steps or more:
            problem = f"has over {MOST_STEPS:,} steps" if more else "has no steps"
            raise InvalidInputError(str(directory), f"{problem}: it cannot be recorded")
        view = decode_json(text, m.RunView)
        parts = [reader.rank_steps(step.step) for step in steps]
        held = tuple((found.step, round(found.loss, 5)) for found in reader.evaluations())
        events = tuple(event for event in _all_events(reader) if not _is_end(event, steps[-1].step))
    caps = [part.memory_cap_bytes for part in parts[-1] if part.memory_cap_bytes is not None]
    return r.Recording(
        version=r.VERSION, name=view.name, engine=view.engine, mixed=view.mixed, samples=view.samples,
        global_batch=_given(view.global_batch), memory_cap_bytes=int(min(caps)) if caps else None,
        ranks=tuple(_rank(rank, paths) for rank in sorted(view.ranks, key=lambda rank: rank.rank)),
        steps=tuple(_step(step, of_step) for step, of_step in zip(steps, parts, strict=True) if of_step),
        evaluations=held, events=events, machines=_machines(paths),
    )  # fmt: skip


def _all_events(reader: RecordReader) -> tuple[r.RecordedEvent, ...]:
    found: list[r.RecordedEvent] = []
    after, more = 0, True
    while more:
        events, more = reader.events(after, _PAGE)
        after = events[-1].id if events else after
        found += [_happened(event) for event in events]
    return tuple(found)


def _is_end(event: r.RecordedEvent, last_step: int) -> bool:
    """Its player reports the end."""
    return event.data.category == "run" and event.step == last_step


def _happened(event: m.Event) -> r.RecordedEvent:
    return r.RecordedEvent(event.step or 0, event.severity, event.by, event.data, event.verb, event.outcome)


def _rank(rank: m.RankView, paths: RunPaths) -> r.RecordedRank:
    received_names.check(rank.node)  # the record may be a copy from another machine
    # Nodes of one machine keep their runs side by side.
    beside = runs_directory(paths.directory.parent.parent.parent / rank.node) / paths.directory.name
    log = _log(paths, rank.rank) or _log(RunPaths(beside), rank.rank)
    return r.RecordedRank(rank.node, rank.backend, rank.device, log)


def _log(paths: RunPaths, rank: int) -> str:
    """The end of a rank's log; empty if there is none."""
    file = paths.log(rank)
    try:
        with received_names.opened(paths.directory, file.parent.name, file.name) as log:
            return log.read().decode("utf-8", "replace")[-LOG_CHARACTERS:]
    except OSError:
        return ""


def _step(step: m.StepCommitted, parts: tuple[m.RankStep, ...]) -> r.Step:
    return r.Step(
        round(_given(step.loss), 6), round(_given(step.grad_norm), 5), _given(step.learning_rate),
        _us(step.step_seconds), step.plan_version,
        tuple(_part(part) for part in parts),
    )  # fmt: skip


def _part(part: m.RankStep) -> r.Part:
    phases = part.phases
    return r.Part(
        rank=part.rank, samples=part.samples, micro_batch=_given(part.micro_batch), tokens=round(part.tokens),
        step=_us(part.step_seconds), data=_us(phases.data), forward=_us(phases.forward),
        backward=_us(phases.backward), sync=_us(phases.sync), optimizer=_us(phases.optimizer), wait=_us(phases.wait),
        memory_bytes=None if part.peak_or_held_bytes is None else int(part.peak_or_held_bytes),
    )  # fmt: skip


def _given(value: T | None) -> T:
    """A value that only hosted runs are sure to have."""
    if value is None:
        raise InvalidInputError("run", "another program trained this run: only a hosted run can be recorded")
    return value


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _machines(paths: RunPaths) -> tuple[r.RecordedMachine, ...]:
    connection = open_for_reading(paths.record)
    try:
        bodies = connection.execute("SELECT body FROM host ORDER BY at LIMIT 500").fetchall()
        found = [codec.decode_live(body) for (body,) in bodies]
    except ProtocolError as error:
        raise InvalidInputError(str(paths.record), f"contains an invalid reading: {error}") from None
    finally:
        connection.close()
    return tuple(
        r.RecordedMachine(
            item.cpu_percent, item.memory_used_bytes, item.memory_total_bytes, item.disk_free_bytes, item.load_1min
        )
        for item in found
        if isinstance(item, m.HostReading)
    )
