"""A screen that is drawn whole once where Textual would several times: when it opens, is laid out, and is laid out
again for what it holds, each of which says that all has changed."""

from typing import Any

from textual.screen import Screen
from textual.timer import Timer

from trainctl.tui.terminal import guard

FRAME_SECONDS = 0.005
"""From one such word to the next at most, for them to be of one frame."""
MOST_WORDS = 4


class OneFrame(Screen[Any]):
    """To be named before the kind of screen that it is."""

    _whole: Timer | None = None
    _words = 0

    if guard.allows("frame batching"):

        def _compositor_refresh(self) -> None:
            """Textual's, but the whole screen waits for what else comes with it."""
            changed = self._compositor._dirty_regions
            if self.app.screen is not self or self.app.is_inline or self._compositor.size.region not in changed:
                super()._compositor_refresh()
            elif self._whole is None:
                self._whole, self._words = self.set_timer(FRAME_SECONDS, self._draw_whole), 1
            elif self._words < MOST_WORDS:
                self._words += 1
                self._whole.reset()

    def _draw_whole(self) -> None:
        self._whole = None
        super()._compositor_refresh()
