"""The open alerts, and why one is: what is wrong, on which node, since when, and what is known of it."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.messages import AlertView
from trainctl.tui.commands.context import acknowledge, mute
from trainctl.tui.dialogs.command_dialog import followed
from trainctl.tui.dialogs.popup import Popup
from trainctl.tui.screens import alerts_view
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.text.styled_line import Line, Piece, key_words, line, rule


class AlertsScreen(BaseScreen):
    """Open alerts; acknowledges and mutes them, and shows why they are."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next alert", show=False),
        Binding("up,k", "move(-1)", "previous alert", show=False),
        Binding("enter", "why", "why", show=False, tooltip="why it is open"),
        Binding("A", "acknowledge", "acknowledge", show=False, tooltip="acknowledge the alert"),
        Binding("m", "mute", "mute", show=False, tooltip="mute its kind for an hour"),
        Binding("B", "bell", "bell", show=False, tooltip="bell on or off"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._chosen = ""  # an alert's id, so that the cursor stays with it

    @property
    def cursor(self) -> int:
        ids = [alert.id for alert in self.owner.shown.open_alerts]
        return ids.index(self._chosen) if self._chosen in ids else 0

    @property
    def chosen(self) -> AlertView | None:
        alerts = self.owner.shown.open_alerts
        return alerts[self.cursor] if alerts else None

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner = self.owner
        state = owner.shown
        count = len(state.open_alerts)
        title = f"─ alerts{f': {count} open' if count else ''} "
        body = alerts_view.panel_lines(state, self.cursor, owner.clock, columns, rows - 2, bell=owner.alert_bell.on)
        return [self.head(columns), rule(columns, (0, title, "title")), *body]

    def action_move(self, by: int) -> None:
        self.action_choose_at(self.cursor + by)

    def action_choose_at(self, index: int) -> None:
        """Move the cursor to a place; a click on the chosen one asks why."""
        alerts = self.owner.shown.open_alerts
        if alerts:
            self._chosen = alerts[min(max(index, 0), len(alerts) - 1)].id
            self.paint()

    def action_why(self) -> None:
        if self.chosen is not None:
            self.owner.action_why(self.chosen.id)

    def action_acknowledge(self) -> None:
        if self.chosen is not None:
            acknowledge(self.owner, self.chosen)

    def action_mute(self) -> None:
        if self.chosen is not None:
            mute(self.owner, self.chosen)

    def action_bell(self) -> None:
        """Turn the bell on or off, for this session."""
        self.owner.alert_bell.on = not self.owner.alert_bell.on
        self.paint()


_REFRESH_SECONDS = 0.5


class WhyScreen(Popup[None]):
    """One alert; it goes on being shown after it has been cleared."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("w,enter", "close", "close"),
        Binding("A", "acknowledge", "acknowledge"),
        Binding("m", "mute", "mute"),
    ]
    CELLS = 68

    def __init__(self, alert: AlertView) -> None:
        super().__init__(f"why: {alerts_view.alert_title(alert)}")
        self._alert = alert

    def on_mount(self) -> None:
        self.set_interval(_REFRESH_SECONDS, self.refresh_text)

    def text(self) -> list[Line]:
        """Return the alert as it is by now."""
        state, clock = self.owner.shown, self.owner.clock
        alert = next((alert for alert in state.open_alerts if alert.id == self._alert.id), None)
        self._alert = alert or self._alert
        lines: list[Line] = [(), *alerts_view.detail_lines(self._alert, state, clock, self.CELLS), ()]
        if alert is None:
            lines.append(line(Piece("this alert has cleared", "good")))
        acts = key_words("A", "acknowledges  ", "screen.acknowledge") + key_words(
            "m", "mute for an hour  ", "screen.mute"
        )
        if self.progress is not None:
            lines += [*followed(self.progress, clock, self.CELLS), ()]
        return [*lines, (*(acts if alert else ()), *key_words("esc", "closes  ", "screen.close"))]

    def action_acknowledge(self) -> None:
        acknowledge(self.owner, self._alert, self)

    def action_mute(self) -> None:
        mute(self.owner, self._alert, self)
