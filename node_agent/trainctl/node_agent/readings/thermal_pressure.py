"""macOS's thermal pressure: by how much the system holds the chip back because of heat. Any user may read it.

The level is the state of a Darwin notification (`notify(3)`); its values are those of <OSThermalNotification.h> on a
Mac: 0 nominal, 1 moderate, 2 heavy, 3 trapping, 4 sleeping.
"""

import ctypes
import sys
from typing import Any, Final

NOTIFICATION: Final = b"com.apple.system.thermalpressurelevel"
LEVELS: Final = 5
"""Number of levels; a state that is none of them is ignored."""
_OK = 0
"""`NOTIFY_STATUS_OK`."""


class ThermalPressure:
    """Reads the level; a registration of the notification stays until the process ends."""

    def __init__(self, library: Any = None) -> None:
        """`library`: one with notify(3)'s functions; None: this system's own."""
        self._library = library if library is not None else _own_library()
        self._token = ctypes.c_int()
        known = self._library is not None
        self._known = known and self._library.notify_register_check(NOTIFICATION, ctypes.byref(self._token)) == _OK

    def level(self) -> int | None:
        """0 to 4; None elsewhere than on macOS, or if the system doesn't say."""
        state = ctypes.c_uint64()
        if not self._known or self._library.notify_get_state(self._token, ctypes.byref(state)) != _OK:
            return None
        return state.value if state.value < LEVELS else None


def _own_library() -> Any:
    return ctypes.CDLL(None) if sys.platform == "darwin" else None
