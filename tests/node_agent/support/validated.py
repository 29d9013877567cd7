"""Conductors that check the promises of their state after every event."""

from typing import Any
from weakref import WeakKeyDictionary

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.validation import Mark, validate

_marks: WeakKeyDictionary[Conductor, Mark] = WeakKeyDictionary()
_handle = Conductor.handle


def handle(conductor: Conductor, event: Any, now: float) -> list[d.Decision]:
    """`Conductor.handle`, and then `validate`."""
    decisions = _handle(conductor, event, now)
    _marks[conductor] = validate(conductor.shared, decisions, _marks.get(conductor, Mark()))
    return decisions
