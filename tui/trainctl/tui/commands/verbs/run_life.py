"""Verbs about a run as a whole, what it does between two steps, its policies and its alerts. Pure."""

from typing import get_args

from trainctl.protocol.config.policies import POLICIES, PolicyMode
from trainctl.protocol.messages import ACTIVE_RUN_STATES, Event, PolicyView, RunView, event_prose, verbs
from trainctl.protocol.messages.events import CheckpointWritten, Evaluated, PolicyModeChanged
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, Proposal, VerbDescription, VerbKey, within
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.formatting import loss, seconds
from trainctl.tui.text.styled_line import clean

_PAUSED = ("pausing", "paused")


def _acknowledge_preview(proposal: Proposal) -> str:
    alert = next((alert for alert in proposal.state.open_alerts if alert.id == proposal.order.args["id"]), None)
    return clean(f"{alert.node} {alert.text}".strip()) if alert else verbs.VERBS["acknowledge"].summary


def _mute_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    alert = next(iter(state.calling), None)
    return (
        FormField("kind", "kind", alert.kind if alert else ""),
        FormField("node", "node (empty: all)", alert.node if alert else ""),
        FormField("minutes", "minutes", "60"),
    )


def _mute_preview(proposal: Proposal) -> str:
    order = proposal.order
    where, minutes = f" of {clean(order.node)}" if order.node else "", float(order.args.get("minutes", 60))
    calling = f"muted for {minutes:g} min (still recorded)" if minutes else "no longer muted"
    return f"{order.args['kind']} alerts{where} {calling}"


def _start_run_preview(proposal: Proposal) -> str:
    resumed, branch = proposal.order.args.get("resume"), proposal.order.args.get("branch")
    if branch is not None:
        parent, step = verbs.branch_point(branch)
        which = f"checkpoint of step {step:,}" if step is not None else "newest checkpoint"
        return f"a new run from the {which} of {clean(parent)}"
    if resumed is None:
        return "a run from a run file"
    return f"resumes {clean(resumed)} from its newest checkpoint or its ranks' state"


def _pause_undo(event: Event, run: RunView) -> Order:
    if run.state not in _PAUSED:
        raise NoInverse(f"the run is already {run.state}")
    return Order("resume")


def _pause_stands_for(state: ViewState) -> str:
    """Return the verb of the key: it continues a run that is paused."""
    return "resume" if state.run is not None and state.run.state in _PAUSED else "pause"


def _resume_undo(event: Event, run: RunView) -> Order:
    if run.state in _PAUSED:
        raise NoInverse(f"the run is already {run.state}")
    return Order("pause")


def _rollback_preview(proposal: Proposal) -> str:
    args, now = proposal.order.args, proposal.run.step
    step, skips = args.get("step"), args.get("skip_batches")
    latest = f"the newest checkpoint up to step {max(0, now - args.get('steps', 1)):,}"
    where = f"step {step:,}" if step is not None else latest
    skipped = f"; doesn't train on the samples of the {skips:,} global batches after it" if skips else ""
    return f"goes back from step {now:,} to {where}{skipped}: changes the curve"


def _stop_preview(proposal: Proposal) -> str:
    last = "with a checkpoint first" if proposal.order.args.get("checkpoint", True) else "WITHOUT a checkpoint"
    return f"ends after step {proposal.run.step + 1:,}{within(proposal.state)}, {last}"


def _stop_undo(event: Event, run: RunView) -> Order:
    if run.state in ACTIVE_RUN_STATES:
        raise NoInverse("the run is already continuing")
    return Order("start-run", {"resume": run.run})


def _autopilot_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    modes = {view.name: view.mode for view in state.run.policies} if state.run else {}
    name = FormField("name", "policy", next(iter(POLICIES)), tuple(POLICIES))
    return name, FormField("mode", "mode", modes.get(name.value, ""), get_args(PolicyMode))


def _autopilot_preview(proposal: Proposal) -> str:
    name, mode = proposal.order.args["name"], proposal.order.args["mode"]
    policies = proposal.run.policies
    before = next((f"{view.mode} → " for view in policies if view.name == name), "")
    may_change = mode == "on" and POLICIES[name].changes_curve
    curve = "may change the curve when it acts" if may_change else "curve unchanged"
    return f"{name} {before}{mode}: {POLICIES[name].summary}; {curve}"


def _autopilot_undo(event: Event, run: RunView) -> Order:
    if not isinstance(event.data, PolicyModeChanged):
        raise NoInverse("the previous mode isn't known")
    name, before = event.data.name, event.data.before
    if any((view.name, view.mode) == (name, before) for view in run.policies):
        raise NoInverse(f"{name} is already {before} again")
    return Order("autopilot", {"name": name, "mode": before})


def _checkpoint_preview(proposal: Proposal) -> str:
    written = (event.data for event in reversed(proposal.state.run_events) if isinstance(event.data, CheckpointWritten))
    last = next((data for data in written if data.size_bytes is not None), None)
    cost = event_prose.checkpoint_cost(last).removeprefix(", ") if last is not None else ""
    known = f"the last one: {cost}" if last is not None else "its size isn't known until the first one"
    return f"writes step {proposal.run.step:,} or the next one; {known}; curve unchanged"


def _evaluate_preview(proposal: Proposal) -> str:
    run = proposal.run
    if run.eval_loss is None or run.eval_step is None:
        return "no earlier evaluation to predict its duration from; curve unchanged"
    made = (event.data for event in reversed(proposal.state.run_events) if isinstance(event.data, Evaluated))
    length = next((data.seconds for data in made if data.seconds is not None), None)
    took = f", took {seconds(length)}" if length is not None else ""
    return f"the last one: {loss(run.eval_loss)} @{run.eval_step:,}{took}; curve unchanged"


def _sample_preview(proposal: Proposal) -> str:
    what = "the prompt" if proposal.order.args.get("prompt") else "the run file's prompts"
    return f"one rank answers {what} after step {proposal.run.step:,} while the others wait; curve unchanged"


def _profile_preview(proposal: Proposal) -> str:
    args = proposal.order.args
    steps, nodes = args.get("steps", 3), clean(", ".join(args.get("nodes", ()))) or "all nodes"
    which = f"the next {steps} steps" if steps != 1 else "the next step"
    return f"records {which} on {nodes} after one that warms up; these steps are slower; curve unchanged"


DESCRIPTIONS = (
    VerbDescription(
        "start-run",
        changes="a run starts or resumes",
        keeps="other runs' records",
        acts_on="new run",
        fields=(FormField("resume", "run to resume"),),
        preview=_start_run_preview,
        undo="stop ends the run",
    ),
    VerbDescription(
        "pause",
        changes="training waits after the step in progress",
        keeps="the run, its plan and its memory; resume continues",
        preview=lambda proposal: (
            f"pauses after step {proposal.run.step + 1:,}{within(proposal.state)}; curve unchanged"
        ),
        undo=_pause_undo,
        key=VerbKey("p", "pause", "pause or resume", 50, stands_for=_pause_stands_for),
    ),
    VerbDescription(
        "resume",
        changes="training continues where it was paused",
        keeps="everything else",
        preview=lambda proposal: (
            f"continues at step {proposal.run.step + 1:,} with plan v{proposal.run.plan_version}; curve unchanged"
        ),
        undo=_resume_undo,
    ),
    VerbDescription(
        "rollback",
        title="go back to a checkpoint",
        changes="the run continues from an earlier step; later steps are undone, and their checkpoints are set aside",
        keeps="the record of the undone steps, modes of policies",
        fields=(
            FormField("steps", "at least so many steps back", "1"),
            FormField("skip_batches", "batches to skip", "0"),
        ),
        preview=_rollback_preview,
        undo="the run doesn't return to steps that were undone",
        ask="go back?",
    ),
    VerbDescription(
        "stop",
        changes="the run ends after the step in progress",
        keeps="its record and checkpoints; it can be resumed",
        fields=(FormField("checkpoint", "checkpoint first", "true", ("true", "false")),),
        preview=_stop_preview,
        undo=_stop_undo,
        ask="stop it?",
        key=VerbKey("x", "stop", "stop the run", 60),
    ),
    VerbDescription(
        "note",
        changes="a line in the run's events",
        keeps="everything else",
        acts_on="any run",
        fields=(FormField("text", "text"),),
        preview=lambda proposal: f"recorded in the run's events at step {proposal.run.step:,}; curve unchanged",
        undo="a note stays in the record",
        key=VerbKey("n", "note", "write a note", 70),
    ),
    VerbDescription(
        "autopilot",
        title="set a policy's mode",
        changes="what the policy does automatically from now on",
        keeps="what the policy already did",
        fields=_autopilot_fields,
        preview=_autopilot_preview,
        changes_nothing=lambda order, run: PolicyView(order.args["name"], order.args["mode"]) in run.policies,
        undo=_autopilot_undo,
    ),
    VerbDescription(
        "acknowledge",
        title="acknowledge an alert",
        changes="the alert stays silent until it is raised again",
        keeps="the alert stays open and recorded",
        acts_on="alerts",
        fields=lambda state, rank: (FormField("id", "alert", next((alert.id for alert in state.calling), "")),),
        preview=_acknowledge_preview,
        undo="an acknowledged alert stays acknowledged",
    ),
    VerbDescription(
        "mute",
        title="mute a kind of alert",
        changes="these alerts ring no bell, call no hook and aren't counted",
        keeps="they are still watched and recorded",
        acts_on="alerts",
        fields=_mute_fields,
        preview=_mute_preview,
        undo="mute with minutes=0 ends it",
    ),
    VerbDescription(
        "checkpoint",
        changes="a checkpoint is written at the next step boundary",
        keeps="everything else",
        preview=_checkpoint_preview,
        undo="a written checkpoint stays",
        key=VerbKey("c", "ckpt", "write a checkpoint", 40),
    ),
    VerbDescription(
        "evaluate",
        changes="the held-out loss is measured at the next step boundary",
        keeps="everything else",
        preview=_evaluate_preview,
        undo="an evaluation changes nothing",
        key=VerbKey("e", "eval", "evaluate now", 80),
    ),
    VerbDescription(
        "sample",
        title="sample the model",
        changes="the model answers at the next step boundary",
        keeps="everything else",
        fields=(
            FormField("prompt", "prompt", if_empty="the run file's prompts"),
            FormField("max_tokens", "max tokens"),
            FormField("temperature", "temperature"),
        ),
        preview=_sample_preview,
        undo="an answer changes nothing",
        key=VerbKey("i", "sample", "sample the model", 95, shown=False),
    ),
    VerbDescription(
        "profile",
        title="profile the next steps",
        changes="the profiled steps are slower; each rank writes a trace, and the screen Profile shows the operators",
        keeps="everything else, and the speed of later steps",
        fields=(
            FormField("steps", "steps", if_empty="3"),
            FormField("nodes", "nodes, separated by commas", if_empty="all nodes"),
        ),
        preview=_profile_preview,
        undo="a profile changes nothing",
    ),
    VerbDescription(
        "defragment",
        title="clear the allocators' caches",
        changes="memory that no array uses is given back to the device at the next step boundary",
        keeps="everything else",
        preview=lambda proposal: (
            f"clears caches on {proposal.order.node or 'all nodes'}; the next steps may be slower; curve unchanged"
        ),
        undo="clearing caches changes nothing",
    ),
)
