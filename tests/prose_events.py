"""Events as records of schema 1 have them, read the way the program reads such a record."""

from typing import Any

from trainctl.protocol import messages as m
from trainctl.protocol.record import schema_1_events


def event(
    *, id: int, at: float, kind: str, text: str = "", verb: str | None = None, before: str | None = None,
    after: str | None = None, outcome: m.CommandState | None = None, command: str | None = None, **rest: Any,
) -> m.Event:  # fmt: skip
    """The event of a row."""
    data = schema_1_events.convert(kind, text, verb, before, after, outcome)
    outcome = outcome or ("applied" if kind == "command" else None)
    return m.Event(
        id=id,
        at=at,
        data=data,
        verb=verb,
        outcome=outcome,
        command=command,
        undoes=schema_1_events.undoes(command),
        **rest,
    )
