"""Where a run's time went between its start and the newest fact, in parts that don't overlap. Pure."""

from collections.abc import Iterator, Sequence

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.tui.report.incidents import stops_training
from trainctl.tui.report.run_facts import TimePart
from trainctl.tui.report.timeline import Timeline


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
    """Of steps that stand, and of retracted ones."""
    found = [0.0, 0.0]
    for commit, gap in zip(line.commits, line.gaps, strict=False):
        found[commit.retracted] += gap.step
    return found[0], found[1]


def _rests(line: Timeline, events: Sequence[m.Event]) -> dict[str, float]:
    """What is left of each gap, by its cause."""
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
