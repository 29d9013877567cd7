"""When the terminal's bell rings: once for each alert that is raised while the screen is there; pure."""

from trainctl.tui.state.view_state import ViewState


class AlertBell:
    """`on` is the switch; alerts raised while it is off don't ring later."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._known: set[tuple[str, float]] | None = None  # None until the agent has first reported

    def rings(self, state: ViewState) -> bool:
        """Whether an alert that calls for somebody is new since the last time this was asked."""
        if state.heard_at is None or not state.boot:
            return False
        calling = {(alert.id, alert.raised_at) for alert in state.calling}
        new = calling - self._known if self._known is not None else set()
        still_open = {(alert.id, alert.raised_at) for alert in state.open_alerts}
        self._known = calling | ((self._known or set()) & still_open)
        return self.on and bool(new)
