"""Orders to the loop: each is carried out once, and its outcome is sent until the agent has it. Pure, but for
the clock."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Literal

    Order = dict[str, Any]
    """A command for the loop, as it arrived: id, verb, args and, in Unix seconds, expires_at."""
    Outcome = dict[str, Any]
    """The end of an order: id, state, step, reason, before and after. The row of the step carries it; None: no row."""

MAX_OUTCOMES = 1_000
"""Orders whose outcomes are remembered: one that comes again is answered by its old outcome."""
EDITS = frozenset({"set-lr", "resize-batch", "set-global-batch", "rebalance"})
"""Verbs that act from the next step on; all others act at the boundary after the step."""
BUILT_IN = ("pause", "resume", "stop", "note")
_MISSING = {
    "set-lr": "the loop gave no optimizer: pass optimizer= to attach(), or offer set-lr",
    "checkpoint": "the loop gave no checkpoint function: pass checkpoint= to attach()",
    "evaluate": "the loop gave no evaluate function: pass evaluate= to attach()",
}


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
        id = order["id"]
        if (old := self._outcomes.get(id)) is not None:
            self._unsent[id] = old
        elif id not in self._open:
            self._open.add(id)
            self.arrived.append(order)

    def finish(
        self,
        id: str,
        state: Literal["applied", "rejected", "failed"],
        step: int | None = None,
        reason: str = "",
        changed: tuple[Any, Any] = (None, None),
    ) -> None:
        """Keep an order's outcome, for sending. `changed`: what it changed, before and after."""
        before, after = (_value(value) for value in changed)
        outcome = {"id": id, "state": state, "step": step, "reason": reason[:1000], "before": before, "after": after}
        self._outcomes[id] = self._unsent[id] = outcome
        self._open.discard(id)
        while len(self._outcomes) > MAX_OUTCOMES:
            self._outcomes.popitem(last=False)

    def due(self, step: int | float) -> list[Outcome]:
        """Return the outcomes to send with the rows up to `step`."""
        return [outcome for outcome in [*self._unsent.values()] if (outcome["step"] or 0) <= step]

    def sent(self, outcomes: list[Outcome]) -> None:
        """Forget that these are to be sent: the agent has them."""
        for outcome in outcomes:
            if self._unsent.get(outcome["id"]) is outcome:
                del self._unsent[outcome["id"]]

    def give_up(self, step: int, reason: str) -> None:
        """Fail the orders that the loop will not carry out, and those whose step does not come after `step`."""
        while self.arrived:
            self.finish(self.arrived.popleft()["id"], "failed", None, reason)
        for outcome in [*self._unsent.values()]:
            if (outcome["step"] or 0) > step:
                self.finish(outcome["id"], "failed", None, reason)


def _value(value: Any) -> str | float | None:
    if value is None or isinstance(value, float):
        return value
    try:
        return str(value) if isinstance(value, bool) else float(value)
    except Exception:  # noqa: BLE001  any library's arrays end up here
        return str(value)[:200]


class Offers:
    """The verbs that the loop takes, and why not the others."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self._refusals: dict[str, str] = dict(_MISSING)
        self._refusal = ""

    def offer(self, verb: str, function: Callable[..., Any] | None, why: str) -> None:
        """Offer a verb, or say why not; with neither, as it was at first."""
        self._functions.pop(verb, None)
        self._refusals.pop(verb, None)
        if function is not None:
            self._functions[verb] = function
        elif why or verb in _MISSING:
            self._refusals[verb] = str(why)[:1000] or _MISSING[verb]

    def function(self, verb: str) -> Callable[..., Any] | None:
        return self._functions.get(verb)

    def refusal(self, order: Order) -> str:
        """Return why an order is refused; empty if it is not."""
        verb, args = order["verb"], order["args"]
        if self._refusal:
            return self._refusal
        if time.time() > (order.get("expires_at") or math.inf):
            return "its time was up before the loop came to a step"
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
        verbs = {**dict.fromkeys((*BUILT_IN, *self._functions), ""), **self._refusals}
        return dict.fromkeys(verbs, self._refusal) if self._refusal else verbs

    def refuse_all(self, why: str) -> None:
        """Refuse all orders from now on."""
        self._refusal = why
