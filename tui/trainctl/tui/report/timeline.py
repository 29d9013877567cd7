"""A run's commits in the order of time, its interruptions, and where its time went from its start to the newest fact.
Pure.
"""

import bisect
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from trainctl.protocol.messages import Event
from trainctl.protocol.messages.events import (
    CheckpointFailed,
    CheckpointWritten,
    GenerationFormed,
    GenerationLeft,
    RecordState,
    RunStateChanged,
    SharesChanged,
    StepSkipped,
)
from trainctl.protocol.record.rollups import Evaluation
from trainctl.protocol.record.whole_run import Commit
from trainctl.tui.report.interventions import Measure, StepAt, is_fault, kind_of, skipped_texts
from trainctl.tui.report.run_facts import Incident, TimePart

ENDED: Final = frozenset({"stopped", "finished", "failed"})
"""States in which a run has ended."""
SLOW_TIMES: Final = 5.0
"""A step takes unusually long from this many times the median on."""
MEDIAN_STEPS: Final = 20
"""Steps before it that the median is of."""


@dataclass(frozen=True)
class Recorded:
    """The records that a timeline is made from. Times are Unix seconds."""

    started_at: float | None  # when the run was started, or last resumed
    read_to: float  # of the newest fact
    commits: Sequence[Commit]  # by time
    events: Sequence[Event]
    evaluations: Sequence[Evaluation]


@dataclass(frozen=True)
class Gap:
    """The time from one commit to the next, in seconds by what it went to. The sum of the parts is the whole."""

    paused: float
    stopped: float  # between a stop and the resume
    evaluated: float
    saved: float  # stopped for checkpoints
    step: float  # of the step that was committed at the end
    rest: float


class Timeline:
    """All gaps of a run. Gap i ends with commit i, gap 0 begins with the run, the last one ends with the newest
    fact."""

    def __init__(self, known: Recorded) -> None:
        self.commits, self._times = known.commits, [commit.committed_at for commit in known.commits]
        self._of_step: dict[int, list[int]] = {}
        for number, commit in enumerate(known.commits):
            self._of_step.setdefault(commit.step, []).append(number)
        firsts = [commit.committed_at - commit.seconds for commit in known.commits[:1]]
        events = sorted(known.events, key=lambda event: event.at)
        started = [known.started_at] if known.started_at is not None else []
        self.began_at = min([*started, *(event.at for event in events[:1]), *firsts], default=known.read_to)
        self._ends = [*self._times, max([known.read_to, self.began_at, *self._times[-1:]])]
        self.checkpoints = checkpoints(events, self)
        self.gaps = tuple(self._gaps(events, known.evaluations))

    @property
    def seconds(self) -> float:
        """Seconds from the start to the newest fact."""
        return self._ends[-1] - self.began_at

    def at(self, when: float) -> int:
        """Return the gap that a time is in."""
        return bisect.bisect_right(self._times, when)

    def commit_of(self, step: int, when: float) -> int | None:
        """Return the newest commit of a step before a time."""
        found = [number for number in self._of_step.get(step, ()) if self._times[number] <= when]
        return found[-1] if found else None

    def stands(self, step: int, when: float) -> bool:
        """Return whether what was known of a step at a time is still true of it: it was not retracted since."""
        number = self.commit_of(step, when)
        return step == 0 if number is None else not self.commits[number].retracted

    def bounds(self, number: int) -> tuple[float, float]:
        """Return when a gap began, and when the step at its end began."""
        since = self._times[number - 1] if number else self.began_at
        seconds = self.commits[number].seconds if number < len(self.commits) else 0.0
        return since, max(self._ends[number] - seconds, since)

    def excess(self, number: int) -> float:
        """Seconds above the median that the step at a gap's end took, if that was unusually long: a step that a rank
        hung in, or that a machine slept in."""
        before = [commit.seconds for commit in self.commits[max(number - MEDIAN_STEPS, 0) : number]]
        if not before or number >= len(self.commits):
            return 0.0
        usual, took = statistics.median(before), self.commits[number].seconds
        return took - usual if took > SLOW_TIMES * usual else 0.0

    def again(self) -> dict[int, list[Commit]]:
        """Retracted commits by the gap in which the run went back."""
        found: dict[int, list[Commit]] = {}
        left: list[Commit] = []
        for number, commit in enumerate(self.commits):
            while left and left[-1].step >= commit.step:
                found.setdefault(number, []).append(left.pop())
            if commit.retracted:
                left.append(commit)
        return found | ({len(self.commits): left} if left else {})

    def _gaps(self, events: Sequence[Event], evaluations: Iterable[Evaluation]) -> Iterator[Gap]:
        paused, evaluated, saved = ([0.0] * len(self._ends) for _ in range(3))
        for since, until in _pauses(events, self._ends[-1]):
            for number in range(self.at(since), self.at(until) + 1):
                low, high = self.bounds(number)
                paused[number] += max(min(high, until) - max(low, since), 0.0)
        for evaluation in evaluations:
            evaluated[self._after(evaluation.step, evaluation.at)] += evaluation.seconds
        for event, data in self.checkpoints:
            saved[self._after(data.step, event.at)] += data.loop_seconds or 0.0
        stopped = self._stopped(events)
        for number in range(len(self._ends)):
            own = self.commits[number].seconds if number < len(self.commits) else 0.0
            wanted = (paused[number], stopped.get(number, 0.0), evaluated[number], saved[number], own)
            yield self._gap(number, wanted)

    def _gap(self, number: int, wanted: Iterable[float]) -> Gap:
        """Return what is wanted, as long as there is time left: ranks that wait for another one's evaluation count it
        as a part of their step."""
        left = self._ends[number] - (self._times[number - 1] if number else self.began_at)
        parts = []
        for seconds in wanted:
            parts.append(min(seconds, left))
            left -= parts[-1]
        return Gap(*[*parts, left])

    def _after(self, step: int, when: float) -> int:
        number = self.commit_of(step, when)
        return self.at(when) if number is None else number + 1

    def _stopped(self, events: Iterable[Event]) -> dict[int, float]:
        """Seconds from the run's end to its next step, by gap."""
        found: dict[int, float] = {}
        for event in events:
            number = self.at(event.at)
            if number < len(self.commits) and number not in found and has_ended(event):
                found[number] = max(self.bounds(number)[1] - event.at, 0.0)
        return found


def has_ended(event: Event) -> bool:
    """Return whether it says that the run has ended."""
    return isinstance(event.data, RunStateChanged) and event.data.after in ENDED


def checkpoints(events: Iterable[Event], line: Timeline) -> list[tuple[Event, CheckpointWritten]]:
    """Return one event of each checkpoint: each node that writes it has its own, as has a command. It is the one of the
    node where training was stopped for longest."""
    found: dict[tuple[int, int | None], tuple[Event, CheckpointWritten]] = {}
    for event in events:
        if isinstance(event.data, CheckpointWritten):
            key = event.data.step, line.commit_of(event.data.step, event.at)
            known = found.get(key)
            if known is None or (known[1].loop_seconds or 0.0) < (event.data.loop_seconds or 0.0):
                found[key] = event, event.data
    return list(found.values())


def _pauses(events: Iterable[Event], end: float) -> Iterator[tuple[float, float]]:
    """Up to `end`, if the run is still paused then."""
    since = None
    for event in events:
        if not isinstance(event.data, RunStateChanged):
            continue
        if since is not None:
            yield since, event.at
            since = None
        if event.data.after == "paused":
            since = event.at
    if since is not None:
        yield since, max(end, since)


def incidents(events: Sequence[Event], line: Timeline, step_at: StepAt, measure: Measure) -> list[Incident]:
    """Return each, oldest first. What happened between the same two commits is one; so are steps in a row that skipped
    their update for the same reason."""
    again, texts = line.again(), skipped_texts(events)
    groups: dict[int, list[Event]] = {}
    for event in events:
        if is_incident(event) and texts.get(event.id) != "":
            groups.setdefault(_gap_of(event, line, again), []).append(event)
    found = []
    for number, group in sorted(groups.items()):
        waited = _waited(group, number, line, events)
        words = tuple(dict.fromkeys(texts.get(event.id) or event.text for event in group))
        one = _incident(group, words, waited, again.get(number, ()), step_at, measure)
        found.append(_with_return(one, events, step_at))
    return found


def is_incident(event: Event) -> bool:
    """Return whether an event is a fault, a lost rank, or a return to a checkpoint."""
    lost = isinstance(event.data, SharesChanged) and bool(event.data.lost)
    return lost or is_fault(event) or kind_of(event) == "rollback"


def stops_training(event: Event) -> bool:
    """Return whether an incident is one that ranks can't train through."""
    return is_incident(event) and not isinstance(event.data, StepSkipped | RecordState | CheckpointFailed)


def _gap_of(event: Event, line: Timeline, again: dict[int, list[Commit]]) -> int:
    """Return the gap that an event belongs to: a rollback that a command asked for may be recorded after the next
    step."""
    number = line.at(event.at)
    late = kind_of(event) == "rollback" and number not in again and number - 1 in again
    return number - 1 if late else number


def _waited(group: Sequence[Event], number: int, line: Timeline, events: Sequence[Event]) -> float | None:
    """Seconds from the last commit before to the start of the next step, without pauses, stops, evaluations and
    checkpoints; and by how much that step took longer than usual. Before the first commit and after the last one:
    until the group was formed, or until the run ended. None: the incident stops no rank, or the time isn't known."""
    if not any(stops_training(event) for event in group):
        return None
    if 0 < number < len(line.commits):
        return line.gaps[number].rest + line.excess(number)
    began = group[0].at
    later = [event for event in events if event.at >= began and line.at(event.at) == number]
    formed = [event.at for event in later if isinstance(event.data, GenerationFormed)]
    ended = [event.at for event in later if has_ended(event)]
    if formed:
        return formed[-1] - began
    return ended[0] - line.bounds(number)[0] if ended and number else None


def _incident(
    group: Sequence[Event],
    texts: tuple[str, ...],
    waited: float | None,
    again: Sequence[Commit],
    step_at: StepAt,
    measure: Measure,
) -> Incident:
    lost = [event for event in group if isinstance(event.data, SharesChanged) and event.data.lost]
    changes = [effect.change for event in lost if (effect := measure(event)) is not None]
    return Incident(
        step_at(group[0]),
        group[0].at,
        texts,
        waited,
        len(again),
        sum(one.seconds for one in again),
        tuple(dict.fromkeys(event.data.lost for event in lost if isinstance(event.data, SharesChanged))),
        changes[-1] if changes else None,
    )


def _with_return(incident: Incident, events: Iterable[Event], step_at: StepAt) -> Incident:
    """Add the step at which all that the incident lost were back."""
    steps: dict[str, int] = {}
    for event in events if incident.lost else ():
        match event.data:
            case SharesChanged(returned=name) | SharesChanged(node=name) if (
                event.at > incident.at and name in incident.lost and event.data.after.get(name)
            ):
                steps.setdefault(name, step_at(event))
            case _:
                pass
    is_back = incident.lost and len(steps) == len(incident.lost)
    return msgspec.structs.replace(incident, back_step=max(steps.values())) if is_back else incident


def time_parts(line: Timeline, events: Sequence[Event], evaluations: int) -> Iterator[TimePart]:
    """Yield the parts of a run's time, which sum to it. Parts that took no time are left out."""
    steps, again = _steps(line)
    rest = _rests(line, events)
    retracted = sum(commit.retracted for commit in line.commits)
    saved = _counted(len(line.checkpoints), "checkpoint")
    parts = (
        TimePart("steps", steps, "that stand"),
        TimePart("start", rest["start"], "until the first step began"),
        TimePart("steps made again", again, f"{_counted(retracted, 'step')}, made again or taken back"),
        TimePart("evaluations", sum(gap.evaluated for gap in line.gaps), _counted(evaluations, "evaluation")),
        TimePart("checkpoints", sum(gap.saved for gap in line.gaps), f"{saved}; training was stopped for them"),
        TimePart("without a group", rest["group"], "ranks that left, died, hung or joined"),
        TimePart("pauses", sum(gap.paused for gap in line.gaps)),
        TimePart("between a stop and a resume", sum(gap.stopped for gap in line.gaps), "until the next step began"),
        TimePart("after the last step", rest["end"], "until the newest fact of the record"),
        TimePart("other", rest["other"], "between steps"),
    )
    yield from (part for part in parts if part.seconds > 0)


def _steps(line: Timeline) -> tuple[float, float]:
    """Seconds of steps that stand, and of retracted ones."""
    found = [0.0, 0.0]
    for commit, gap in zip(line.commits, line.gaps, strict=False):
        found[commit.retracted] += gap.step
    return found[0], found[1]


def _rests(line: Timeline, events: Sequence[Event]) -> dict[str, float]:
    """Return what is left of each gap, by its cause."""
    without = {line.at(event.at) for event in events if _breaks_group(event)}
    found = {"start": 0.0, "group": 0.0, "end": 0.0, "other": 0.0}
    for number, gap in enumerate(line.gaps):
        inner = "group" if number in without else "other"
        found["start" if number == 0 else "end" if number == len(line.commits) else inner] += gap.rest
    return found


def _breaks_group(event: Event) -> bool:
    return isinstance(event.data, GenerationFormed | GenerationLeft) or stops_training(event)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"
