"""Faults of a run with what each cost: time in which it didn't train, and steps made again. Pure."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.whole_run import Commit
from trainctl.tui.report.interventions import Measure, StepAt, is_fault, kind_of
from trainctl.tui.report.run_facts import Incident
from trainctl.tui.report.timeline import Timeline, has_ended


def incidents(events: Sequence[m.Event], line: Timeline, step_at: StepAt, measure: Measure) -> list[Incident]:
    """Each, oldest first. What happened between the same two commits is one; so are steps in a row that skipped their
    update for the same reason."""
    again = line.again()
    groups: dict[int, list[m.Event]] = {}
    for event in events:
        if is_incident(event):
            groups.setdefault(_gap_of(event, line, again), []).append(event)
    found = []
    for group in _joined(groups):
        number = group[0]
        one = _incident(group[1], _waited(group[1], number, line, events), again.get(number, ()), step_at, measure)
        found.append(_with_return(one, events, step_at))
    return found


def is_incident(event: m.Event) -> bool:
    """A fault, a lost rank, or a return to a checkpoint."""
    lost = isinstance(event.data, e.SharesChanged) and bool(event.data.lost)
    return lost or is_fault(event) or kind_of(event) == "rollback"


def stops_training(event: m.Event) -> bool:
    """Whether an incident is one that ranks can't train through."""
    return is_incident(event) and not isinstance(event.data, e.StepSkipped | e.RecordState | e.CheckpointFailed)


def _gap_of(event: m.Event, line: Timeline, again: dict[int, list[Commit]]) -> int:
    """A rollback that a command asked for may be recorded after the next step."""
    number = line.at(event.at)
    late = kind_of(event) == "rollback" and number not in again and number - 1 in again
    return number - 1 if late else number


def _joined(groups: dict[int, list[m.Event]]) -> Iterator[tuple[int, list[m.Event]]]:
    """By time; groups of steps in a row that skipped their update are one."""
    made: list[tuple[int, list[m.Event]]] = []
    for number in sorted(groups):
        if made and _follows(made[-1][1], groups[number]):
            made[-1][1].extend(groups[number])
        else:
            made.append((number, groups[number]))
    yield from made


def _follows(before: Sequence[m.Event], after: Sequence[m.Event]) -> bool:
    """Whether both have skipped steps alone, one after the other, for the same reason."""
    skipped = [event.data for event in (before[-1], *after) if isinstance(event.data, e.StepSkipped)]
    if len(skipped) <= len(after):
        return False
    pairs = itertools.pairwise(skipped)
    return all(one.reason == other.reason and other.step == one.step + 1 for one, other in pairs)


def _waited(group: Sequence[m.Event], number: int, line: Timeline, events: Sequence[m.Event]) -> float | None:
    """Seconds from the last commit before to the start of the next step, without pauses, stops, evaluations and
    checkpoints; and by how much that step took longer than usual. Before the first commit and after the last one:
    until the group was formed, or until the run ended. None: the incident stops no rank, or the time isn't known."""
    if not any(stops_training(event) for event in group):
        return None
    if 0 < number < len(line.commits):
        return line.gaps[number].rest + line.excess(number)
    began = group[0].at
    later = [event for event in events if event.at >= began and line.at(event.at) == number]
    formed = [event.at for event in later if isinstance(event.data, e.GenerationFormed)]
    ended = [event.at for event in later if has_ended(event)]
    if formed:
        return formed[-1] - began
    return ended[0] - line.bounds(number)[0] if ended and number else None


def _incident(
    group: Sequence[m.Event], waited: float | None, again: Sequence[Commit], step_at: StepAt, measure: Measure
) -> Incident:  # fmt: skip
    lost = [event for event in group if isinstance(event.data, e.SharesChanged) and event.data.lost]
    changes = [effect.change for event in lost if (effect := measure(event)) is not None]
    return Incident(
        step_at(group[0]), group[0].at, tuple(_texts(group)), waited, len(again), sum(one.seconds for one in again),
        tuple(dict.fromkeys(event.data.lost for event in lost if isinstance(event.data, e.SharesChanged))),
        changes[-1] if changes else None,
    )  # fmt: skip


def _texts(group: Sequence[m.Event]) -> Iterator[str]:
    """Each once; one of all steps that skipped their update."""
    skipped = [event.data for event in group if isinstance(event.data, e.StepSkipped)]
    several = len(skipped) > 1
    if several:
        yield f"steps {skipped[0].step:,} to {skipped[-1].step:,} skipped their update: {skipped[0].reason}"
    yield from dict.fromkeys(event.text for event in group if not (several and isinstance(event.data, e.StepSkipped)))


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
