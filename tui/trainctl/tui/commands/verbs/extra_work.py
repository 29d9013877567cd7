"""Verbs that do something between two steps: checkpoint, evaluate, sample, profile, defragment. Pure."""

from trainctl.protocol.messages import RunView, event_prose
from trainctl.protocol.messages.events import CheckpointWritten, Evaluated
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, VerbDescription, VerbKey, no_node
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _checkpoint_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    return f"writes step {run.step:,} or the next one; {_checkpoint_last(state)}; curve unchanged"


def _checkpoint_last(state: ViewState) -> str:
    """`the last one: 0.3 GB, loop paused 14 ms`."""
    for event in reversed(state.run_events):
        if isinstance(event.data, CheckpointWritten) and event.data.size_bytes is not None:
            return f"the last one: {event_prose.checkpoint_cost(event.data).removeprefix(', ')}"
    return "its size isn't known until the first one"


CHECKPOINT = VerbDescription(
    "checkpoint",
    changes="a checkpoint is written at the next step boundary",
    keeps="everything else",
    preview=_checkpoint_preview,
    undo="a written checkpoint stays",
    key=VerbKey("c", "ckpt", "write a checkpoint", 40),
)


def _evaluate_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    return f"{_evaluate_last(state, run)}; curve unchanged"


def _evaluate_last(state: ViewState, run: RunView) -> str:
    """`the last one: 1.903 @18,122, took 2.10 s`."""
    if run.eval_loss is None or run.eval_step is None:
        return "no earlier evaluation to predict its duration from"
    made = (event.data for event in reversed(state.run_events) if isinstance(event.data, Evaluated))
    seconds = next((data.seconds for data in made if data.seconds is not None), None)
    took = f", took {f.seconds(seconds)}" if seconds is not None else ""
    return f"the last one: {f.loss(run.eval_loss)} @{run.eval_step:,}{took}"


EVALUATE = VerbDescription(
    "evaluate",
    changes="the held-out loss is measured at the next step boundary",
    keeps="everything else",
    preview=_evaluate_preview,
    undo="an evaluation changes nothing",
    key=VerbKey("e", "eval", "evaluate now", 80),
)


def _sample_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (
        FormField("prompt", "prompt", if_empty="the run file's prompts"),
        FormField("max_tokens", "max tokens"),
        FormField("temperature", "temperature"),
    )


def _sample_refused(order: Order, state: ViewState, run: RunView) -> str:
    nodes = {view.node for view in live_ranks(run)}
    return no_node(order, run) if order.node is not None and order.node not in nodes else ""


def _sample_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    what = "the prompt" if order.args.get("prompt") else "the run file's prompts"
    return f"one rank answers {what} after step {run.step:,} while the others wait; curve unchanged"


SAMPLE = VerbDescription(
    "sample",
    title="sample the model",
    changes="the model answers at the next step boundary",
    keeps="everything else",
    fields=_sample_fields,
    refused=_sample_refused,
    preview=_sample_preview,
    undo="an answer changes nothing",
    key=VerbKey("i", "sample", "sample the model", 95, shown=False),
)


def _profile_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (
        FormField("steps", "steps", if_empty="3"),
        FormField("nodes", "nodes, separated by commas", if_empty="all nodes"),
    )


def _profile_refused(order: Order, state: ViewState, run: RunView) -> str:
    known = tuple(dict.fromkeys(view.node for view in live_ranks(run)))
    absent = [node for node in order.args.get("nodes", ()) if node not in known]
    if not absent:
        return ""
    return f"no rank of {clean(', '.join(absent))} is in the group; its nodes are {clean(', '.join(known))}"


def _profile_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    steps, nodes = order.args.get("steps", 3), clean(", ".join(order.args.get("nodes", ()))) or "all nodes"
    which = f"the next {steps} steps" if steps != 1 else "the next step"
    return f"records {which} on {nodes} after one that warms up; these steps are slower; curve unchanged"


PROFILE = VerbDescription(
    "profile",
    title="profile the next steps",
    changes="the profiled steps are slower; each rank writes a trace, and the screen Profile shows the operators",
    keeps="everything else, and the speed of later steps",
    fields=_profile_fields,
    refused=_profile_refused,
    preview=_profile_preview,
    undo="a profile changes nothing",
)


def _defragment_refused(order: Order, state: ViewState, run: RunView) -> str:
    nodes = {view.node for view in live_ranks(run)}
    return no_node(order, run) if order.node is not None and order.node not in nodes else ""


def _defragment_preview(order: Order, state: ViewState, run: RunView, glyphs: Glyphs) -> str:
    return f"clears caches on {order.node or 'all nodes'}; the next steps may be slower; curve unchanged"


DEFRAGMENT = VerbDescription(
    "defragment",
    title="clear the allocators' caches",
    changes="memory that no array uses is given back to the device at the next step boundary",
    keeps="everything else",
    refused=_defragment_refused,
    preview=_defragment_preview,
    undo="clearing caches changes nothing",
)

DESCRIPTIONS = (CHECKPOINT, EVALUATE, SAMPLE, PROFILE, DEFRAGMENT)
