"""Acknowledging and muting from the screen: the commands, sent at once, their end told in a word."""

from typing import TYPE_CHECKING

from trainctl.protocol import messages as m
from trainctl.tui.cli.agent_call import Order
from trainctl.tui.commands import forms

if TYPE_CHECKING:
    from trainctl.tui.app.app import TrainctlApp

MUTE_MINUTES = 60.0


class _Unwatched:
    """Nothing on screen follows the command: the person is told how it ended."""

    watching = False

    def follow(self, progress: forms.Progress) -> None:
        return None


def acknowledge(app: "TrainctlApp", alert: m.AlertView) -> None:
    """Have an alert call nobody any more."""
    _send(app, Order("acknowledge", {"id": alert.id}))


def mute(app: "TrainctlApp", alert: m.AlertView) -> None:
    """Mute an alert's kind on its node for an hour; one that is muted, no longer."""
    minutes = 0.0 if alert.muted else MUTE_MINUTES
    _send(app, Order("mute", {"kind": alert.kind, "minutes": minutes}, alert.node or None))


def _send(app: "TrainctlApp", order: Order) -> None:
    if app.read_only:
        app.notify("read-only: commands are off for this screen", severity="warning")
    else:
        app.send_order(order, _Unwatched())
