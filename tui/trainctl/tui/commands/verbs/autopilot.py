"""`autopilot`: what a policy does by itself."""

from typing import get_args

from trainctl.protocol import messages as m
from trainctl.protocol.config.policies import POLICIES, PolicyMode
from trainctl.protocol.messages.events import PolicyModeChanged
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    modes = {view.name: view.mode for view in state.run.policies} if state.run else {}
    name = FormField("name", "policy", next(iter(POLICIES)), tuple(POLICIES))
    return name, FormField("mode", "mode", modes.get(name.value, ""), get_args(PolicyMode))


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    name, mode = order.args["name"], order.args["mode"]
    before = next((f"{view.mode} {glyphs.arrow} " for view in run.policies if view.name == name), "")
    may_change = mode == "on" and POLICIES[name].changes_curve
    curve = "may change the curve when it acts" if may_change else "curve unchanged"
    return f"{name} {before}{mode}: {POLICIES[name].summary}; {curve}"


def _changes_nothing(order: Order, run: m.RunView) -> bool:
    return m.PolicyView(order.args["name"], order.args["mode"]) in run.policies


def _undo(event: m.Event, run: m.RunView) -> Order:
    if not isinstance(event.data, PolicyModeChanged):
        raise NoInverse("the previous mode isn't known")
    name, before = event.data.name, event.data.before
    if any((view.name, view.mode) == (name, before) for view in run.policies):
        raise NoInverse(f"{name} is already {before} again")
    return Order("autopilot", {"name": name, "mode": before})


DESCRIPTION = VerbDescription(
    "autopilot",
    title="set a policy's mode",
    changes="what the policy does automatically from now on",
    keeps="what the policy already did",
    fields=_fields,
    preview=_preview,
    changes_nothing=_changes_nothing,
    undo=_undo,
)
