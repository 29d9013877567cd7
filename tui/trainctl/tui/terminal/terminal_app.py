"""An app on a real terminal: updates in fewer bytes, keys that are typed ahead, and characters of ASCII terminals."""

import contextlib
import ctypes
import functools
import gc
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from rich.console import RenderableType
from rich.segment import Segment
from textual import constants, events
from textual.app import App
from textual.color import Color
from textual.dom import DOMNode
from textual.filter import LineFilter
from textual.screen import Screen

from trainctl.tui.terminal import guard
from trainctl.tui.text.ascii import in_same_cells

ESCAPE_SECONDS = 0.025
"""Seconds after which an Escape with nothing behind it is a key, unless ESCDELAY in the environment says otherwise."""
LONGEST_SECONDS = 0.5
"""Keys that are typed ahead wait no longer than this, whatever becomes of the key before them."""


class TypeAhead:
    """Keys that wait until an Escape before them, or a screen that opens, has led where it leads.

    Textual hands a key to what has the focus when it comes: a letter meant for a dialog that is about to open would act
    as a key of the screen below.
    """

    def __init__(self, app: App[Any], press: Callable[[events.Key], Awaitable[None]]) -> None:
        """Take keys for an app; `press` handles one."""
        self._app, self._press = app, press
        self._held: list[events.Key] | None = None

    def holds(self, key: events.Key) -> bool:
        """Keep the key back if it has to wait; it is pressed later. Return whether it was."""
        if self._held is None and not self._app.screen.is_mounted:
            self.wait_for(self._app.screen)
        if self._held is None:
            return False
        self._held.append(key)
        return True

    def wait_for(self, at: DOMNode) -> None:
        """Hold keys until what `at` has been handed by now has gone from there up to the app."""
        held: list[events.Key] = []
        self._held = held
        self._app.set_timer(LONGEST_SECONDS, lambda: self._app.call_later(self._release, held))
        self._follow(at, held)

    def _follow(self, at: DOMNode, held: list[events.Key]) -> None:
        while at is not self._app:
            above = at.parent or self._app
            if at.call_later(self._follow, above, held):
                return
            at = above  # it has closed meanwhile
        self._app.call_later(self._release, held)

    async def _release(self, held: list[events.Key]) -> None:
        if self._held is not held:
            return
        self._held = None
        for number, key in enumerate(held):
            if self._held is not None:  # a key of these opens a screen in turn
                self._held += held[number:]
                return
            await self._press(key)


def _let_escape_lead_before_letters() -> None:
    """Have Textual read Escape with `b` or `f` behind it as it reads the other letters: as alt with the letter.

    It takes these two as a terminal's keys for words, so a dialog's letter right after Escape would be lost.
    """
    with suppress(ImportError):  # its module is private
        from textual._ansi_sequences import ANSI_SEQUENCES_KEYS

        for sequence in ("\x1bb", "\x1bf"):
            ANSI_SEQUENCES_KEYS.pop(sequence, None)  # type: ignore[attr-defined]


class AsciiFilter(LineFilter):
    """The edge of a screen in ASCII: all that is drawn, by Textual's own widgets too, in the cells that it has."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.control or segment.text.isascii() else segment._replace(text=in_same_cells(segment.text))
            for segment in segments
        ]


class TerminalApp(App[int]):
    """Textual's app, which writes its updates in fewer bytes and lets closed screens go."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        let_closed_screens_go()
        _let_escape_lead_before_letters()
        if "ESCDELAY" not in os.environ:
            constants.ESCAPE_DELAY = ESCAPE_SECONDS  # type: ignore[misc]

    if guard.allows("partial update"):

        def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
            from trainctl.tui.terminal.partial_update import compact

            super()._display(screen, compact(renderable))


_METHOD = "get_inner_outer"


def let_closed_screens_go() -> None:
    """Have Textual's styles cache keep its colours by themselves. It keeps two by the cache that asked for them, and so
    keeps alive, of the last thousand widgets, every line they showed after their screen was closed (textual#6665). A
    Textual that does so itself is left as it is."""
    if not guard.allows("styles cache"):
        return
    from textual._styles_cache import StylesCache

    kept: Any = StylesCache.__dict__.get(_METHOD)
    if hasattr(kept, "cache_info"):
        shared = functools.partial(kept.__wrapped__, StylesCache)
        setattr(StylesCache, _METHOD, staticmethod(functools.lru_cache(1024)(shared)))


def give_back() -> None:
    """Drop what is left in cycles, and hand free pages back to the system: after a burst the allocator would keep most
    of them."""
    gc.collect()
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    """Return the C library's `malloc_trim`, where there is one: in glibc."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        found = ctypes.CDLL(None).malloc_trim
        found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
        made: Callable[[int], Any] = found
        return made
    return None
