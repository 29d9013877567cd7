"""What would undo an event: the inverse command, or why there is none, pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import (
    CommandApplied,
    GlobalBatchChanged,
    LeadChanged,
    LearningRateChanged,
    MicroBatchChanged,
    NodeStateChanged,
    SharesChanged,
)
from trainctl.protocol.record import schema_1_events
from trainctl.tui.commands.command import Order
from trainctl.tui.state import event_text, plan_changes
from trainctl.tui.state.rank_speed import HELD_STATES, live_ranks

_SHARES = frozenset({"rebalance", "drain", "admit", "set-global-batch"})
_RATES = frozenset({"set-lr", "set-global-batch"})
_TOUCHES = {**dict.fromkeys(_SHARES, _SHARES), "set-lr": _RATES, "set-global-batch": _SHARES | _RATES,
            "resize-batch": frozenset({"resize-batch"})}  # fmt: skip
"""By verb, the verbs that change the same thing."""
_WITHOUT = {
    "checkpoint": "a checkpoint that was written stays", "evaluate": "an evaluation changes nothing",
    "note": "a note stays in the record", "start-run": "stop ends a run",
    "acknowledge": "an alert that was seen stays seen", "mute": "mute minutes=0 ends it",
}  # fmt: skip


class NoInverse(ValueError):  # noqa: N818  a finding, not a failure
    """Why an event can't be undone."""


@dataclass(frozen=True)
class Inverse:
    """The command that undoes `event`; `since` are the later ones that changed the same thing."""

    event: m.Event
    order: Order
    since: tuple[m.Event, ...] = ()

    @property
    def says(self) -> str:
        """What it undoes."""
        return f"undoes {event_text.words(self.event)}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """What came since, newest first, and what won't be quite as it was."""
        made = [f"changed since: {event_text.words(event)} by {event.by}" for event in reversed(self.since[-2:])]
        if len(self.since) > 2:
            made.append(f"and {len(self.since) - 2} more")
        if self.order.verb == "set-lr" and self.order.args["schedule"] == "scale":
            made.append("as of the step it is applied at; the rest of the schedule is scaled by the same factor")
        if self.order.verb == "admit":
            made.append("it comes back with a share by its last rate, which need not be the one it had")
        return tuple(made)


def of(event: m.Event, run: m.RunView | None, events: Sequence[m.Event]) -> Inverse:
    """What undoes the event now. Raises NoInverse with the reason."""
    if event.verb is None:
        raise NoInverse("it is no change that a command could take back")
    if event.verb in _WITHOUT:
        raise NoInverse(_WITHOUT[event.verb])
    if event.outcome not in (None, "applied"):
        raise NoInverse(f"it changed nothing: {event.outcome}")
    if not plan_changes.took_effect(event):
        raise NoInverse("it changed nothing: all was so already")
    if run is None or event.run not in ("", run.run):
        raise NoInverse("it is of another run")
    by = undone_by(events).get(event.id)
    if by is not None:
        raise NoInverse(f"{by.by} undid it already, @{by.step or 0:,}; that can be undone in its turn")
    if event.verb != "stop" and run.state not in m.ACTIVE_RUN_STATES:
        raise NoInverse("the run has ended")
    if event.verb not in _INVERSES:
        raise NoInverse(f"{event.verb} has no inverse")
    order = _INVERSES[event.verb](event, run)
    return Inverse(event, replace(order, undoes=event.command or str(event.id)), _since(event, events))


def newest(run: m.RunView | None, events: Sequence[m.Event], most: int = 9) -> list[Inverse]:
    """The newest events that can be undone, newest first."""
    made: list[Inverse] = []
    for event in reversed(events):
        try:
            made.append(of(event, run, events))
        except NoInverse:
            continue
        if len(made) == most:
            break
    return made


# ---------------------------------------------------------------- which command undid which


def undone_by(events: Sequence[m.Event]) -> dict[int, m.Event]:
    """By its number, each event that was undone, and the event that did it."""
    by_key: dict[str, int] = {}
    for event in events:
        # The last two: how a record of schema 1 names an event.
        keys = event.command, str(event.id), schema_1_events.token(event.run, event.id, event.command)
        by_key |= {key: event.id for key in keys if key}
    undoing = (event for event in events if event.undoes and plan_changes.took_effect(event))
    return {by_key[event.undoes]: event for event in undoing if event.undoes in by_key}


def undid(events: Sequence[m.Event]) -> dict[int, m.Event]:
    """By the number of an undoing event, the event that it undid."""
    by_id = {event.id: event for event in events}
    return {by.id: by_id[number] for number, by in undone_by(events).items()}


def _since(event: m.Event, events: Sequence[m.Event]) -> tuple[m.Event, ...]:
    touches = _TOUCHES.get(event.verb or "", frozenset())
    node = _node_of(event) if event.verb == "resize-batch" else None
    return tuple(
        other
        for other in events
        if (other.at, other.id) > (event.at, event.id)
        and other.verb in touches
        and plan_changes.took_effect(other)
        and (node is None or other.verb != "resize-batch" or _node_of(other) in (None, node))
    )


# ---------------------------------------------------------------- the inverse of each verb


def _node_of(event: m.Event) -> str | None:
    """The node that a command was for."""
    match event.data:
        case SharesChanged(node=node) | NodeStateChanged(node=node) | CommandApplied(node=node):
            return node or None
        case MicroBatchChanged(before=before) if len({node for node, _ in before}) == 1:
            return before[0][0] or None
        case _:
            return None


def _former_size(event: m.Event, run: m.RunView) -> Order:
    if event.kind != "command":
        raise NoInverse("the node was out of memory at that size; resize-batch sets another")
    if not isinstance(event.data, MicroBatchChanged):
        raise NoInverse("the former size isn't known")
    pairs = event.data.before
    before = dict(pairs)
    if any(size != before[node] for node, size in pairs):
        raise NoInverse("the ranks of one node had several sizes, and a command gives them one")
    live = [view.node for view in live_ranks(run)]
    if len(before) == 1:
        node, size = next(iter(before.items()))
        known = node or (live[0] if len(set(live)) == 1 else None)
        return Order("resize-batch", {"micro": size}, _taking_part(known, live))
    if len(set(before.values())) > 1 or set(before) != set(live):
        each = ", ".join(f"{name} {size}" for name, size in before.items())
        raise NoInverse(f"no one command gives the nodes their former sizes again: {each}")
    return Order("resize-batch", {"micro": next(iter(before.values()))})


def _taking_part(node: str | None, live: Sequence[str]) -> str:
    if node is None:
        raise NoInverse("the record doesn't say which node it was for")
    if node not in live:
        raise NoInverse(f"{node} takes no part now")
    return node


def _former_shares(event: m.Event, run: m.RunView) -> Order:
    had = event.data.before if isinstance(event.data, SharesChanged) else {}
    before = {node: share for node, share in had.items() if share}
    now: dict[str, int] = {}
    for view in live_ranks(run):
        now[view.node] = now.get(view.node, 0) + view.share
    gone, come = before.keys() - now.keys(), now.keys() - before.keys()
    if not before:
        raise NoInverse("the former shares aren't known")
    if gone or come:
        who = ", ".join(sorted(gone or come))
        raise NoInverse(f"{who} {'takes no part now' if gone else 'had no share then'}: rebalance deals anew")
    if sum(before.values()) != run.global_batch:
        raise NoInverse(f"those were shares of {sum(before.values())} samples, the batch has {run.global_batch} now")
    if before == now:
        raise NoInverse("the shares are those again already")
    return Order("rebalance", {"shares": before})


def _former_rate(event: m.Event, run: m.RunView) -> Order:
    rate = event.data
    if not isinstance(rate, LearningRateChanged):
        raise NoInverse("the former learning rate isn't known")
    if rate.was_constant:
        return Order("set-lr", {"value": rate.before, "schedule": "set"})
    if rate.schedule == "set":
        raise NoInverse("it made the rate constant, and there is no way back to the schedule")
    if not rate.before or not rate.after or not run.learning_rate:
        raise NoInverse("a learning rate of 0 can't be scaled back")
    return Order("set-lr", {"value": run.learning_rate * rate.before / rate.after, "schedule": "scale"})


def _former_batch(event: m.Event, run: m.RunView) -> Order:
    batch = event.data
    if not isinstance(batch, GlobalBatchChanged) or batch.before < 1:
        raise NoInverse("the former global batch isn't known")
    if batch.before == run.global_batch:
        raise NoInverse(f"the global batch is {run.global_batch} again already")
    return Order("set-global-batch", {"value": batch.before, "schedule": batch.schedule})


def _membership(event: m.Event, run: m.RunView) -> Order:
    node = _node_of(event)
    views = [view for view in run.ranks if view.node == node]
    if event.kind != "command" or node is None or not views:
        raise NoInverse("it happened by itself")
    if event.verb == "admit":
        if all(view.state in HELD_STATES for view in views):
            raise NoInverse(f"{node} is out again already")
        return Order("drain", {}, node)
    if not any(view.state in HELD_STATES for view in views):
        raise NoInverse(f"{node} is {views[0].state}, not drained")
    return Order("admit", {}, node)


def _former_lead(event: m.Event, run: m.RunView) -> Order:
    before = event.data.before if isinstance(event.data, LeadChanged) else ""
    if before == run.lead:
        raise NoInverse(f"{before} conducts the run again already")
    if all(view.node != before for view in run.ranks):
        raise NoInverse(f"{before or 'the former lead'} has no rank of the run")
    return Order("promote", {}, before)


def _going_on(event: m.Event, run: m.RunView) -> Order:
    if event.verb == "stop":
        if run.state in m.ACTIVE_RUN_STATES:
            raise NoInverse("the run goes on already")
        return Order("start-run", {"resume": run.run})
    held = run.state in ("pausing", "paused")
    if held != (event.verb == "pause"):
        raise NoInverse(f"the run is {run.state} already")
    return Order("resume" if held else "pause")


_INVERSES: dict[str, Callable[[m.Event, m.RunView], Order]] = {
    "resize-batch": _former_size, "rebalance": _former_shares, "set-lr": _former_rate,
    "set-global-batch": _former_batch, "drain": _membership, "admit": _membership, "promote": _former_lead,
    "pause": _going_on, "resume": _going_on, "stop": _going_on,
}  # fmt: skip
"""By verb, the command that is its inverse. Each raises NoInverse."""
