"""Verbs about alerts: acknowledge one, mute a kind of them. Pure."""

from trainctl.protocol import messages as m
from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, VerbDescription
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _acknowledge_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("id", "alert", next((alert.id for alert in state.calling), "")),)


def _acknowledge_preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    alert = next((alert for alert in state.open_alerts if alert.id == order.args["id"]), None)
    return clean(f"{alert.node} {alert.text}".strip()) if alert else VERBS["acknowledge"].summary


ACKNOWLEDGE = VerbDescription(
    "acknowledge",
    title="acknowledge an alert",
    changes="the alert stays silent until it is raised again",
    keeps="the alert stays open and recorded",
    acts_on="alerts",
    fields=_acknowledge_fields,
    preview=_acknowledge_preview,
    undo="an acknowledged alert stays acknowledged",
)


def _mute_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    alert = next(iter(state.calling), None)
    return (
        FormField("kind", "kind", alert.kind if alert else ""),
        FormField("node", "node (empty: all)", alert.node if alert else ""),
        FormField("minutes", "minutes", "60"),
    )


def _mute_preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    where, minutes = f" of {clean(order.node)}" if order.node else "", float(order.args.get("minutes", 60))
    calling = f"muted for {minutes:g} min (still recorded)" if minutes else "no longer muted"
    return f"{order.args['kind']} alerts{where} {calling}"


MUTE = VerbDescription(
    "mute",
    title="mute a kind of alert",
    changes="these alerts ring no bell, call no hook and aren't counted",
    keeps="they are still watched and recorded",
    acts_on="alerts",
    fields=_mute_fields,
    preview=_mute_preview,
    undo="mute with minutes=0 ends it",
)

DESCRIPTIONS = (ACKNOWLEDGE, MUTE)
