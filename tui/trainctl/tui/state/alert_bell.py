"""When the terminal's bell rings: once for each alert that is raised while the screen is there; pure."""

from trainctl.tui.state.view_state import ViewState


class AlertBell:
    """`on` is the switch; alerts raised while it is off don't ring later."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._known: set[tuple[str, float]] | None = None  # None until the agent has first told

    def rings(self, state: ViewState) -> bool:
        """Whether an alert that calls for somebody is new since the last time this was asked."""
        if state.heard_at is None or not state.boot:
            return False
        calling = {(alert.id, alert.raised_at) for alert in state.calling}
        new = calling - self._known if self._known is not None else set()
        self._known = calling | {known for known in self._known or set() if known in _open(state)}
        return self.on and bool(new)


def _open(state: ViewState) -> set[tuple[str, float]]:
    return {(alert.id, alert.raised_at) for alert in state.open_alerts}
