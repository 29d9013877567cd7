"""Orders: commands for the loops of attached runs, from the journal to their outcomes. Pure, but for the caller's
clock.

A command is journaled and accepted before it becomes an order here. An order is sent whenever its loop says hello, and
ends once: as the loop says, with its run, or when its time is up.
"""

from collections.abc import Iterable
from typing import Final

from trainctl.node_agent.conductor.events import CommandEnded, Happened
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages.events import AnyEvent, CommandApplied, LearningRateChanged, Notice, RunStateChanged
from trainctl.protocol.messages.guests import Order, Outcome, Value

MAX_OPEN: Final = 100
"""Most orders of one run that wait for their outcomes."""
LATE_SECONDS: Final = 2.0
"""Seconds after an order's time is up in which the loop can still say what it did in time."""
_EXPIRED_KEPT: Final = 1000


class GuestOrders:
    """The orders without an outcome."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, Order]] = {}  # by id: the run, and the order
        self._expired: dict[str, Order] = {}  # that the loop may have begun in time all the same

    def give(self, run: str, order: Order) -> None:
        """Take an order; one that is open already is left as it is. Raises RefusedError if too many are."""
        if order.id not in self._open and len(self.of(run)) >= MAX_OPEN:
            raise RefusedError(f"{MAX_OPEN} commands already wait for {run}: try again later")
        self._open.setdefault(order.id, (run, order))

    def of(self, run: str) -> list[Order]:
        """Return the open orders of a run, oldest first."""
        return [order for about, order in self._open.values() if about == run]

    def heard(self, run: str, outcomes: Iterable[Outcome]) -> tuple[list[CommandEnded], list[Happened]]:
        """Return how commands ended, by what their loop says, and events about those that had expired."""
        ended, late = [], []
        for outcome in outcomes:
            about, order = self._open.get(outcome.id, ("", None))
            if order is not None and about == run:
                del self._open[outcome.id]
                ended.append(_ended(order, outcome))
            elif (order := self._expired.pop(outcome.id, None)) is not None and outcome.state == "applied":
                text = f"{order.verb} had expired, but had been begun: it took effect all the same"
                late.append(Happened(Notice(text), "warning", run, outcome.step, order.verb, order.id))
        return ended, late

    def over(self, run: str, why: str) -> list[CommandEnded]:
        """Return the failures of a run's open orders: it is over."""
        orders = self.of(run)
        for order in orders:
            del self._open[order.id]
        return [CommandEnded(order.id, "failed", reason=f"{why} before the command took effect") for order in orders]

    def expire(self, now: float) -> list[CommandEnded]:
        """Return the orders whose time is up at `now`, in Unix seconds."""
        due = [order for _, order in self._open.values() if now > (order.expires_at or now) + LATE_SECONDS]
        for order in due:
            del self._open[order.id]
            self._expired[order.id] = order
        while len(self._expired) > _EXPIRED_KEPT:
            del self._expired[next(iter(self._expired))]
        reason = "the training loop did not reach its next step in time"
        return [CommandEnded(order.id, "expired", reason=reason) for order in due]


def _ended(order: Order, outcome: Outcome) -> CommandEnded:
    if outcome.state != "applied":
        reason = outcome.reason or "the training loop gave no reason"
        return CommandEnded(order.id, outcome.state, outcome.step, reason)
    return CommandEnded(order.id, "applied", outcome.step, made=_made(order, outcome.before, outcome.after))


def _made(order: Order, before: Value, after: Value) -> AnyEvent:
    match order.verb, before, after:
        case "set-lr", int() | float(), int() | float():
            return LearningRateChanged(before, after, "set" if order.args.get("schedule") == "set" else "scale")
        case "pause", None, None:
            return RunStateChanged("running", "paused")
        case "resume", None, None:
            return RunStateChanged("paused", "running")
        case _:
            words = [f"{value:.7g}" if isinstance(value, float) else str(value) for value in (before, after)]
            changed = " → ".join(word for word, value in zip(words, (before, after), strict=True) if value is not None)
            return CommandApplied(result=changed)
