"""`acknowledge`: an open alert calls nobody any more."""

from trainctl.protocol import messages as m
from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, VerbDescription
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("id", "alert", next((alert.id for alert in state.calling), "")),)


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    alert = next((alert for alert in state.open_alerts if alert.id == order.args["id"]), None)
    return clean(f"{alert.node} {alert.text}".strip()) if alert else VERBS["acknowledge"].summary


DESCRIPTION = VerbDescription(
    "acknowledge",
    title="acknowledge an alert",
    changes="the alert stays silent until it is raised again",
    keeps="the alert stays open and recorded",
    acts_on="alerts",
    fields=_fields,
    preview=_preview,
    undo="an acknowledged alert stays acknowledged",
)
