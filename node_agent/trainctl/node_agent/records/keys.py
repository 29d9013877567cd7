"""Keys under which a run's record keeps values that are not rows of a table, and how such a value is read."""

from pathlib import Path
from typing import TypeVar

import msgspec

from trainctl.protocol.errors import DamagedError
from trainctl.protocol.record.reader import VIEW_KEY
from trainctl.protocol.record.schema import VALUES_FROM

T = TypeVar("T")

DURABLE_KEY = "conductor"
"""Key of the state that the conductor must not lose."""
ALERTS_KEY = "alerts"
"""Key of the open alerts and mutes, which the run's other nodes keep too."""
NODE_TIMES_KEY = "node-times"
"""Key of the time that each node took part, which its cost is made from."""
ETA_KEY = "eta"
"""Key of what was measured for the time left."""
GENERATION_KEY, HANDED_OVER_KEY = "generation", "handed-over"
EVENTS_KEY = "events-reserved"
"""Key of the highest id that an event may have had, by the disk: one that a power cut took is never given again."""
OWN_KEYS = frozenset({VIEW_KEY, GENERATION_KEY, HANDED_OVER_KEY, EVENTS_KEY, VALUES_FROM})
"""Keys of this node's own state, which is not copied to others."""


def settings_key(plan_version: int) -> str:
    """Return the key under which the record keeps the settings of a plan version."""
    return f"settings-{plan_version}"


def decoded(text: str, kind: type[T], record: Path) -> T:
    """A value of the conductor's. Raises DamagedError naming the `record` that it was read from."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise DamagedError(str(record), f"its conductor's saved state cannot be read: {error}") from None
