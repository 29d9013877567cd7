"""The loop's side of an attached run: it hands over steps and carries out orders, and never waits for an agent."""

from __future__ import annotations

import atexit
import os
import sys
import time

from trainctl.guest.learning_rate import LearningRate
from trainctl.guest.orders import EDITS, Offers, Orders
from trainctl.guest.rows import SETTLE, settle
from trainctl.guest.torch_store import rank_and_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, Literal

    from trainctl.guest.group import Follower, Group
    from trainctl.guest.link import Link
    from trainctl.guest.orders import Order
    from trainctl.guest.torch_store import Store

    EndState = Literal["finished", "stopped", "failed"]
    Severity = Literal["info", "good", "warning", "error"]

_POLL_SECONDS = 0.05
_MAX_STEP = 2**53


class Run:
    """An attached run, made by `attach`. No method raises, or waits for an agent."""

    def __init__(self, described: dict[str, Any], *, continues: bool, rank: int, agree: Store | None) -> None:
        """`continues`: the run may have steps of an earlier process, after which steps without a number count."""
        from trainctl.guest.link import Link  # sockets and threads, which only a run needs

        ranks = len(described["ranks"])
        if ranks > 1:
            from trainctl.guest.group import Follower, Lead

        self.id: str = described["run"]
        self._orders, self._offers = Orders(), Offers()
        self._arrived = self._orders.arrived
        self._link: Link | Follower
        self._group: Group | None = None  # of several ranks
        if rank:
            self._link = self._group = Follower(rank, ranks, agree, self._offers)
        else:
            self._link = Link(described, self._offers.verbs, self._orders, continues=continues)
            if ranks > 1:
                self._group = Lead(ranks, agree, self._orders, self._offers, self._link)
        self._hand_over = (self._group or self._link).items.append
        self._finish = (self._group.outcomes if self._group else self._orders).finish
        self._continues = continues
        self._last = 0  # number of the newest step
        self.waits_for_values = False
        """Set by adapters: values of a step come after it, so its row waits for the next step."""
        self._newest: tuple[Any, ...] | None = None  # row that waits
        self._more: dict[str, Any] = {}  # values given for a step that has been handed over
        self._since = time.monotonic()
        self._phases: dict[str, float] | None = None
        self._phase, self._phase_since = "", 0.0
        self._rate: LearningRate | None = None
        self._is_first = True
        self._is_paused = self._is_stopping = self._is_closed = False
        self._said: set[str] = set()

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
        try:
            now = time.monotonic()
            number = self._last + 1
            if (n is not None or self._is_first) and not self._turn_to(number if n is None else int(n), n is not None):
                self._add_values(loss, metrics)
                return self._is_stopping
            number = self._last = self._last + 1
            if type(loss) is not float and loss is not None:
                loss = settle(loss)
            for name, value in metrics.items():
                if type(value) is not float:
                    metrics[name] = SETTLE.get(type(value), settle)(value)
            if self._more:
                metrics, self._more = {**self._more, **metrics}, {}
            if self._phase:
                self.phase("")
            rate = self._rate.used if lr is None and self._rate is not None else lr
            seconds, self._since = now - self._since, now
            row = (number, time.time(), seconds, loss, samples, tokens, rate, metrics, self._phases)
            self._phases = None
            if self._arrived or self.waits_for_values or self._group is not None:
                self._newest = row
            else:
                self._hand_over(row)
        except Exception as error:  # noqa: BLE001  nothing that is given here stops the loop
            self._warn(f"a step is not recorded: {type(error).__name__}: {error}")
        if self._group is not None:
            self._carry_out_agreed(self._group)
        elif self._arrived:
            self._carry_out_orders()
        if not self.waits_for_values:
            self._release()
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
        self._event(text, "info")

    def close(self, state: EndState = "finished", reason: str = "") -> None:
        """End the run. What is left is sent within a second, or kept in a file for the next agent."""
        global _current
        if self._is_closed:
            return
        self._is_closed = True
        if _current is self:
            _current = None
        if self._rate is not None:
            self._rate.remove()
        self._release()
        if self._more:
            values = ", ".join(f"{name} {value}" for name, value in self._more.items())
            self._event(f"after the last step: {values}", "info")
        if self._group is not None:
            self._group.finish()
        self._orders.give_up(self._last, "the loop ended before its next step")
        self._link.close("stopped" if state == "finished" and self._is_stopping else state, str(reason))
        if self._link.lost:
            print(f"trainctl: {self.id}: {self._link.lost}", file=sys.stderr)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(*_end_of(error))

    def _attach(
        self, optimizer: Any, checkpoint: Callable[..., Any] | None, evaluate: Callable[..., Any] | None
    ) -> None:
        """Take what the loop offers, in addition to before."""
        if optimizer is not None and (self._rate is None or self._rate.optimizer is not optimizer):
            if self._rate is not None:
                self._rate.remove()
            try:
                self._rate = LearningRate(optimizer)
                self._offers.offer("set-lr", None if self._rate.refusal else self._rate.set, self._rate.refusal)
            except Exception as error:  # noqa: BLE001  any library's optimizer ends up here
                self._offers.offer("set-lr", None, f"its optimizer can't be followed: {type(error).__name__}: {error}")
        for verb, function in (("checkpoint", checkpoint), ("evaluate", evaluate)):
            if function is not None:
                self._offers.offer(verb, function, "")
        self._link.change()

    def _event(self, text: str, severity: Severity) -> None:
        self._hand_over({"severity": severity, "text": str(text)[:4000] or "-", "step": self._last or None})

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._event(text, "warning")

    # Steps.

    def _turn_to(self, number: int, is_numbered: bool) -> bool:
        """Have the next step be `number`; return False if it is the newest one again, or none that is recorded."""
        if not 1 <= number <= _MAX_STEP:
            self._warn(f"step {number} is not recorded: steps count from 1, to 2**53 at most")
            return False
        if number == self._last:
            return False
        self._release()
        if number < self._last or (self._is_first and self._continues and is_numbered):
            self._hand_over(number - 1)  # retracts what an earlier process or pass recorded from here on
        self._is_first = False
        self._last = number - 1
        return True

    def _release(self) -> None:
        """Hand over the row that waits."""
        if self._newest is not None:
            self._hand_over(self._newest)
            self._newest = None

    def _add_values(self, loss: Any, metrics: dict[str, Any]) -> None:
        values = self._more if self._newest is None else self._newest[7]
        values.update({name: settle(value) for name, value in metrics.items()})
        if loss is not None and self._last:
            self._warn("a step was given twice; its second loss is not recorded")

    # Orders.

    def _carry_out_agreed(self, group: Group) -> None:
        """Carry out what all ranks carry out at this boundary."""
        group.boundary += 1
        if group.boundary < group.next_tick:
            return
        began = time.monotonic()
        for order in group.due_orders():
            self._carry_out(order)
            if self._is_paused:
                self._release()
        self._is_paused = False
        self._since += time.monotonic() - began

    def _carry_out_orders(self) -> None:
        from trainctl.guest.link import PAUSE_SECONDS

        began = time.monotonic()
        try:
            while self._arrived or (self._is_paused and not self._is_stopping):
                if self._arrived:
                    self._carry_out(self._arrived.popleft())
                elif time.monotonic() - self._link.heard_monotonic > PAUSE_SECONDS:
                    text = f"goes on after {PAUSE_SECONDS / 60:.0f} minutes of pause without an agent"
                    self._event(text, "warning")
                    break
                else:
                    self._release()  # what is on screen of a paused run has its newest step
                    time.sleep(_POLL_SECONDS)
        finally:
            self._is_paused = False
            self._since += time.monotonic() - began

    def _carry_out(self, order: Order) -> None:
        id, verb = order["id"], order["verb"]
        if self._group is None and (refusal := self._offers.refusal(order)):  # rank 0 has judged it for all
            self._finish(id, "rejected", None, refusal)
            return
        try:
            changed = self._call(verb, order["args"])
        except Exception as error:  # noqa: BLE001  the loop's own functions may raise anything
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            self._finish(id, "failed", None, reason)
            return
        pair = changed if isinstance(changed, tuple) and len(changed) == 2 else (None, None)
        self._finish(id, "applied", self._last + (verb in EDITS), "", pair)

    def _call(self, verb: str, args: dict[str, Any]) -> Any:
        """Do what is ordered. Return what the loop's own function returns."""
        function, changed = self._offers.function(verb), None
        if function is not None:
            changed = function(**args)
        elif verb == "note":
            self._event(args.get("text", ""), "info")
        elif verb in ("pause", "resume"):
            self._is_paused = verb == "pause"
        elif verb == "stop" and args.get("checkpoint", True) and self._offers.function("checkpoint") is not None:
            try:
                self._call("checkpoint", {})
            except Exception as error:
                problem = (
                    f"its checkpoint failed ({error}); the loop goes on. To stop without one, add checkpoint=false"
                )
                raise ValueError(problem) from error
        self._is_stopping = self._is_stopping or verb == "stop"
        return changed


_current: Run | None = None
_pid = 0
_claimed = ("", 0)  # a command's run, and the process that makes its steps


def attach(
    name: str | None = None,
    *,
    run: str | None = None,
    steps: int | None = None,
    optimizer: Any = None,
    checkpoint: Callable[..., Any] | None = None,
    evaluate: Callable[..., Any] | None = None,
    agree: Store | None = None,
    loss_unit: str = "",
) -> Run:
    """Attach the training loop of this process, and return its run; called again, the same run until it is closed.

    `name`: shown for it, by default the script's. `run`: its id, to continue a run of an earlier process; by default a
    new one. `steps`: how many the loop makes. `optimizer`: of torch, for set-lr. `checkpoint`, `evaluate`: functions
    without arguments that the verbs of that name call between two steps. `loss_unit`: such as "nats per token".
    `agree`: a store by which several ranks agree on orders, by default that of torch.distributed.
    """
    global _current, _pid
    if _current is None:
        rank, ranks = (agree.rank, agree.ranks) if agree is not None else rank_and_ranks()
        shown = str(name or os.environ.get("TRAINCTL_GUEST_NAME") or _script_name())[:64]
        ordered = os.environ.get("TRAINCTL_GUEST_RUN")
        if ordered and rank == 0 and not _claim(ordered):
            ordered = None  # another process of the command trains it: this one has a run of its own
        id, now = str(run or ordered or ""), time.time()
        stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{os.urandom(2).hex()}"
        described: dict[str, Any] = {
            "run": _as_id(id) if id else f"{_as_id(shown)[: 63 - len(stamp)]}-{stamp}",
            "name": shown,
            "started_at": now,
            "ranks": [{"rank": 0, "backend": _backend(), "pid": os.getpid()}, *({"rank": n} for n in range(1, ranks))],
            "kind": "exec" if ordered and id == ordered else "guest",
            "steps": max(0, int(steps)) if steps is not None and hasattr(steps, "__index__") else None,
            "loss_unit": str(loss_unit or "")[:32],
        }
        _current = Run(described, continues=bool(id), rank=rank, agree=agree)
        if not _pid:
            atexit.register(_close_at_exit)
            os.register_at_fork(after_in_child=_forget_in_child)
        _pid = os.getpid()
    _current._attach(optimizer, checkpoint, evaluate)
    return _current


def _claim(run: str) -> bool:
    """Have this process make the steps of a command's run until it ends; return whether no other one does so."""
    global _claimed
    state, claim = os.environ.get("TRAINCTL_GUEST_STATE"), (run, os.getpid())
    if not state or _claimed == claim:
        return True
    import fcntl

    try:
        os.makedirs(os.path.join(state, "spool"), mode=0o700, exist_ok=True)
        file = os.open(os.path.join(state, "spool", f"{run}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return False
    _claimed = claim
    return True


def _script_name() -> str:
    return os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0].strip("-_") or "python"


def _as_id(name: str) -> str:
    """Return a name as the id of a run."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in name.lower())
    return kept.lstrip("._-")[:64] or "run"


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
