"""The loop's side of an attached run: it hands over steps and carries out orders, and never waits for an agent."""

import atexit
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from trainctl.guest.learning_rate import LearningRate
from trainctl.guest.link import Link
from trainctl.guest.orders import EDITS, Offers, Order, Orders, Outcome
from trainctl.guest.rows import Event, Rewind, settle

PAUSE_SECONDS: Final = 600.0
"""Seconds without an agent after which a paused loop goes on."""
_POLL_SECONDS: Final = 0.05
EndState = Literal["finished", "stopped", "failed"]


class Run:
    """An attached run, made by `attach`. No method raises or waits for an agent."""

    def __init__(self, attach: dict[str, Any], *, continues: bool) -> None:
        """`continues`: the run may have steps of an earlier process, after which steps without a number count."""
        self.id: Final[str] = attach["run"]
        self._orders, self._offers = Orders(), Offers()
        self._arrived = self._orders.arrived
        self._link = Link(attach, self._offers.verbs, self._orders)
        self._hand_over = self._link.items.append
        self._continues = continues
        self._last = 0  # number of the newest step
        self._is_first = True
        self._more: dict[str, Any] = {}  # values given again for a step that has been handed over
        self._since = time.monotonic()
        self._phases: dict[str, float] | None = None
        self._phase, self._phase_since = "", 0.0
        self._rate: LearningRate | None = None
        self._is_paused = self._is_stopping = self._is_closed = False
        self._problem = ""

    def step(
        self,
        n: int | None = None,
        /,
        *,
        loss: Any = None,
        samples: Any = None,
        tokens: Any = None,
        lr: Any = None,
        **metrics: Any,
    ) -> bool:
        """Record a step that is done, and carry out the orders that have arrived. Return True if a stop was ordered.

        `n` is the step's number, from 1; without it steps are counted. Values may be numbers, or arrays and tensors of
        one element, which another thread reads a moment later. A step's number given again adds values to it.
        """
        if self._is_closed:
            return self._is_stopping
        now = time.monotonic()
        if n is None:
            number = self._last + 1
        elif type(n) is int and n > self._last:
            number = n
        elif (number := self._number(n, metrics, loss)) < 0:
            return self._is_stopping
        if self._is_first:
            self._begin(number, n is not None)
        self._last = number
        if type(loss) is not float and loss is not None:
            loss = settle(loss)
        for name, value in metrics.items():
            if type(value) is not float:
                metrics[name] = settle(value)
        if self._more:
            metrics = {**self._more, **metrics}
            self._more = {}
        if self._phase:
            self.phase("")
        rate = self._rate.used if lr is None and self._rate is not None else lr
        row = (number, time.time(), now - self._since, loss, samples, tokens, rate, metrics, self._phases)
        self._hand_over(row)
        self._phases = None
        self._since = now
        if self._arrived:
            self._carry_out_orders()
        return self._is_stopping

    def phase(self, name: str) -> None:
        """Count the time from now until the next call or step as spent on `name`: data, forward, backward, sync,
        optimizer or wait; others become metrics."""
        now = time.monotonic()
        if self._phase:
            phases = self._phases = self._phases or {}
            phases[self._phase] = phases.get(self._phase, 0.0) + now - self._phase_since
        self._phase, self._phase_since = name, now

    def offer(self, verb: str, function: Callable[..., Any] | None = None, *, why: str = "") -> None:
        """Offer a verb, or say why the loop does not take it.

        `function` is called between two steps, on the loop's thread, with the verb's arguments as keywords. It may
        return what it changed as (before, after). If it raises, the order fails with the error's text.
        """
        self._offers.offer(verb, function, why)
        self._link.change()

    def note(self, text: str) -> None:
        """Add a note to the run's events."""
        self._event(text)

    def close(self, state: EndState = "finished", reason: str = "") -> None:
        """End the run. What is left is sent within a second, or kept in a file for the next agent."""
        if self._is_closed:
            return
        self._is_closed = True
        global _current
        if _current is self:
            _current = None
        if state == "finished" and self._is_stopping:
            state = "stopped"
        if self._rate is not None:
            self._rate.remove()
        if self._more:
            self._event("after the last step: " + ", ".join(f"{name} {value}" for name, value in self._more.items()))
        self._orders.give_up(self._last, "the loop ended before its next step")
        self._link.close(state, reason)
        if self._link.lost:
            print(f"trainctl: {self.id}: {self._link.lost}", file=sys.stderr)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(*_end_of(error))

    def _attach(
        self, optimizer: Any, checkpoint: Callable[..., Any] | None, evaluate: Callable[..., Any] | None
    ) -> None:
        """Take what the loop offers now, in addition to before."""
        if optimizer is not None and (self._rate is None or self._rate.optimizer is not optimizer):
            if self._rate is not None:
                self._rate.remove()
            self._rate = LearningRate(optimizer)
            self._offers.offer("set-lr", None if self._rate.refusal else self._rate.set, self._rate.refusal)
        if checkpoint is not None:
            self._offers.offer("checkpoint", checkpoint, "")
        if evaluate is not None:
            self._offers.offer("evaluate", evaluate, "")
        self._link.change()

    def _event(self, text: str, severity: Literal["info", "good", "warning", "error"] = "info") -> None:
        self._hand_over(Event(text or " ", severity, self._last))

    # Steps.

    def _number(self, n: Any, metrics: dict[str, Any], loss: Any) -> int:
        """Return the number of a step that does not simply follow; -1 if there is nothing to hand over."""
        try:
            number = int(n)
        except Exception:  # noqa: BLE001  whatever it is, it is no number
            return self._last + 1
        if number < 1:
            self._say_once(f"step {number} is not recorded: steps count from 1")
            return -1
        if number == self._last:
            self._more.update({name: settle(value) for name, value in metrics.items()})
            if loss is not None:
                self._say_once(f"step {number} was given twice; its second loss is not recorded")
            return -1
        if number < self._last:
            self._hand_over(Rewind(number - 1))
        return number

    def _begin(self, number: int, is_numbered: bool) -> None:
        """Before the first step: retract what an earlier process of the run recorded from here on."""
        self._is_first = False
        if self._continues and is_numbered:
            self._hand_over(Rewind(number - 1))

    def _say_once(self, text: str) -> None:
        if text != self._problem:
            self._problem = text
            self._event(text, "warning")

    # Orders.

    def _carry_out_orders(self) -> None:
        began = time.monotonic()
        try:
            while self._arrived or (self._is_paused and not self._is_stopping):
                if self._arrived:
                    self._carry_out(self._arrived.popleft())
                elif time.monotonic() - self._link.heard_monotonic > PAUSE_SECONDS:
                    self._event(f"goes on after {PAUSE_SECONDS / 60:.0f} minutes of pause without an agent", "warning")
                    break
                else:
                    time.sleep(_POLL_SECONDS)
        finally:
            self._is_paused = False
            self._since += time.monotonic() - began

    def _carry_out(self, order: Order) -> None:
        step = self._last + 1 if order.verb in EDITS else self._last
        if refusal := self._offers.refusal(order):
            self._orders.finish(Outcome(order.id, "rejected", None, refusal))
            return
        try:
            before, after = self._call(order)
        except Exception as error:  # noqa: BLE001  the loop's own functions may raise anything
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._orders.finish(Outcome(order.id, "failed", None, reason))
            return
        self._orders.finish(Outcome(order.id, "applied", step, "", before, after))

    def _call(self, order: Order) -> tuple[Any, Any]:
        """Do what is ordered. Return what it changed, if that is known."""
        function, changed = self._offers.function(order.verb), None
        if function is not None:
            changed = function(**order.args)
        elif order.verb == "note":
            self._event(str(order.args.get("text", "")))
        elif order.verb == "stop" and order.args.get("checkpoint", True):
            save = self._offers.function("checkpoint")
            assert save is not None
            try:
                save()
            except Exception as error:
                problem = (
                    f"its checkpoint failed ({error}); the loop goes on. To stop without one, add checkpoint=false"
                )
                raise ValueError(problem) from error
        if order.verb in ("pause", "resume") and function is None:
            self._is_paused = order.verb == "pause"
        self._is_stopping = self._is_stopping or order.verb == "stop"
        return changed if isinstance(changed, tuple) and len(changed) == 2 else (None, None)


_current: Run | None = None
_pid = 0


def attach(
    name: str | None = None,
    *,
    run: str | None = None,
    steps: int | None = None,
    optimizer: Any = None,
    checkpoint: Callable[..., Any] | None = None,
    evaluate: Callable[..., Any] | None = None,
    agree: Any = None,
    loss_unit: str = "",
) -> Run:
    """Attach the training loop of this process, and return its run; called again, the same run until it is closed.

    `name`: shown for it, by default the script's. `run`: its id, to continue a run of an earlier process; by default a
    new one. `steps`: how many the loop makes. `optimizer`: of torch, for set-lr. `checkpoint`, `evaluate`: functions
    without arguments that the verbs of that name call between two steps. `loss_unit`: such as "nats per token".
    """
    global _current, _pid
    if _current is None:
        shown = (name or os.environ.get("TRAINCTL_GUEST_NAME") or _script_name())[:64]
        run = run or os.environ.get("TRAINCTL_GUEST_RUN")
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{os.urandom(2).hex()}"
        described: dict[str, Any] = {
            "run": _as_id(run) if run else f"{_as_id(shown)[: 63 - len(stamp)]}-{stamp}",
            "name": shown,
            "started_at": now,
            "ranks": [{"rank": 0, "backend": _backend(), "pid": os.getpid()}],
            "kind": "exec" if run and run == os.environ.get("TRAINCTL_GUEST_RUN") else "guest",
            "steps": steps,
            "loss_unit": loss_unit[:32],
        }
        _current = Run(described, continues=run is not None)
        _current._link.start(continues=run is not None)
        if not _pid:
            atexit.register(_close_at_exit)
            os.register_at_fork(after_in_child=_forget_in_child)
        _pid = os.getpid()
    _current._attach(optimizer, checkpoint, evaluate)
    return _current


def _script_name() -> str:
    return Path(sys.argv[0] if sys.argv else "").stem.strip("-_") or "python"


def _as_id(name: str) -> str:
    """Return a name as the id of a run."""
    return re.sub(r"[^a-z0-9._-]", "-", name.lower()).lstrip("._-")[:64] or "run"


def _backend() -> str | None:
    return next((name for name in ("torch", "mlx", "jax", "tensorflow") if name in sys.modules), None)


def _end_of(error: BaseException | None) -> tuple[EndState, str]:
    """Return how a run ended, by the exception that left its loop."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "finished", ""
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "interrupted"
    return "failed", f"{type(error).__name__}: {error}"[:1000]


def _close_at_exit() -> None:
    if _current is not None and os.getpid() == _pid:
        _current.close(*_end_of(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)))


def _forget_in_child() -> None:
    """A forked process, such as a data loader's, neither sends nor takes orders."""
    global _current
    if _current is not None:
        _current._is_closed = True
        _current._link.abandon()
        _current = None
