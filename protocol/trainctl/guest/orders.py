"""Orders to the loop: each is carried out once, and its outcome is sent until the agent has it. Pure."""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

KEPT_OUTCOMES: Final = 1_000
"""Ids of orders whose outcomes are remembered: an order that comes again is answered by its old outcome."""
EDITS: Final = frozenset({"set-lr", "resize-batch", "set-global-batch", "rebalance"})
"""Verbs that act from the next step on; all others act at the boundary after the step."""
BUILT_IN: Final = ("pause", "resume", "stop", "note")
_MISSING: Final = {
    "set-lr": "the loop gave no optimizer: pass optimizer= to attach(), or offer set-lr",
    "checkpoint": "the loop gave no checkpoint function: pass checkpoint= to attach()",
    "evaluate": "the loop gave no evaluate function: pass evaluate= to attach()",
}


@dataclass(frozen=True)
class Order:
    """A command for the loop."""

    id: str
    verb: str
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The end of an order. `step`: the step whose row carries it; None: it ended at no step."""

    id: str
    state: Literal["applied", "rejected", "failed"]
    step: int | None = None
    reason: str = ""
    before: Any = None
    after: Any = None

    def fields(self, base: int) -> dict[str, Any]:
        """Return it as the wire has it; the loop's steps count from `base`."""
        return {
            "id": self.id,
            "state": self.state,
            "step": None if self.step is None else base + self.step,
            "reason": self.reason[:1000],
            "before": _value(self.before),
            "after": _value(self.after),
        }


def _value(value: Any) -> str | float | None:
    if value is None or isinstance(value, (int, float)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)[:200]


class Orders:
    """Orders that have arrived, and outcomes on their way to the agent. One thread takes, another finishes."""

    def __init__(self) -> None:
        self.arrived: deque[Order] = deque()
        """Orders that the loop has not begun."""
        self._open: set[str] = set()
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._unsent: dict[str, Outcome] = {}

    def take(self, order: Order) -> None:
        """Queue an order that is new; for one that has ended, have its outcome sent again."""
        if (old := self._outcomes.get(order.id)) is not None:
            self._unsent[order.id] = old
        elif order.id not in self._open:
            self._open.add(order.id)
            self.arrived.append(order)

    def finish(self, outcome: Outcome) -> None:
        """Keep an order's outcome, for sending."""
        self._outcomes[outcome.id] = outcome
        self._unsent[outcome.id] = outcome
        self._open.discard(outcome.id)
        while len(self._outcomes) > KEPT_OUTCOMES:
            self._outcomes.popitem(last=False)

    def due(self, step: int) -> list[Outcome]:
        """Return the outcomes to send with the rows up to `step`."""
        return [outcome for outcome in [*self._unsent.values()] if outcome.step is None or outcome.step <= step]

    def sent(self, outcomes: list[Outcome]) -> None:
        """The agent has these."""
        for outcome in outcomes:
            if self._unsent.get(outcome.id) is outcome:
                del self._unsent[outcome.id]

    def give_up(self, step: int, reason: str) -> None:
        """Fail the orders that the loop will not carry out, and those whose step does not come after `step`."""
        while self.arrived:
            self.finish(Outcome(self.arrived.popleft().id, "failed", None, reason))
        for outcome in [*self._unsent.values()]:
            if outcome.step is not None and outcome.step > step:
                self.finish(Outcome(outcome.id, "failed", None, reason, outcome.before, outcome.before))


class Offers:
    """The verbs that the loop takes, and why not the others."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._refusals: dict[str, str] = dict(_MISSING)

    def offer(self, verb: str, function: Callable[..., Any] | None, why: str) -> None:
        """Offer a verb, or say why not; with neither, as it was at first."""
        self._functions.pop(verb, None)
        self._refusals.pop(verb, None)
        if function is not None:
            self._functions[verb] = function
        elif why:
            self._refusals[verb] = why
        elif verb in _MISSING:
            self._refusals[verb] = _MISSING[verb]

    def function(self, verb: str) -> Callable[..., Any] | None:
        return self._functions.get(verb)

    def refusal(self, order: Order) -> str:
        """Return why an order is refused; empty if it is not."""
        verb, args = order.verb, order.args
        if why := self._refusals.get(verb):
            return why
        if verb not in self._functions and verb not in BUILT_IN:
            return f"the loop does not offer {verb}"
        if verb == "set-lr":
            value, schedule = args.get("value"), args.get("schedule", "scale")
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                return f"value={value!r} is no learning rate: give a number of 0 or more"
            if schedule not in ("scale", "set"):
                return f"schedule={schedule!r} is neither scale nor set"
        if verb == "stop" and verb not in self._functions and args.get("checkpoint", True):
            why = self._refusals.get("checkpoint", "")
            return why and f"no checkpoint can be written ({why}); to stop without one, add checkpoint=false"
        return ""

    def verbs(self) -> dict[str, str]:
        """Return each verb with the reason why the loop does not take it; empty for one that it takes."""
        return {**dict.fromkeys((*BUILT_IN, *self._functions), ""), **self._refusals}
