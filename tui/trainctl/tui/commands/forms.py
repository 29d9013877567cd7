"""Commands as a person gives them: what a dialog asks, what a command would do, and how far one has come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainctl.protocol.messages import FINAL_COMMAND_STATES, CommandReply, DryRun, RankForecast, verbs
from trainctl.protocol.messages.verb_arguments import arguments_of
from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, Proposal, VerbDescription
from trainctl.tui.commands.verbs import DESCRIPTIONS
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting
from trainctl.tui.text.formatting import gigabytes
from trainctl.tui.text.styled_line import Line, Piece, clean, line


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
    ask: str = ""  # the question that only `y` answers with yes; empty: enter sends
    blocked: str = ""  # why it can't be sent at all
    id: str | None = None  # the command's; None: the client makes one
    undoes: str | None = None  # what it takes back, as in its command
    remarks: tuple[str, ...] = ()  # what else there is to be said about it


@dataclass(frozen=True)
class Progress:
    """The state of a command that was sent; `reply` is the newest one, `problem` why none came."""

    order: Order
    sent_at: float
    accepted: bool = False
    reply: CommandReply | None = None
    problem: str = ""

    @property
    def applied(self) -> bool:
        return self.reply is not None and self.reply.state == "applied"

    @property
    def ended(self) -> bool:
        return bool(self.problem) or (self.reply is not None and self.reply.state in FINAL_COMMAND_STATES)


def form(verb: str, state: ViewState, rank: int | None = None, values: Mapping[str, str] | None = None) -> Form:
    """Return the dialog of a verb, filled from the state; `values` override what its fields start with."""
    described, run, given = DESCRIPTIONS[verb], state.run, dict(values or {})
    fields = tuple(
        replace(field, value=given.get(field.name, field.value)) for field in described.fields_for(state, rank)
    )
    about_run = described.acts_on != "new run" and (described.acts_on != "alerts" or state.active)
    return Form(
        verb,
        described.title or verb,
        fields,
        described.changes,
        described.keeps,
        run=run.run if run and about_run else None,
        if_plan=run.plan_version if run and run.kind == "hosted" and described.against_plan else None,
        ask=described.ask,
        blocked=_blocked(described, state, fields),
    )


def _blocked(described: VerbDescription, state: ViewState, fields: Sequence[FormField]) -> str:
    run = state.run
    if described.acts_on == "new run":
        return ""
    if run is not None and (why := run.why_not(described.name)):
        return clean(why)
    if state.active:
        return described.no_nodes if described.no_nodes and not fields[0].choices else described.blocked(state)
    if described.acts_on == "alerts":
        return ""
    if run is None:
        return "no active run"
    if described.acts_on == "any run":
        return ""
    return f"the run has {'failed' if run.state == 'failed' else 'ended'}, so {described.name} can't act on it"


def start_form() -> Form:
    """Return the dialog that starts a run from a file."""
    described = DESCRIPTIONS["start-run"]
    fields = (FormField("file", "run file"),)
    return Form("start-run", "start a run", fields, described.changes, described.keeps, run=None, if_plan=None)


def branch_form(run: str) -> Form:
    """Return the dialog that branches off a run."""
    described = DESCRIPTIONS["start-run"]
    fields = (
        FormField("step", "checkpoint", if_empty="step; empty: the newest"),
        FormField("settings", "settings", if_empty="such as optimizer.learning_rate=1e-4"),
    )
    title = f"branch off {clean(run)}"
    return Form("start-run", title, fields, described.changes, described.keeps, run=None, if_plan=None)


_OUT_WORDS = {
    "drained": "is drained; :admit --node {node} puts it back",
    "failed": "failed; :admit --node {node} puts it back",
    "lost": "is lost and takes no samples until it is back",
    "rejoining": "is coming back and rejoins automatically",
}


def way_back(state: ViewState) -> list[str]:
    """Return for each node that is out how it comes back."""
    texts = {}
    for view in state.run.ranks if state.run else ():
        gone = view.state == "failed" and view.pid is None
        if view.state in _OUT_WORDS:
            texts[clean(view.node)] = "failed, and its trainer is gone" if gone else _OUT_WORDS[view.state]
    return [f"{node} {words.format(node=node)}" for node, words in texts.items()]


def order_of(asked: Form, values: Mapping[str, str]) -> Order:
    """Return the command that a filled dialog means: an empty field that may be left out is. Raises InvalidInputError
    naming the field, as the agent would."""
    optional = {argument.name for argument in arguments_of(verbs.VERBS[asked.verb]) if argument.default == ""}
    texts = {name: value.strip() for name, value in values.items() if name != "node"}
    texts = {name: text for name, text in texts.items() if text or name not in optional}
    args = verbs.parse_args(asked.verb, texts)
    node = values.get("node") or None
    verbs.check(asked.verb, args, node)
    return Order(asked.verb, args, node, asked.run, asked.if_plan, asked.id, undoes=asked.undoes)


def progress_line(progress: Progress) -> Line:
    """Return `sent → accepted → applied @ step 120 micro 8 → 4`, or where it stopped and why."""
    arrow = Piece(" → ", "dim")
    parts = [Piece("sent", "label")]
    if progress.accepted:
        parts += [arrow, Piece("accepted", "accent")]
    if progress.problem:
        return line(*parts, arrow, Piece(f"no answer: {clean(progress.problem)}", "bad"))
    reply = progress.reply
    if reply is None or reply.state == "accepted":
        return line(*parts, Piece(" …", "dim"))
    if reply.state == "applied":
        return line(*parts, arrow, *applied_line(reply))
    where = f"{reply.field}: " if reply.field else ""
    return line(*parts, arrow, Piece(f"{reply.state}: {clean(where + (reply.reason or 'no reason given'))}", "bad"))


def applied_line(reply: CommandReply) -> Line:
    """Return when a command was applied and what it changed: `applied @ step 120  micro 8 → 4`."""
    at = f" @ step {reply.step:,}" if reply.step is not None else ""
    change = f"  {clean(reply.before)} → {clean(reply.after)}" if reply.before and reply.after else ""
    return line(Piece(f"applied{at}", "good"), change)


def preview(order: Order, state: ViewState) -> Piece:
    """Return in one line what the command would do to the run now; or, marked as bad, why the agent will refuse it."""
    problem, described, run = _refusal(order, state), DESCRIPTIONS[order.verb], state.run
    if problem:
        return Piece(problem, "bad")
    if run is None or described.preview is None:
        return Piece(VERBS[order.verb].summary, "strong")
    return Piece(described.preview(Proposal(order, state, run)), "strong")


def changes_nothing(order: Order, state: ViewState) -> bool:
    """Return whether all is as the command would have it already."""
    return state.run is not None and DESCRIPTIONS[order.verb].changes_nothing(order, state.run)


def _refusal(order: Order, state: ViewState) -> str:
    described, run = DESCRIPTIONS[order.verb], state.run
    if run is None:
        return "no active run" if described.acts_on in ("active run", "any run") else ""
    if why := run.why_not(order.verb):
        return clean(why)
    if described.acts_on == "active run" and not state.active:
        return f"the run has {'failed' if run.state == 'failed' else 'ended'}"
    return ""


def forecast(found: DryRun) -> str:
    """Return in one line what a command would do, or why it would be refused."""
    if found.refused:
        return clean(f"{found.field}: {found.refused}" if found.field not in (None, "verb", "run") else found.refused)
    verb = VERBS[found.verb]
    advising = ", ".join(found.advising)
    parts = [
        _change(found),
        *([] if not found.ranks else [_step(found), _memory(found.ranks)]),
        f"at step {found.step:,}" if found.step and verb.scope == "edit" else "",
        {"speed": "curve unchanged", "optimisation": "changes the curve"}.get(verb.affects, ""),
        f"policy {advising} will only advise" if advising else "",
    ]
    return "; ".join(part for part in parts if part)


def _change(found: DryRun) -> str:
    changes = []
    if found.verb in ("set-lr", "set-global-batch") and found.before and found.after:
        changes.append(f"{'lr' if found.verb == 'set-lr' else 'G'} {found.before} → {found.after}")
    moved = [
        f"{clean(one.node)} {_count(one.share_before)} → {_count(one.share)}"
        for one in found.ranks
        if one.share_before != one.share
    ]
    sizes = [
        f"{clean(one.node)} {_passes(one.share_before, one.micro_before)} → {_passes(one.share, one.micro)}"
        for one in found.ranks
        if one.share_before == one.share and one.micro_before != one.micro
    ]
    changes += [few(texts) for texts in (moved, sizes) if texts]
    if changes:
        return "; ".join(changes)
    if found.before is not None and found.before == found.after:
        return "no change: already set"
    if found.after:
        return clean(f"{found.before} → {found.after}" if found.before else found.after)
    return VERBS[found.verb].summary


def _count(share: int | None) -> str:
    return "0" if share is None else str(share)


def _passes(share: int | None, micro: int | None) -> str:
    """Return `4×2`: the samples of a pass, and how many passes a share takes."""
    return f"{micro}×{-(-share // micro)}" if share and micro else "0"


def _step(found: DryRun) -> str:
    step = seconds_change(found.step_seconds_before, found.step_seconds)
    return step or "step time isn't known yet"


def _memory(ranks: Sequence[RankForecast]) -> str:
    """Return `fits`, or the memory of a rank that may not; of one rank alone how much it would be."""
    known = [one for one in ranks if one.memory_bytes is not None and one.memory_cap_bytes]
    over = [one for one in known if (one.memory_bytes or 0) > (one.memory_cap_bytes or 0)]
    for one in over:
        return f"{clean(one.node)} {'may be' if one.memory_is_bound else 'is'} over its memory: {_bytes(one)}"
    return f"predicted memory {_bytes(known[0])}" if len(known) == 1 else "fits" if known else ""


def _bytes(one: RankForecast) -> str:
    bound = "at most " if one.memory_is_bound else ""
    return f"{bound}{gigabytes(one.memory_bytes or 0)} of {gigabytes(one.memory_cap_bytes or 0)} GB"


def few(parts: Sequence[str]) -> str:
    """Return the first three, and how many more there are."""
    more = f" and {len(parts) - 3} more" if len(parts) > 4 else ""
    return ", ".join(parts[:3] if more else parts) + more


def seconds_change(now: float | None, then: float | None) -> str:
    """Return `predicted 3.06 → 2.99 s`; nothing where one of them isn't known."""
    if now is None or then is None:
        return ""
    before, after = formatting.seconds(now), formatting.seconds(then)
    same = before.rpartition(" ")[2] == after.rpartition(" ")[2]
    return f"predicted {before.partition(' ')[0] if same else before} → {after}"
