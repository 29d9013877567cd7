"""A profile as lines: the time of each phase on each rank, and the longest operators of one of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from trainctl.protocol.messages import PHASES, Event, PhaseProfile
from trainctl.protocol.messages.event_prose import rank_label
from trainctl.protocol.messages.events import AnyEvent, Profiled, ProfileFailed
from trainctl.tui.text.formatting import NA, percent, seconds
from trainctl.tui.text.styled_line import Line, Piece, clean, filled, fit, groups, labelled, line, rule, shorten


@dataclass(frozen=True)
class StepProfile:
    """The ranks' profiles by one command."""

    command: str
    ranks: tuple[Profiled, ...] = ()  # by rank
    failed: tuple[ProfileFailed, ...] = ()  # of the others that were asked

    @property
    def first_step(self) -> int:
        """Return the first step that any rank has recorded; 0 if none has."""
        return min((rank.first_step for rank in self.ranks), default=0)

    @property
    def last_step(self) -> int:
        """Return the last step that any rank has recorded: one may have ended early."""
        return max((rank.last_step for rank in self.ranks), default=0)

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the phases that a rank has, in their order."""
        found = {phase.name for rank in self.ranks for phase in rank.phases}
        return tuple(name for name in PHASES if name in found)

    def label(self, rank: Profiled) -> str:
        """Return a node, or node:rank where a node has several."""
        return clean(rank_label(rank.node, rank.rank, (other.node for other in self.ranks)))


def profiles_of(events: Iterable[Event]) -> tuple[StepProfile, ...]:
    """Return a group for each command, oldest first: steps may repeat after a rollback."""
    found: dict[str, list[AnyEvent]] = {}
    for event in sorted(events, key=lambda event: event.id):
        found.setdefault(event.command or "", []).append(event.data)
    return tuple(_group(command, outcomes) for command, outcomes in found.items())


def _group(command: str, outcomes: Sequence[AnyEvent]) -> StepProfile:
    ranks = [outcome for outcome in outcomes if isinstance(outcome, Profiled)]
    failed = tuple(one for one in outcomes if isinstance(one, ProfileFailed))
    return StepProfile(command, tuple(sorted(ranks, key=lambda view: view.rank)), failed)


def steps_in(rank: Profiled) -> int:
    """Return the number of steps that a rank recorded."""
    return rank.last_step - rank.first_step + 1


def phase_of(rank: Profiled, name: str) -> PhaseProfile | None:
    """Return a rank's phase of that name."""
    return next((phase for phase in rank.phases if phase.name == name), None)


_PHASE_CELLS, _RANK_CELLS, _CALLS_CELLS, _TIME_CELLS, _SHARE_CELLS = 12, 17, 9, 10, 7
_NO_PROFILE: Final = (
    ("no profile yet", "strong"),
    ("", "text"),
    ("enter records how long each operator takes in the next steps.", "text"),
    ("The steps are slower meanwhile; the loss curve stays the same.", "text"),
)
_NO_OPERATORS: Final = "no operators: none ran in this phase, or the library records none"


def title(profiles: Sequence[StepProfile], at: int) -> str:
    """Return what stands in the rule above the table."""
    if not profiles:
        return "─ profile "
    place = f", {at + 1} of {len(profiles)}" if len(profiles) > 1 else ""
    return f"─ profile of {steps_words(profiles[at])}{place} "


def steps_words(group: StepProfile) -> str:
    """Return `steps 5 to 7`."""
    if not group.ranks:
        return "no steps"
    one = group.first_step == group.last_step
    return f"step {group.first_step:,}" if one else f"steps {group.first_step:,} to {group.last_step:,}"


def nothing(columns: int, rows: int) -> list[Line]:
    """Return exactly `rows` lines of a run without a profile."""
    lines = [line(Piece(text, role)) for text, role in _NO_PROFILE]
    return filled(lines, columns, rows)


def lines(
    group: StepProfile, phase: str, column: int, columns: int, rows: int, keys: Sequence[Line] = ()
) -> list[Line]:
    """Return exactly `rows` lines; `keys`: of the last line. Of `column` and `phase` the operators are shown."""
    if not group.ranks:
        return _only_failures(group, columns, rows, keys)
    rank = group.ranks[column]
    over = f"over {steps_in(rank)} steps" if steps_in(rank) != 1 else "in the step"
    name = f"─ {phase} on {clean(group.label(rank))} {over} "
    remarks = _remarks(group, rank, columns)
    head = rule(columns, (0, shorten(name, columns - 2), "title"))
    drawn = [*_phases(group, phase, column, columns), head, *_operators(rank, phase, columns), *remarks]
    return [*filled(drawn, columns, rows - 1), fit(groups(keys, columns), columns)]


def _only_failures(group: StepProfile, columns: int, rows: int, keys: Sequence[Line]) -> list[Line]:
    lines = [line(Piece("no rank has recorded a profile", "strong")), ()]
    for failure in group.failed:
        lines += labelled("  failed".ljust(10), clean(failure_words(failure)), columns, "warning")
    return [*filled(lines, columns, rows - 1), fit(groups(keys, columns), columns)]


def _phases(group: StepProfile, chosen: str, column: int, columns: int) -> list[Line]:
    room = max((columns - _PHASE_CELLS) // _RANK_CELLS, 1)
    start = min(max(column - room + 1, 0), max(len(group.ranks) - room, 0))
    shown = [*enumerate(group.ranks)][start : start + room]
    heads = [Piece(_name(group.label(rank)), "key" if at == column else "label") for at, rank in shown]
    lines = [line(Piece(f"  {'PER STEP':<{_PHASE_CELLS - 2}}", "label"), *heads)]
    for at, phase in enumerate(group.phases):
        cells = [_phase_cell(group, rank, phase, place, at, (chosen, column)) for place, rank in shown]
        mark = "▸" if phase == chosen else " "
        lines.append(line(Piece(mark, "key"), Piece(f" {phase:<{_PHASE_CELLS - 2}}"), *cells))
    return lines


def _name(label: str) -> str:
    return f"{shorten(clean(label), _RANK_CELLS - 2):>{_RANK_CELLS - 1}} "


def _phase_cell(group: StepProfile, rank: Profiled, name: str, place: int, row: int, chosen: tuple[str, int]) -> Piece:
    found, whole = phase_of(rank, name), sum(phase.seconds for phase in rank.phases)
    text = NA
    if found is not None and whole > 0:
        text = f"{seconds(found.seconds / steps_in(rank))} {percent(found.seconds / whole):>4}"
    role = "cursor" if (name, place) == chosen else "text"
    return Piece(f"{text:>{_RANK_CELLS - 1}} ", role, f"screen.choose_cell({row}, {place})")


def _operators(rank: Profiled, name: str, columns: int) -> list[Line]:
    phase = phase_of(rank, name)
    if phase is None or not phase.operators:
        return [line(Piece(f"  {_NO_OPERATORS}", "dim"))]
    rows = operator_rows(phase, max(columns - 2, 1))
    return [line(Piece(f"  {text}", "label" if at == 0 else "text")) for at, text in enumerate(rows)]


def operator_rows(phase: PhaseProfile, columns: int) -> list[str]:
    """Return the heading and a row for each operator, of at most `columns` cells."""
    on_device = phase.device_seconds > 0
    figures = _CALLS_CELLS + _TIME_CELLS * (2 if on_device else 1) + _SHARE_CELLS
    room = min(max(columns - figures, 8), 60)
    device = f"{'DEVICE':>{_TIME_CELLS}}" if on_device else ""
    words = [f"{'OPERATOR':<{room}}{'CALLS':>{_CALLS_CELLS}}{'SELF':>{_TIME_CELLS}}{device}{'SHARE':>{_SHARE_CELLS}}"]
    for operator in phase.operators:
        device = f"{seconds(operator.device_seconds):>{_TIME_CELLS}}" if on_device else ""
        name = shorten(clean(operator.name), room - 1)
        share = f"{percent(phase.share(operator)):>{_SHARE_CELLS}}"
        words.append(
            f"{name:<{room}}{operator.calls:>{_CALLS_CELLS},}{seconds(operator.seconds):>{_TIME_CELLS}}{device}{share}"
        )
    return words


def _remarks(group: StepProfile, rank: Profiled, columns: int) -> list[Line]:
    said = [("trace", file_words(rank), "dim")]
    said += [("lacks", rank.lacks, "warning")] if rank.lacks else []
    said += [("failed", failure_words(failure), "warning") for failure in group.failed]
    lines: list[Line] = []
    for label, words, role in said:
        lines += labelled(f"  {label}".ljust(10), clean(words), columns, role)
    return lines


def file_words(rank: Profiled) -> str:
    """Return the trace's size and name, and what it cost."""
    cost = f"the loop was paused for {seconds(rank.loop_seconds)}"
    return f"{rank.file} on {rank.node}, {rank.size_bytes / 1e6:,.1f} MB; {cost}"


def failure_words(failure: ProfileFailed) -> str:
    """Return why a rank recorded nothing."""
    return f"{failure.node}: {failure.reason}"


# ---------------------------------------------------------------- the command line


def text(group: StepProfile, columns: int = 80) -> str:
    """Return all phases on all ranks, a paragraph for each."""
    made = [f"profile of {steps_words(group)}"]
    for rank in group.ranks:
        made += ["", clean(f"{group.label(rank)}: {file_words(rank)}")]
        made += [clean(f"  lacks: {rank.lacks}")] if rank.lacks else []
        for phase in rank.phases:
            whole = sum(other.seconds for other in rank.phases)
            part = f"{percent(phase.seconds / whole)} of the phases" if whole > 0 else ""
            made.append(f"  {phase.name}: {seconds(phase.seconds / steps_in(rank))} per step, {part}")
            if phase.operators:
                made += [f"    {row}" for row in operator_rows(phase, columns - 4)]
    made += [clean(f"no profile from {failure_words(failure)}") for failure in group.failed]
    return "\n".join(made)


def objects(group: StepProfile) -> dict[str, Any]:
    """Return the same as plain values; operators have names for their fields, as they are an array on the wire."""
    ranks = []
    for rank in group.ranks:
        fields = msgspec.to_builtins(rank)
        phases = [
            {
                "name": phase.name,
                "seconds": phase.seconds,
                "device_seconds": phase.device_seconds,
                "operators": [
                    {
                        **{name: getattr(operator, name) for name in operator.__struct_fields__},
                        "share": phase.share(operator),
                    }
                    for operator in phase.operators
                ],
            }
            for phase in rank.phases
        ]
        ranks.append({**fields, "phases": phases})
    failed = [{"node": one.node, "reason": one.reason} for one in group.failed]
    return {"first_step": group.first_step, "last_step": group.last_step, "ranks": ranks, "failed": failed}
