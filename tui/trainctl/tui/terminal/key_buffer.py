"""Keys close behind an Escape, or behind one that opens a screen: they wait for it, and go where it has led."""

from collections.abc import Awaitable, Callable
from typing import Any

from textual import events
from textual.app import App
from textual.dom import DOMNode

LONGEST_SECONDS = 0.5
"""Keys wait no longer than this, whatever becomes of the Escape."""


class KeyBuffer:
    """Type-ahead: Textual hands a key to what has the focus when it comes, so that one behind an Escape that
    is still on its way would be typed into a field, or at a dialog, that is about to close, and be lost."""

    def __init__(self, app: App[Any], press: Callable[[events.Key], Awaitable[None]]) -> None:
        """`press` is what handles a key."""
        self._app, self._press = app, press
        self._held: list[events.Key] | None = None
        self._times = 0  # that something was waited for

    @property
    def waits(self) -> bool:
        return self._held is not None

    def holds(self, key: events.Key) -> bool:
        """Whether a key has to wait; it is pressed again by itself."""
        if self._held is None:
            return False
        self._held.append(key)
        return True

    def wait_for(self, at: DOMNode) -> None:
        """Hold keys until what `at` has been handed by now has gone from there up to the app."""
        self._held, self._times = [], self._times + 1
        self._app.set_timer(LONGEST_SECONDS, lambda time=self._times: self._app.call_later(self._release, time))
        self._follow(at, self._times)

    def _follow(self, at: DOMNode, time: int) -> None:
        """Goes behind it, from each to the one above."""
        while at is not self._app:
            above = at.parent or self._app
            if at.call_later(self._follow, above, time):
                return
            at = above  # it has gone meanwhile
        self._app.call_later(self._release, time)

    async def _release(self, time: int) -> None:
        """Presses what was held, as far as what has to be waited for in turn."""
        if self._held is None or time != self._times:
            return
        held, self._held = self._held, None
        for at, key in enumerate(held):
            if self._held is not None:
                self._held += held[at:]
                return
            await self._press(key)
