"""Where a run's time went between its start and the newest fact, in parts that don't overlap. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.rollups import Evaluation
from trainctl.protocol.record.whole_run import RetractedStep
from trainctl.tui.report.run_facts import TimePart


class Recorded(NamedTuple):
    """What the parts are made from. Times are Unix seconds."""

    started_at: float
    at: float  # of the newest fact
    first: m.StepCommitted
    step_seconds: float  # of all steps that stand
    waited_seconds: float  # without a group
    events: Sequence[m.Event]
    evaluations: Sequence[Evaluation]
    retracted: Sequence[RetractedStep]


def time_parts(known: Recorded) -> Iterator[TimePart]:
    """Parts that took no time are left out."""
    again, evaluated = known.retracted, known.evaluations
    start = known.first.committed_at - known.first.step_seconds - known.started_at
    parts = [
        TimePart("steps", known.step_seconds, "that stand"),
        TimePart("start", max(start, 0.0), "until the first step began"),
        TimePart("steps made again", sum(step.seconds for step in again), _counted(len(again), "step")),
        TimePart("evaluations", sum(one.seconds for one in evaluated), _counted(len(evaluated), "evaluation")),
        TimePart("checkpoints", *_checkpoints(known.events)),
        TimePart("without a group", known.waited_seconds, "ranks that left, died or joined"),
        TimePart("pauses", _paused(known.events, known.at)),
    ]
    rest = known.at - known.started_at - sum(part.seconds for part in parts)
    parts.append(TimePart("other", max(rest, 0.0), "not covered by the record"))
    yield from (part for part in parts if part.seconds > 0)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _checkpoints(events: Iterable[m.Event]) -> tuple[float, str]:
    """Seconds that training was stopped for them."""
    written = [event.data for event in events if isinstance(event.data, e.CheckpointWritten)]
    return sum(one.loop_seconds or 0.0 for one in written), f"{len(written):,} written; training was stopped for them"


def _paused(events: Iterable[m.Event], at: float) -> float:
    """Up to `at`, if the run is still paused then."""
    seconds, since = 0.0, None
    for event in events:
        if not isinstance(event.data, e.RunStateChanged):
            continue
        if since is not None:
            seconds, since = seconds + max(event.at - since, 0.0), None
        if event.data.after == "paused":
            since = event.at
    return seconds + (max(at - since, 0.0) if since is not None else 0.0)
