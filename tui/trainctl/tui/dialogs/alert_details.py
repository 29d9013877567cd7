"""Why an alert is: what was at hand when it was raised, and what is so now."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol import messages as m
from trainctl.tui.commands.context import acknowledge, mute
from trainctl.tui.dialogs import alert_text
from trainctl.tui.dialogs.command_dialog import followed
from trainctl.tui.dialogs.popup import Popup
from trainctl.tui.text.styled_line import Line, Piece, key_words, line

_REFRESH_SECONDS = 0.5


class WhyScreen(Popup[None]):
    """One alert; it goes on being shown after it has been cleared."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w,enter", "close", "close"),
        Binding("A", "acknowledge", "acknowledge"),
        Binding("m", "mute", "mute"),
    ]
    CELLS = 68

    def __init__(self, alert: m.AlertView) -> None:
        super().__init__(f"why: {alert_text.title(alert)}")
        self._alert = alert

    def on_mount(self) -> None:
        self.set_interval(_REFRESH_SECONDS, self.refresh_text)

    def text(self) -> list[Line]:
        """The alert as it is by now."""
        state, clock = self.owner.shown, self.owner.clock
        found = next((alert for alert in state.open_alerts if alert.id == self._alert.id), None)
        self._alert = found or self._alert
        made: list[Line] = [(), *alert_text.detail_lines(self._alert, state, clock, self.CELLS), ()]
        if found is None:
            made.append(line(Piece("this alert has cleared", "good")))
        acts = key_words("A", "acknowledges  ", "screen.acknowledge") + key_words(
            "m", "mute for an hour  ", "screen.mute"
        )
        if self.progress is not None:
            made += [*followed(self.progress, clock, self._glyphs, self.CELLS), ()]
        return [*made, (*(acts if found else ()), *key_words("esc", "closes  ", "screen.close"))]

    def action_acknowledge(self) -> None:
        acknowledge(self.owner, self._alert, self)

    def action_mute(self) -> None:
        mute(self.owner, self._alert, self)
