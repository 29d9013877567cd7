"""Why an alert is: what was at hand when it was raised, and what is so now."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from trainctl.protocol import messages as m
from trainctl.tui.commands.context import AppContext, context_of
from trainctl.tui.commands.dispatch import acknowledge, mute
from trainctl.tui.dialogs import alert_text
from trainctl.tui.terminal.frame_batching import OneFrame
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line, Piece, line
from trainctl.tui.widgets.line_view import Lines

_CELLS = 68
_REFRESH_SECONDS = 0.5


class WhyScreen(OneFrame, ModalScreen[None]):
    """One alert; it goes on being shown after it has been cleared."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,w,enter", "close", "close"),
        Binding("A", "acknowledge", "acknowledge"),
        Binding("m", "mute", "mute"),
    ]

    def __init__(self, alert: m.AlertView, glyphs: Glyphs) -> None:
        super().__init__()
        self._alert, self._glyphs = alert, glyphs

    @property
    def _owner(self) -> AppContext:
        return context_of(self)

    def compose(self) -> ComposeResult:
        box = Vertical(id="why")
        box.border_title = f"why: {alert_text.title(self._alert)}"
        with box:
            yield Lines(self._glyphs, id="why-text", grow=True)

    def on_mount(self) -> None:
        self.set_class(self._glyphs.ascii_only, "ascii")
        self._show()
        self.set_interval(_REFRESH_SECONDS, self._show)

    def _show(self) -> None:
        """The alert as it is by now."""
        state, clock = self._owner.shown, self._owner.clock
        found = next((alert for alert in state.open_alerts if alert.id == self._alert.id), None)
        self._alert = found or self._alert
        made: list[Line] = [(), *alert_text.detail_lines(self._alert, state, clock, _CELLS), ()]
        if found is None:
            made.append(line(Piece("it is over by now", "good")))
        keys = [("A", "acknowledges", "screen.acknowledge"), ("m", "mutes an hour", "screen.mute")] if found else []
        keys.append(("esc", "closes", "screen.close"))
        pieces = [piece for key, words, action in keys
                  for piece in (Piece(key, "key", action), Piece(f" {words}  ", "label", action))]  # fmt: skip
        self.query_one("#why-text", Lines).show([*made, line(*pieces)])

    def action_acknowledge(self) -> None:
        acknowledge(self._owner, self._alert)

    def action_mute(self) -> None:
        mute(self._owner, self._alert)

    def action_close(self) -> None:
        self.dismiss()
