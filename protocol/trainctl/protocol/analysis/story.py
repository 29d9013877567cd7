"""Stories: what a run's events and plans say about one command, one rank or one step, in order. Pure."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Event, StepPlan
from trainctl.protocol.messages.events import GenerationFormed, SharesChanged, StepRetracted

FORMS = "a command's ID or the beginning of it, rank:N or step:N"


@dataclasses.dataclass(frozen=True)
class Story:
    """The events about one thing, the steps at which commands among them were applied, and the plans that carried it or
    are of that step."""

    events: tuple[Event, ...]
    steps: tuple[int, ...]
    plans: tuple[StepPlan, ...] = ()


def step_of(about: str) -> int | None:
    """Return the step that is asked about, None if it is a command or a rank."""
    kind, _, number = about.partition(":")
    return int(number) if kind == "step" and number.isdecimal() else None


def tell(events: Sequence[Event], about: str, nodes: Mapping[int, str], plans: Sequence[StepPlan] = ()) -> Story:
    """Return the story of `about`, one of `FORMS`, from all events of a run and the plans that may concern it, oldest
    first. `nodes`: by rank. Raises InvalidInputError if nothing is about it, or if several commands begin so."""
    kind, _, number = about.partition(":")
    if (step := step_of(about)) is not None:
        chosen = [event for event in events if step in (event.step, getattr(event.data, "step", None))]
        return Story(tuple(chosen), (step,), tuple(plan for plan in plans if plan.step == step))
    if kind != "rank" or not number.isdecimal():
        return _of_command(events, about, plans)
    if int(number) not in nodes:
        raise InvalidInputError("--story", f"the run has no rank {number}")
    return Story(tuple(_of_rank(events, int(number), nodes)), ())


def _of_command(events: Sequence[Event], about: str, plans: Sequence[StepPlan]) -> Story:
    """A command's outcome and what it did, what undid it, whether its step was made again, and what carried it."""
    named = {event.command for event in events if event.command}.union(*(plan.commands for plan in plans))
    ids = sorted(id for id in named if id.startswith(about))
    if len(ids) != 1 and about not in ids:
        none = f"nothing is recorded about a command {about}: it wasn't accepted, or waits; give {FORMS}"
        raise InvalidInputError("--story", f"several commands begin so: {', '.join(ids)}" if ids else none)
    id = about if about in ids else ids[0]
    own = [event for event in events if event.command == id]
    steps = {event.step for event in own if event.outcome == "applied" and event.step is not None}
    chosen = (
        event
        for event in events
        if id in (event.command, event.undoes)
        or (isinstance(event.data, StepRetracted) and event.data.step in steps and event.id > own[0].id)
    )
    return Story(tuple(chosen), tuple(sorted(steps)), tuple(plan for plan in plans if id in plan.commands))


def _of_rank(events: Iterable[Event], rank: int, nodes: Mapping[int, str]) -> list[Event]:
    """Return the events that name the rank or its node, or change its share, and the groups that it joined or left."""
    node = nodes[rank]
    others = [other for other in nodes if other != rank and nodes[other] == node]
    # A node of several ranks is named with the rank that is meant, and alone where all are.
    name = re.compile(rf"(?<![\w.-]){re.escape(node)}(?! \(rank (?!{rank}\))|[\w-])" if others else _word(node))
    chosen, was_in = [], False
    for event in events:
        match event.data:
            case GenerationFormed(ranks=ranks):
                concerns = (rank in ranks) != was_in or node in (*event.data.behind, event.data.source)
                was_in = rank in ranks
            case SharesChanged(before=before, after=after):
                named = (event.data.lost, event.data.returned, event.data.node, event.data.cause)
                concerns = before.get(node) != after.get(node) or any(map(name.search, named))
            case data:
                concerns = event.by == node or _names(msgspec.to_builtins(data), name, rank)
        if concerns:
            chosen.append(event)
    return chosen


def _word(text: str) -> str:
    return rf"(?<![\w.-]){re.escape(text)}(?![\w-])"


def _names(data: Any, name: re.Pattern[str], rank: int) -> bool:
    match data:
        case str():
            return name.search(data) is not None
        case dict():
            return data.get("rank") == rank or any(_names(value, name, rank) for value in data.values())
        case list() | tuple():
            return any(_names(value, name, rank) for value in data)
        case _:
            return False
