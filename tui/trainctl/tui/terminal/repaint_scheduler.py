"""Repaints for new data, in parts, so that a key is handled and shown between two of them.

A repaint begins a moment after a step has come, at most twice a second, and less often where that would cost too much.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from textual.app import App

from trainctl.protocol.messages import Heartbeat, HostReading, NodeView

REPAINT_SECONDS = 0.5
KEY_SECONDS = 0.03  # after a key a repaint waits so long, for what the key does to be on screen
KEYS_SECONDS = 0.25  # and no longer than this for several
_UNHURRIED = (HostReading, Heartbeat, NodeView)  # nobody waits for these: they come each second from each node

SLOWEST_SECONDS = 0.95  # what arrives is still shown within a second
IDLE_SECONDS = 1.2  # between two repaints with nothing new, for the ages
DEAR, CHEAP = 0.025, 0.015
"""Shares of a core from which on the pause between repaints grows, and under which it shrinks again."""
STEP = 1.25


class RepaintThrottle:
    """Pure: the pause between two repaints, set by what has come and by the processor time that the program takes."""

    def __init__(self, quickest_seconds: float) -> None:
        self._quickest = self.seconds = quickest_seconds
        self._before: tuple[float, float] | None = None
        self._began = -math.inf
        self._first = self._prompt = math.inf  # when something came first, and something that is shown promptly

    @property
    def due(self) -> float:
        """Return when to repaint next, by the monotonic clock."""
        wanted = min(self._prompt, self._first + SLOWEST_SECONDS, self._began + IDLE_SECONDS)
        return max(wanted, self._began + self.seconds)

    def told(self, now: float, *, prompt: bool) -> bool:
        """Note something that is to be shown promptly or within a second; return whether `due` is another now."""
        before = self.due
        self._first = min(self._first, now)
        if prompt:
            self._prompt = min(self._prompt, now)
        return self.due != before

    def begun(self, now: float) -> None:
        """Note that a repaint begins, of all that has come."""
        self._began = now
        self._first = self._prompt = math.inf

    def after(self, cpu_seconds: float, now: float) -> None:
        """Note the end of a repaint, with the processor time taken so far and a monotonic clock."""
        if self._before is not None and now > self._before[1]:
            share = (cpu_seconds - self._before[0]) / (now - self._before[1])
            if share > DEAR:
                self.seconds = min(self.seconds * STEP, SLOWEST_SECONDS)
            elif share < CHEAP:
                self.seconds = max(self.seconds / STEP, self._quickest)
        self._before = cpu_seconds, now


class RepaintScheduler:
    """`parts` begins a repaint, each step of which is a part of it; it has seen all that has come when it begins."""

    def __init__(self, app: App[Any], parts: Callable[[], Iterator[None]]) -> None:
        self._app, self._parts = app, parts
        self._throttle = RepaintThrottle(REPAINT_SECONDS)
        self._timer: asyncio.TimerHandle | None = None
        self._running: Iterator[None] = iter(())
        self._pressed = self._begun = 0.0  # the last key, and the repaint under way

    def start(self) -> None:
        """Begin to repaint, in the app's own loop."""
        self._wait()

    def told(self, message: object) -> None:
        """Note that something has come."""
        changed = self._throttle.told(time.monotonic(), prompt=not isinstance(message, _UNHURRIED))
        if changed and self._timer is not None:
            self._wait()

    def pressed(self) -> None:
        """Note that a key has come, which goes first."""
        self._pressed = time.monotonic()

    def _wait(self) -> None:
        self._later(self._throttle.due - time.monotonic(), self._begin)

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        """Call a function later as a message of the app's, behind those that it has; a Textual timer is a task of its
        own each time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), self._app.call_later, then)

    def _begin(self) -> None:
        self._timer = None
        self._begun = time.monotonic()
        self._throttle.begun(self._begun)
        self._running = self._parts()
        self._go_on()

    def _go_on(self) -> None:
        """Draw the next part in a turn of the loop of its own."""
        self._timer, now = None, time.monotonic()
        left = min(self._pressed + KEY_SECONDS, self._begun + KEYS_SECONDS) - now
        if left > 0:
            self._later(left, self._go_on)
        elif self._drawn():
            self._throttle.after(time.process_time(), now)
            self._wait()
        else:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _drawn(self) -> bool:
        try:
            return next(self._running, self) is self
        except Exception as error:  # noqa: BLE001  raised again in a message, where Textual ends the program and reports it
            self._app.call_later(_raise, error)
            return True


def _raise(error: Exception) -> None:
    raise error
