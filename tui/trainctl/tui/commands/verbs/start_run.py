"""`start-run`: a run begins, is resumed, or branches off another one."""

from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, VerbDescription
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("resume", "run to resume"),)


def _refused(order: Order, state: ViewState, run: m.RunView) -> str:
    return f"{clean(run.name)} is {run.state}; only one run at a time" if state.active else ""


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    resumed, branch = order.args.get("resume"), order.args.get("branch")
    if branch is not None:
        parent, step = verbs.branch_point(branch)
        which = f"checkpoint of step {step:,}" if step is not None else "newest checkpoint"
        return f"a new run from the {which} of {clean(parent)}"
    if resumed is None:
        return "a run from a run file"
    return f"resumes {clean(resumed)} from its newest checkpoint or its ranks' state"


DESCRIPTION = VerbDescription(
    "start-run",
    changes="a run starts or resumes",
    keeps="other runs' records",
    acts_on="new run",
    fields=_fields,
    refused=_refused,
    preview=_preview,
    undo="stop ends the run",
)
