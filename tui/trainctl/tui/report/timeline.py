"""A run's commits in the order of time, and what the time before each went to. Pure."""

import bisect
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.rollups import Evaluation
from trainctl.protocol.record.whole_run import Commit

ENDED: Final = frozenset({"stopped", "finished", "failed"})
"""States in which a run has ended."""
SLOW_TIMES: Final = 5.0
"""A step takes unusually long from this many times the median on."""
MEDIAN_STEPS: Final = 20
"""Steps before it that the median is of."""


class Recorded(NamedTuple):
    """What the timeline is made from. Times are Unix seconds."""

    started_at: float | None  # when the run was started, or last resumed
    read_to: float  # of the newest fact
    commits: Sequence[Commit]  # by time
    events: Sequence[m.Event]
    evaluations: Sequence[Evaluation]


class Gap(NamedTuple):
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
        """From the start to the newest fact."""
        return self._ends[-1] - self.began_at

    def at(self, when: float) -> int:
        """The gap that a time is in."""
        return bisect.bisect_right(self._times, when)

    def commit_of(self, step: int, when: float) -> int | None:
        """The newest commit of a step before a time."""
        found = [number for number in self._of_step.get(step, ()) if self._times[number] <= when]
        return found[-1] if found else None

    def stands(self, step: int, when: float) -> bool:
        """Whether what was known of a step at a time is still true of it: it was not retracted since."""
        number = self.commit_of(step, when)
        return step == 0 if number is None else not self.commits[number].retracted

    def bounds(self, number: int) -> tuple[float, float]:
        """When a gap began, and when the step at its end began."""
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

    def _gaps(self, events: Sequence[m.Event], evaluations: Iterable[Evaluation]) -> Iterator[Gap]:
        paused, evaluated, saved = ([0.0] * len(self._ends) for _ in range(3))
        for since, until in _pauses(events, self._ends[-1]):
            for number in range(self.at(since), self.at(until) + 1):
                low, high = self.bounds(number)
                paused[number] += max(min(high, until) - max(low, since), 0.0)
        for one in evaluations:
            evaluated[self._after(one.step, one.at)] += one.seconds
        for event, data in self.checkpoints:
            saved[self._after(data.step, event.at)] += data.loop_seconds or 0.0
        stopped = self._stopped(events)
        for number in range(len(self._ends)):
            own = self.commits[number].seconds if number < len(self.commits) else 0.0
            wanted = (paused[number], stopped.get(number, 0.0), evaluated[number], saved[number], own)
            yield self._gap(number, wanted)

    def _gap(self, number: int, wanted: Iterable[float]) -> Gap:
        """What is wanted, as long as there is time left: ranks that wait for another one's evaluation count it as a
        part of their step."""
        left = self._ends[number] - (self._times[number - 1] if number else self.began_at)
        parts = []
        for seconds in wanted:
            parts.append(min(seconds, left))
            left -= parts[-1]
        return Gap._make([*parts, left])

    def _after(self, step: int, when: float) -> int:
        number = self.commit_of(step, when)
        return self.at(when) if number is None else number + 1

    def _stopped(self, events: Iterable[m.Event]) -> dict[int, float]:
        """Seconds from the run's end to its next step, by gap."""
        found: dict[int, float] = {}
        for event in events:
            number = self.at(event.at)
            if number < len(self.commits) and number not in found and has_ended(event):
                found[number] = max(self.bounds(number)[1] - event.at, 0.0)
        return found


def has_ended(event: m.Event) -> bool:
    """Whether it says that the run has ended."""
    return isinstance(event.data, e.RunStateChanged) and event.data.after in ENDED


def checkpoints(events: Iterable[m.Event], line: Timeline) -> list[tuple[m.Event, e.CheckpointWritten]]:
    """One event of each checkpoint: each node that writes it has its own, as has a command. It is the one of the node
    where training was stopped for longest."""
    found: dict[tuple[int, int | None], tuple[m.Event, e.CheckpointWritten]] = {}
    for event in events:
        if isinstance(event.data, e.CheckpointWritten):
            key = event.data.step, line.commit_of(event.data.step, event.at)
            known = found.get(key)
            if known is None or (known[1].loop_seconds or 0.0) < (event.data.loop_seconds or 0.0):
                found[key] = event, event.data
    return list(found.values())


def _pauses(events: Iterable[m.Event], end: float) -> Iterator[tuple[float, float]]:
    """Up to `end`, if the run is still paused then."""
    since = None
    for event in events:
        if not isinstance(event.data, e.RunStateChanged):
            continue
        if since is not None:
            yield since, event.at
            since = None
        if event.data.after == "paused":
            since = event.at
    if since is not None:
        yield since, max(end, since)
