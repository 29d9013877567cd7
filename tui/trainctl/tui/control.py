"""Commands as a person gives them: what a dialog asks and promises, the `:` line's grammar, and how far a command has
come."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from trainctl.protocol import messages as m
from trainctl.protocol import verbs
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui import format as f
from trainctl.tui.calls import Order
from trainctl.tui.glyphs import Glyphs
from trainctl.tui.lines import Line, Piece, clean, line
from trainctl.tui.model import ViewState


@dataclass(frozen=True)
class Field:
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
    fields: tuple[Field, ...]
    changes: str
    keeps: str
    run: str | None
    if_plan: int | None
    ask_yes: bool = False  # only `y` sends
    blocked: str = ""  # why it can't be sent at all


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


_TITLES = {"resize-batch": "resize micro-batch", "set-lr": "learning rate", "set-global-batch": "global batch"}
"""Dialog titles that say more than the verb."""
_EFFECTS = {
    "resize-batch": ("samples a forward/backward pass: speed and memory", "loss, global batch, learning rate"),
    "set-lr": ("the optimisation, from the step it is applied at", "batch, shares, micro-batches"),
    "set-global-batch": ("the optimisation: samples a step over all ranks", "micro-batches"),
    "checkpoint": ("one is written at the next step boundary", "everything else"),
    "pause": ("training waits after the step in progress", "the run, its plan and its memory; p resumes"),
    "resume": ("training goes on from where it was paused", "everything else"),
    "stop": ("the run ends after the step in progress", "its record and checkpoints; it can be taken up again"),
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
        Field(item.name, item.label, given.get(item.name, item.value), item.choices)
        for item in _fields(verb, state, rank)
    )
    blocked = ""
    if verb != "start-run" and run is None:
        blocked = "there is no run to command"
    elif verb != "start-run" and run is not None and run.state not in m.ACTIVE_RUN_STATES and verb != "note":
        blocked = f"the run has {'failed' if run.state == 'failed' else 'ended'}: {verb} has nothing to act on"
    return Form(
        verb, _TITLES.get(verb, verb), fields, changes, keeps,
        run=run.run if run and verb != "start-run" else None,
        if_plan=run.plan_version if run and verb in _PLAN_VERBS else None,
        ask_yes=verb == "stop", blocked=blocked,
    )  # fmt: skip


_PLAN_VERBS = frozenset({"resize-batch", "set-lr", "set-global-batch"})
"""Verbs whose values were computed against a plan."""


def _fields(verb: str, state: ViewState, rank: int | None) -> tuple[Field, ...]:
    run = state.run
    match verb:
        case "resize-batch":
            views = sorted(run.ranks, key=lambda view: view.rank) if run else []
            view = next((item for item in views if item.rank == rank), views[0] if views else None)
            nodes = tuple(dict.fromkeys(item.node for item in views))
            return (
                Field("node", "node", view.node if view else "", nodes),
                Field("micro", "micro-batch", str(view.micro_batch) if view else ""),
            )
        case "set-lr":
            value = f.scientific(run.learning_rate) if run else ""
            return (Field("value", "learning rate", value), Field("schedule", "schedule", "scale", ("scale", "set")))
        case "set-global-batch":
            value = str(run.global_batch) if run else ""
            return (Field("value", "samples a step", value), Field("schedule", "schedule", "set", ("set", "scale")))
        case "stop":
            return (Field("checkpoint", "checkpoint first", "true", ("true", "false")),)
        case "note":
            return (Field("text", "text"),)
        case "start-run":
            return (Field("resume", "run to take up"),)
    return ()


def order_of(asked: Form, values: Mapping[str, str]) -> Order:
    """The command a filled dialog means. Raises InvalidInputError naming the field, as the agent would."""
    texts = {name: value.strip() for name, value in values.items() if name != "node"}
    args = verbs.parse_args(asked.verb, texts)
    node = values.get("node") or None
    verbs.check(asked.verb, args, node)
    return Order(asked.verb, args, node, asked.run, asked.if_plan)


def parse(text: str) -> Order:
    """`resize-batch micro=4 --node studio` as a command. Raises InvalidInputError naming what is wrong with it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidInputError("command", str(error).lower()) from None
    if not words:
        raise InvalidInputError("command", "type a verb, such as `resize-batch micro=4`")
    verb, rest = words[0], words[1:]
    pairs: dict[str, str] = {}
    options: dict[str, str] = {}
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, found, value = word[2:].partition("=")
            if name not in ("node", "run", "if-plan"):
                raise InvalidInputError(word, "the options are --node, --run and --if-plan")
            if not found and not rest:
                raise InvalidInputError(word, "needs a value")
            options[name] = value if found else rest.pop(0)
            continue
        name, found, value = word.partition("=")
        if not found:
            raise InvalidInputError(word, "arguments are key=value")
        pairs[name] = value
    args = verbs.parse_args(verb, pairs)
    verbs.check(verb, args, options.get("node"))
    plan = options.get("if-plan")
    if plan is not None and not plan.isdecimal():
        raise InvalidInputError("--if-plan", f"{plan!r} is not a plan version")
    return Order(verb, args, options.get("node"), options.get("run"), int(plan) if plan is not None else None)


def preview(order: Order, state: ViewState, glyphs: Glyphs) -> Piece:
    """What the command would do to the run as it is now, in one line; or, marked as bad, why the agent will refuse
    it."""
    problem = _refusal(order, state.run)
    return Piece(problem, "bad") if problem else Piece(_promise(order, state, glyphs), "strong")


def _refusal(order: Order, run: m.RunView | None) -> str:
    """What the agent can already be seen to refuse a resize for, in its own words."""
    if run is None or order.verb != "resize-batch":
        return ""
    views = [view for view in run.ranks if order.node in (None, view.node) and view.share]
    if not any(order.node in (None, view.node) for view in run.ranks):
        known = ", ".join(dict.fromkeys(clean(view.node) for view in run.ranks))
        return f"no node {order.node!r} in this run; there is {known}"
    micro = int(order.args["micro"])
    over = next((view for view in views if micro > view.share), None)
    return f"{micro} is over {clean(over.node)}'s share of {over.share} samples" if over else ""


def _promise(order: Order, state: ViewState, glyphs: Glyphs) -> str:
    run = state.run
    if run is None:
        return verbs.VERBS[order.verb].summary
    match order.verb:
        case "resize-batch":
            return _preview_resize(order, run, glyphs)
        case "set-lr":
            return _preview_rate(order, run, glyphs)
        case "set-global-batch":
            value = int(order.args["value"])
            scaled = (
                f"lr {glyphs.times}{value / run.global_batch:.3g}"
                if order.args.get("schedule") == "scale"
                else "lr as it is"
            )
            return f"G {run.global_batch} {glyphs.arrow} {value}, {scaled}: changes the curve"
        case "stop":
            last = "with a checkpoint first" if order.args.get("checkpoint", True) else "WITHOUT a checkpoint"
            return f"ends after step {run.step + 1:,}, {last}"
        case "checkpoint":
            return f"writes step {run.step:,} or the one after"
    return verbs.VERBS[order.verb].summary


def _preview_resize(order: Order, run: m.RunView, glyphs: Glyphs) -> str:
    micro = int(order.args["micro"])
    views = [view for view in run.ranks if order.node in (None, view.node)]
    parts = []
    for view in views:
        old, new = (_passes(view.share, size, glyphs) for size in (view.micro_batch, micro))
        parts.append(
            f"{clean(view.node)} {old} {glyphs.arrow} {new}" if old != new else f"{clean(view.node)} stays {old}"
        )
    return f"{'; '.join(parts)}; curve unchanged"


def _passes(share: int, micro: int, glyphs: Glyphs) -> str:
    micro = max(min(micro, share), 1)
    return f"{micro}{glyphs.times}{math.ceil(share / micro)}"


def _preview_rate(order: Order, run: m.RunView, glyphs: Glyphs) -> str:
    value = float(order.args["value"])
    change = f"lr {f.scientific(run.learning_rate)} {glyphs.arrow} {f.scientific(value)}"
    if order.args.get("schedule", "scale") == "set":
        return f"{change}, constant from then on: changes the curve"
    times = f", the rest of the schedule {glyphs.times}{value / run.learning_rate:.3g}" if run.learning_rate else ""
    return f"{change}{times}: changes the curve"


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
