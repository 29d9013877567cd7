"""Verbs about a run as a whole, its policies and its alerts. Pure."""

from typing import get_args

from trainctl.protocol.config.policies import POLICIES, PolicyMode
from trainctl.protocol.messages import ACTIVE_RUN_STATES, Event, PolicyView, RunView, verbs
from trainctl.protocol.messages.events import PolicyModeChanged
from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription, VerbKey, within
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _acknowledge_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("id", "alert", next((alert.id for alert in state.calling), "")),)


def _acknowledge_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
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


def _mute_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
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


def _start_run_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("resume", "run to resume"),)


def _start_run_refused(order: Order, state: ViewState, run: RunView) -> str:
    return f"{clean(run.name)} is {run.state}; only one run at a time" if state.active else ""


def _start_run_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    resumed, branch = order.args.get("resume"), order.args.get("branch")
    if branch is not None:
        parent, step = verbs.branch_point(branch)
        which = f"checkpoint of step {step:,}" if step is not None else "newest checkpoint"
        return f"a new run from the {which} of {clean(parent)}"
    if resumed is None:
        return "a run from a run file"
    return f"resumes {clean(resumed)} from its newest checkpoint or its ranks' state"


START_RUN = VerbDescription(
    "start-run",
    changes="a run starts or resumes",
    keeps="other runs' records",
    acts_on="new run",
    fields=_start_run_fields,
    refused=_start_run_refused,
    preview=_start_run_preview,
    undo="stop ends the run",
)


_PAUSED = ("pausing", "paused")


def _pause_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    return f"pauses after step {run.step + 1:,}{within(state)}; curve unchanged"


def _pause_undo(event: Event, run: RunView) -> Order:
    if run.state not in _PAUSED:
        raise NoInverse(f"the run is already {run.state}")
    return Order("resume")


def _pause_stands_for(state: ViewState) -> str:
    """Return the verb of the key: it continues a run that is paused."""
    return "resume" if state.run is not None and state.run.state in _PAUSED else "pause"


PAUSE = VerbDescription(
    "pause",
    changes="training waits after the step in progress",
    keeps="the run, its plan and its memory; resume continues",
    preview=_pause_preview,
    undo=_pause_undo,
    key=VerbKey("p", "pause", "pause or resume", 50, stands_for=_pause_stands_for),
)


def _resume_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    return f"continues at step {run.step + 1:,} with plan v{run.plan_version}; curve unchanged"


def _resume_undo(event: Event, run: RunView) -> Order:
    if run.state in ("pausing", "paused"):
        raise NoInverse(f"the run is already {run.state}")
    return Order("pause")


RESUME = VerbDescription(
    "resume",
    changes="training continues where it was paused",
    keeps="everything else",
    preview=_resume_preview,
    undo=_resume_undo,
)


def _rollback_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("steps", "at least so many steps back", "1"), FormField("skip_batches", "batches to skip", "0"))


def _rollback_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    step, steps, skips = order.args.get("step"), order.args.get("steps", 1), order.args.get("skip_batches")
    latest = max(0, run.step - steps)
    where = f"to step {step:,}" if step is not None else f"to the newest checkpoint up to step {latest:,}"
    skipped = f"; doesn't train on the samples of the {skips:,} global batches after it" if skips else ""
    return f"goes back from step {run.step:,} {where}{skipped}: changes the curve"


ROLLBACK = VerbDescription(
    "rollback",
    title="go back to a checkpoint",
    changes="the run continues from an earlier step; later steps are undone, and their checkpoints are set aside",
    keeps="the record of the undone steps, modes of policies",
    fields=_rollback_fields,
    preview=_rollback_preview,
    undo="the run doesn't return to steps that were undone",
    ask="go back?",
)


def _stop_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("checkpoint", "checkpoint first", "true", ("true", "false")),)


def _stop_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    last = "with a checkpoint first" if order.args.get("checkpoint", True) else "WITHOUT a checkpoint"
    return f"ends after step {run.step + 1:,}{within(state)}, {last}"


def _stop_undo(event: Event, run: RunView) -> Order:
    if run.state in ACTIVE_RUN_STATES:
        raise NoInverse("the run is already continuing")
    return Order("start-run", {"resume": run.run})


STOP = VerbDescription(
    "stop",
    changes="the run ends after the step in progress",
    keeps="its record and checkpoints; it can be resumed",
    fields=_stop_fields,
    preview=_stop_preview,
    undo=_stop_undo,
    ask="stop it?",
    key=VerbKey("x", "stop", "stop the run", 60),
)


def _note_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("text", "text"),)


def _note_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    return f"recorded in the run's events at step {run.step:,}; curve unchanged"


NOTE = VerbDescription(
    "note",
    changes="a line in the run's events",
    keeps="everything else",
    acts_on="any run",
    fields=_note_fields,
    preview=_note_preview,
    undo="a note stays in the record",
    key=VerbKey("n", "note", "write a note", 70),
)


def _autopilot_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    modes = {view.name: view.mode for view in state.run.policies} if state.run else {}
    name = FormField("name", "policy", next(iter(POLICIES)), tuple(POLICIES))
    return name, FormField("mode", "mode", modes.get(name.value, ""), get_args(PolicyMode))


def _autopilot_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    name, mode = order.args["name"], order.args["mode"]
    before = next((f"{view.mode} {glyphs.arrow} " for view in run.policies if view.name == name), "")
    may_change = mode == "on" and POLICIES[name].changes_curve
    curve = "may change the curve when it acts" if may_change else "curve unchanged"
    return f"{name} {before}{mode}: {POLICIES[name].summary}; {curve}"


def _autopilot_changes_nothing(order: Order, run: RunView) -> bool:
    return PolicyView(order.args["name"], order.args["mode"]) in run.policies


def _autopilot_undo(event: Event, run: RunView) -> Order:
    if not isinstance(event.data, PolicyModeChanged):
        raise NoInverse("the previous mode isn't known")
    name, before = event.data.name, event.data.before
    if any((view.name, view.mode) == (name, before) for view in run.policies):
        raise NoInverse(f"{name} is already {before} again")
    return Order("autopilot", {"name": name, "mode": before})


AUTOPILOT = VerbDescription(
    "autopilot",
    title="set a policy's mode",
    changes="what the policy does automatically from now on",
    keeps="what the policy already did",
    fields=_autopilot_fields,
    preview=_autopilot_preview,
    changes_nothing=_autopilot_changes_nothing,
    undo=_autopilot_undo,
)

DESCRIPTIONS = (START_RUN, PAUSE, RESUME, ROLLBACK, STOP, NOTE, AUTOPILOT, ACKNOWLEDGE, MUTE)
