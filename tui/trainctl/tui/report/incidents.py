"""Faults of a run with what each cost: time in which it didn't train, and steps made again. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.whole_run import RetractedStep
from trainctl.tui.report.interventions import Measure, StepAt, is_fault, kind_of
from trainctl.tui.report.run_facts import Incident


@dataclass
class _Open:
    """What has happened since the group was last whole."""

    step: int = 0
    at: float = 0.0
    texts: list[str] = field(default_factory=list)
    left_at: float | None = None  # when the generation ended
    lost: list[str] = field(default_factory=list)
    rate_change: float | None = None

    def add(self, event: m.Event, step: int, measure: Measure) -> None:
        if not self.texts:
            self.step, self.at = step, event.at
        self.texts.append(event.text)
        if isinstance(event.data, e.SharesChanged) and event.data.lost:
            self.lost.append(event.data.lost)
            effect = measure(event)
            self.rate_change = effect.change if effect is not None else self.rate_change


def incidents(
    events: Sequence[m.Event], retracted: Sequence[RetractedStep], step_at: StepAt, measure: Measure
) -> tuple[list[Incident], float]:
    """Each, oldest first; and the seconds that the run was without a group in all, planned changes included."""
    found: list[Incident] = []
    waited, again, now = 0.0, _Retracted(retracted), _Open()
    for event in events:
        match event.data:
            case e.GenerationLeft():
                now.left_at = event.at
            case e.GenerationFormed() as formed:
                seconds = _seconds(formed, event.at, now.left_at)
                waited += seconds or 0.0
                found += _closed(now, seconds, again, event.at)
                now = _Open()
            case e.StepsStopped(lacking=""):
                found += _closed(now, max(event.at - now.at, 0.0), again, event.at)
                now = _Open()
            case e.NodeState(state="in-touch" | "trainer-back") if now.left_at is None:
                found += _closed(now, None, again, event.at)
                now = _Open()
            case _ if is_incident(event):
                if now.texts and now.left_at is None and step_at(event) > now.step:
                    found += _closed(now, None, again, event.at)
                    now = _Open()
                now.add(event, step_at(event), measure)
    found += _closed(now, None, again, float("inf"))
    return [_with_return(one, events, step_at) for one in found], waited


def is_incident(event: m.Event) -> bool:
    """A fault, a lost rank, or a return to a checkpoint."""
    lost = isinstance(event.data, e.SharesChanged) and bool(event.data.lost)
    return lost or is_fault(event) or kind_of(event) == "rollback"


def _seconds(formed: e.GenerationFormed, at: float, left_at: float | None) -> float | None:
    """Records of version 1 don't have the wait itself."""
    if formed.waited_seconds is not None:
        return formed.waited_seconds
    return max(at - left_at, 0.0) if left_at is not None else None


class _Retracted:
    """Retracted steps, each counted once: for the first incident that ended after its commit."""

    def __init__(self, steps: Sequence[RetractedStep]) -> None:
        self._left = list(steps)[::-1]

    def until(self, at: float) -> tuple[int, float]:
        """How many there are up to a time, and their seconds."""
        count, seconds = 0, 0.0
        while self._left and self._left[-1].committed_at <= at:
            count, seconds = count + 1, seconds + self._left.pop().seconds
        return count, seconds


def _closed(now: _Open, waited: float | None, again: _Retracted, at: float) -> Iterator[Incident]:
    if now.texts:
        count, seconds = again.until(at)
        texts, lost = tuple(dict.fromkeys(now.texts)), tuple(dict.fromkeys(now.lost))
        yield Incident(now.step, now.at, texts, waited, count, seconds, lost, now.rate_change)


def _with_return(one: Incident, events: Iterable[m.Event], step_at: StepAt) -> Incident:
    """With the step at which all that it lost were back."""
    steps: dict[str, int] = {}
    for event in events if one.lost else ():
        match event.data:
            case e.SharesChanged(returned=name) | e.SharesChanged(node=name) if (
                event.at > one.at and name in one.lost and event.data.after.get(name)
            ):
                steps.setdefault(name, step_at(event))
            case _:
                pass
    is_back = one.lost and len(steps) == len(one.lost)
    return msgspec.structs.replace(one, back_step=max(steps.values())) if is_back else one
