"""Verbs that do something between two steps: checkpoint, evaluate, sample, profile, defragment. Pure."""

from trainctl.protocol.messages import event_prose
from trainctl.protocol.messages.events import CheckpointWritten, Evaluated
from trainctl.tui.commands.verb_description import FormField, Proposal, VerbDescription, VerbKey
from trainctl.tui.text.formatting import loss, seconds
from trainctl.tui.text.styled_line import clean


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
