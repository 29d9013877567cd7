"""Commands as a person gives them: what a dialog asks, and how far a command has come."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs
from trainctl.tui.commands.command import Order
from trainctl.tui.state.rank_speed import HELD_STATES, live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line, Piece, clean, line


@dataclass(frozen=True)
class FormField:
    """One thing a dialog asks for: typed, or one of `choices`."""

    name: str
    label: str
    value: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """A dialog: what it asks, what the command changes and what it leaves alone, and the state it was computed from."""

    verb: str
    title: str
    fields: tuple[FormField, ...]
    changes: str
    keeps: str
    run: str | None
    if_plan: int | None
    ask_yes: bool = False  # only `y` sends
    blocked: str = ""  # why it can't be sent at all
    id: str | None = None  # the command's; None: the client makes one
    undoes: str | None = None  # what it takes back, as in its command
    remarks: tuple[str, ...] = ()  # what else there is to be said of it


@dataclass(frozen=True)
class Progress:
    """How far a command has come; `reply` is the newest one, `problem` why none came."""

    order: Order
    sent_at: float
    accepted: bool = False
    reply: m.CommandReply | None = None
    problem: str = ""

    @property
    def ended(self) -> bool:
        return bool(self.problem) or (self.reply is not None and self.reply.state in m.FINAL_COMMAND_STATES)


_TITLES = {
    "resize-batch": "resize micro-batch", "set-lr": "learning rate", "set-global-batch": "global batch",
    "rebalance": "split of the global batch", "drain": "drain a node", "admit": "admit a node",
    "promote": "have a node conduct the run", "acknowledge": "acknowledge an alert", "mute": "mute a kind of alert",
}  # fmt: skip
"""Dialog titles that say more than the verb."""
_EFFECTS = {
    "resize-batch": ("samples a forward/backward pass: speed and memory", "loss, global batch, learning rate"),
    "rebalance": ("who takes how many samples: speed only", "loss, global batch, learning rate, micro-batches"),
    "drain": ("the node leaves the group; the others take its samples", "the curve; its trainer waits for admit"),
    "admit": ("the node joins the group again, levelled to the others", "the curve, the global batch"),
    "promote": (
        "who conducts: by the lead's hand, or a majority where it is gone", "the curve, ranks and shares; one fence"
    ),
    "set-lr": ("the optimisation, from the step it is applied at", "batch, shares, micro-batches"),
    "set-global-batch": ("the optimisation: samples a step over all ranks", "micro-batches"),
    "checkpoint": ("one is written at the next step boundary", "everything else"),
    "pause": ("training waits after the step in progress", "the run, its plan and its memory; resume goes on"),
    "resume": ("training goes on from where it was paused", "everything else"),
    "stop": ("the run ends after the step in progress", "its record and checkpoints; it can be taken up again"),
    "acknowledge": ("the alert calls nobody any more until it is raised again", "that it is open, and kept"),
    "mute": ("who is called: no bell, no hook, no count", "what is watched and kept in the record"),
    "note": ("a line in the run's events", "everything else"),
    "evaluate": ("the loss on held-out samples, at the next step boundary", "everything else"),
    "start-run": ("a run begins or is taken up again", "other runs' records"),
}  # fmt: skip


def form(verb: str, state: ViewState, rank: int | None = None, values: Mapping[str, str] | None = None) -> Form:
    """The dialog of a verb, filled from the state; `values` override what its fields start with."""
    run = state.run
    given = dict(values or {})
    changes, keeps = _EFFECTS.get(verb, (verbs.VERBS[verb].summary, "nothing is promised"))
    fields = tuple(
        FormField(item.name, item.label, given.get(item.name, item.value), item.choices)
        for item in _fields(verb, state, rank)
    )
    blocked = ""
    idle = verb in ("acknowledge", "mute") and not state.active  # about a machine: that takes no run
    if verb != "start-run" and run is not None and run.recording:
        blocked = "a recording takes no commands"
    elif verb == "start-run" or idle:
        blocked = ""
    elif run is None:
        blocked = "there is no run to command"
    elif not state.active and verb != "note":
        blocked = f"the run has {'failed' if run.state == 'failed' else 'ended'}: {verb} has nothing to act on"
    elif verb == "rebalance" and len(live_ranks(run)) < 2:
        blocked = "one rank takes the whole batch: there is nothing to split"
    elif verb == "promote" and not fields[0].choices:
        blocked = "no other node has a rank of the run"
    elif verb == "admit" and not fields[0].choices:
        blocked = "no node is drained or has failed"
    return Form(
        verb, _TITLES.get(verb, verb), fields, changes, keeps,
        run=run.run if run and verb != "start-run" and not idle else None,
        if_plan=run.plan_version if run and verb in _PLAN_VERBS else None,
        ask_yes=verb in ("stop", "promote"), blocked=blocked,
    )  # fmt: skip


def start_form() -> Form:
    """The dialog that starts a run from a file."""
    changes, keeps = _EFFECTS["start-run"]
    return Form("start-run", "start a run", (FormField("file", "run file"),), changes, keeps, run=None, if_plan=None)


_PLAN_VERBS = frozenset({"resize-batch", "rebalance", "set-lr", "set-global-batch"})
"""Verbs whose values were computed against a plan."""


def _fields(verb: str, state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    run = state.run
    match verb:
        case "resize-batch":
            views = list(live_ranks(run))
            view = next((item for item in views if item.rank == rank), views[0] if views else None)
            nodes = tuple(dict.fromkeys(item.node for item in views))
            return (
                FormField("node", "node", view.node if view else "", nodes),
                FormField("micro", "micro-batch", str(view.micro_batch) if view else ""),
            )
        case "drain" | "admit":
            ranks = run.ranks if run else ()
            views = [v for v in ranks if (v.state in HELD_STATES if verb == "admit" else v.state != "drained")]
            chosen = next((view.node for view in views if view.rank == rank), views[0].node if views else "")
            return (FormField("node", "node", chosen, tuple(dict.fromkeys(view.node for view in views))),)
        case "promote":
            others = tuple(dict.fromkeys(view.node for view in run.ranks if view.node != run.lead)) if run else ()
            mine = next((view.node for view in run.ranks if view.rank == rank), "") if run else ""
            chosen = mine if mine in others else next(iter(others), "")
            off = FormField("old_lead_is_off", "lead is surely off", "false", ("false", "true"))
            return (FormField("node", "node", chosen, others), off)
        case "set-lr":
            value = FormField("value", "learning rate", f.scientific(run.learning_rate) if run else "")
            return value, FormField("schedule", "schedule", "scale", ("scale", "set"))
        case "set-global-batch":
            value = FormField("value", "samples a step", str(run.global_batch) if run else "")
            return value, FormField("schedule", "schedule", "set", ("set", "scale"))
        case "stop":
            return (FormField("checkpoint", "checkpoint first", "true", ("true", "false")),)
        case "acknowledge":
            return (FormField("id", "alert", next((alert.id for alert in state.calling), "")),)
        case "mute":
            alert = next(iter(state.calling), None)
            return (
                FormField("kind", "kind", alert.kind if alert else ""),
                FormField("node", "node (empty: all)", alert.node if alert else ""),
                FormField("minutes", "minutes", "60"),
            )
        case "note":
            return (FormField("text", "text"),)
        case "start-run":
            return (FormField("resume", "run to take up"),)
    return ()


_OUT_WORDS = {
    "drained": "is drained; :admit --node {node} takes it back", "failed": "failed; :admit --node {node} takes it back",
    "lost": "is lost and takes no samples until it is back", "rejoining": "is on its way back, and joins by itself",
}  # fmt: skip


def way_back(state: ViewState) -> list[str]:
    """For each node that is out, how it comes back."""
    made = {}
    for view in state.run.ranks if state.run else ():
        gone = view.state == "failed" and view.pid is None
        if view.state in _OUT_WORDS:
            made[clean(view.node)] = "failed, and its trainer is gone" if gone else _OUT_WORDS[view.state]
    return [f"{node} {words.format(node=node)}" for node, words in made.items()]


def order_of(asked: Form, values: Mapping[str, str]) -> Order:
    """The command a filled dialog means. Raises InvalidInputError naming the field, as the agent would."""
    texts = {name: value.strip() for name, value in values.items() if name != "node"}
    args = verbs.parse_args(asked.verb, texts)
    node = values.get("node") or None
    verbs.check(asked.verb, args, node)
    return Order(asked.verb, args, node, asked.run, asked.if_plan, asked.id, undoes=asked.undoes)


def progress_line(progress: Progress, glyphs: Glyphs) -> Line:
    """`sent → accepted → applied @ step 120  micro 8 → 4`, or where it stopped and why."""
    arrow = Piece(f" {glyphs.arrow} ", "dim")
    parts = [Piece("sent", "label")]
    if progress.accepted:
        parts += [arrow, Piece("accepted", "accent")]
    if progress.problem:
        return line(*parts, arrow, Piece(f"no answer: {clean(progress.problem)}", "bad"))
    reply = progress.reply
    if reply is None or reply.state == "accepted":
        return line(*parts, Piece(f" {glyphs.ellipsis}", "dim"))
    if reply.state == "applied":
        at = f" @ step {reply.step:,}" if reply.step is not None else ""
        change = f"  {clean(reply.before)} {glyphs.arrow} {clean(reply.after)}" if reply.before and reply.after else ""
        return line(*parts, arrow, Piece(f"applied{at}", "good"), change)
    where = f"{reply.field}: " if reply.field else ""
    return line(*parts, arrow, Piece(f"{reply.state}: {clean(where + (reply.reason or 'no reason given'))}", "bad"))
