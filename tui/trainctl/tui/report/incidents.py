"""Interruptions of a run's training, and where its time went between its start and the newest fact. Pure."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.whole_run import Commit
from trainctl.tui.report.interventions import Measure, StepAt, is_fault, kind_of, skipped_texts
from trainctl.tui.report.run_facts import Incident, TimePart
from trainctl.tui.report.timeline import Timeline, has_ended


def incidents(events: Sequence[m.Event], line: Timeline, step_at: StepAt, measure: Measure) -> list[Incident]:
    """Each, oldest first. What happened between the same two commits is one; so are steps in a row that skipped their
    update for the same reason."""
    again, texts = line.again(), skipped_texts(events)
    groups: dict[int, list[m.Event]] = {}
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
    group: Sequence[m.Event], texts: tuple[str, ...], waited: float | None, again: Sequence[Commit], step_at: StepAt,
    measure: Measure,
) -> Incident:  # fmt: skip
    lost = [event for event in group if isinstance(event.data, e.SharesChanged) and event.data.lost]
    changes = [effect.change for event in lost if (effect := measure(event)) is not None]
    return Incident(
        step_at(group[0]), group[0].at, texts, waited, len(again), sum(one.seconds for one in again),
        tuple(dict.fromkeys(event.data.lost for event in lost if isinstance(event.data, e.SharesChanged))),
        changes[-1] if changes else None,
    )  # fmt: skip


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


def time_parts(line: Timeline, events: Sequence[m.Event], evaluations: int) -> Iterator[TimePart]:
    """Their sum is the run's time. Parts that took no time are left out."""
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


def _rests(line: Timeline, events: Sequence[m.Event]) -> dict[str, float]:
    """Return what is left of each gap, by its cause."""
    without = {line.at(event.at) for event in events if _breaks_group(event)}
    found = {"start": 0.0, "group": 0.0, "end": 0.0, "other": 0.0}
    for number, gap in enumerate(line.gaps):
        inner = "group" if number in without else "other"
        found["start" if number == 0 else "end" if number == len(line.commits) else inner] += gap.rest
    return found


def _breaks_group(event: m.Event) -> bool:
    return isinstance(event.data, e.GenerationFormed | e.GenerationLeft) or stops_training(event)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"
