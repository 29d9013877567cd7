"""An event in one line, the same on the screen and on the command line."""

from typing import Any

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.messages import event_prose


def words(event: m.Event, arrow: str = event_prose.ARROW) -> str:
    """What it says, and at which step unless that is part of it."""
    is_said = getattr(event.data, "step", None) is not None
    step = "" if event.step is None or is_said else f" @{event.step:,}"
    return event.text.replace(event_prose.ARROW, arrow) + step


def with_words(event: m.Event) -> dict[str, Any]:
    """The event for a script: its fields, and beside its data the same in words."""
    words = {"kind": event.kind, "text": event.text, "before": event.before, "after": event.after}
    return {**msgspec.to_builtins(event), **words}
