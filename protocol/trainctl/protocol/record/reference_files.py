"""The files of a cache of reference log-probabilities, which trainers write and agents hand on."""

import json
from pathlib import Path
from typing import Any, Final

from trainctl.protocol.security import received_names

VALUES_NAME: Final = "values.bin"
"""Little-endian float32."""
NOTES_NAME: Final = "reference.json"
"""What the values are of, and their SHA-256 digest."""


def stored_digest(folder: Path) -> str:
    """The digest of a folder's values; empty if it holds none that can be read."""
    try:
        with received_names.opened(folder, NOTES_NAME) as file:
            notes: Any = json.load(file)
        found = notes["digest"] if (folder / VALUES_NAME).is_file() else ""
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    return found if isinstance(found, str) else ""
