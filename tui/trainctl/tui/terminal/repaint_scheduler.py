"""Repaints for new data, in parts: a key that comes meanwhile is handled between two of them, and shown first."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

from textual.app import App

from trainctl.protocol import messages as m
from trainctl.tui.terminal.rhythm import Rhythm

REPAINT_SECONDS = 0.5
KEY_SECONDS = 0.03
"""After a key a repaint waits so long, for what the key does to be on screen."""
KEYS_SECONDS = 0.25
"""It waits no longer than this for several."""
_UNHURRIED = (m.HostReading, m.Heartbeat, m.NodeView)
"""Nobody waits for these: they come each second from each node."""


class Repainting:
    """`parts` begins a repaint, each step of which is a part of it; it has seen all that has come when it begins."""

    def __init__(self, app: App[Any], parts: Callable[[], Iterator[None]]) -> None:
        self._app, self._parts = app, parts
        self._rhythm = Rhythm(REPAINT_SECONDS)
        self._timer: asyncio.TimerHandle | None = None
        self._running: Iterator[None] = iter(())
        self._pressed = self._begun = 0.0  # the last key, and the repaint under way

    def start(self) -> None:
        """From here on; in the app's own loop."""
        self._wait()

    def told(self, message: object) -> None:
        """Something has come."""
        changed = self._rhythm.told(time.monotonic(), prompt=not isinstance(message, _UNHURRIED))
        if changed and self._timer is not None:
            self._wait()

    def pressed(self) -> None:
        """A key has come, which goes first."""
        self._pressed = time.monotonic()

    def _wait(self) -> None:
        self._later(self._rhythm.due - time.monotonic(), self._begin)

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        """As a message of the app's, behind those that it has; a Textual timer is a task of its own each time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), self._app.call_later, then)

    def _begin(self) -> None:
        self._timer = None
        self._begun = time.monotonic()
        self._rhythm.begun(self._begun)
        self._running = self._parts()
        self._go_on()

    def _go_on(self) -> None:
        """The next part, in a turn of the loop of its own."""
        self._timer, now = None, time.monotonic()
        left = min(self._pressed + KEY_SECONDS, self._begun + KEYS_SECONDS) - now
        if left > 0:
            self._later(left, self._go_on)
        elif self._drawn():
            self._rhythm.after(time.process_time(), now)
            self._wait()
        else:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _drawn(self) -> bool:
        """Draws the next part; whether that was the last."""
        try:
            return next(self._running, self) is self
        except Exception as error:  # noqa: BLE001  as Textual does with what its own messages lead to
            self._app._handle_exception(error)
            return True
