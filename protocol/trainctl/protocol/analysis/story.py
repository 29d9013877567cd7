"""Stories: what a run's events say about one command, one rank or one step, in order. Pure."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Event
from trainctl.protocol.messages.events import GenerationFormed, SharesChanged, StepRetracted

FORMS = "a command's ID or the beginning of it, rank:N or step:N"


@dataclasses.dataclass(frozen=True)
class Story:
    """The events about one thing, and the steps at which commands among them were applied."""

    events: tuple[Event, ...]
    steps: tuple[int, ...]


def tell(events: Sequence[Event], about: str, nodes: Mapping[int, str]) -> Story:
    """Return the story of `about`, one of `FORMS`, from all events of a run, oldest first. `nodes`: by rank. Raises
    InvalidInputError if no event is about it, or if several commands begin so."""
    kind, _, number = about.partition(":")
    if kind not in ("rank", "step") or not number.isdecimal():
        chosen = _of_command(events, about)
    elif kind == "step":
        chosen = [event for event in events if int(number) in (event.step, getattr(event.data, "step", None))]
        return Story(tuple(chosen), (int(number),))
    elif int(number) not in nodes:
        raise InvalidInputError("--story", f"the run has no rank {number}")
    else:
        chosen = _of_rank(events, int(number), nodes)
    applied = {event.step for event in chosen if event.outcome == "applied" and event.step is not None}
    return Story(tuple(chosen), tuple(sorted(applied)) if kind != "rank" else ())


def _of_command(events: Sequence[Event], about: str) -> list[Event]:
    """A command's outcome and what it did, what undid it, and whether its step was made again."""
    ids = sorted({event.command for event in events if event.command and event.command.startswith(about)})
    if len(ids) != 1 and about not in ids:
        none = f"no event is about a command {about}: it waits for its step, or wasn't accepted; give {FORMS}"
        raise InvalidInputError("--story", f"several commands begin so: {', '.join(ids)}" if ids else none)
    id = about if about in ids else ids[0]
    own = [event for event in events if event.command == id]
    steps = {event.step for event in own if event.outcome == "applied"}
    return [
        event
        for event in events
        if id in (event.command, event.undoes)
        or (isinstance(event.data, StepRetracted) and event.data.step in steps and event.id > own[0].id)
    ]


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
