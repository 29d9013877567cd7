"""The ranks of one loop: a thread that asks their store, and what each rank says of its steps.

Rank 0 has the link to the agent; the others have this alone.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainctl.guest.agreement import Leader, Member, Put, Read
from trainctl.guest.link import PAUSE_SECONDS, Link
from trainctl.guest.orders import EDITS, Offers, Orders
from trainctl.guest.rows import RowEncoder, to_json
from trainctl.guest.torch_store import TorchStore, is_initialized

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainctl.guest.agreement import Delete, Exchange
    from trainctl.guest.orders import Order, Outcome
    from trainctl.guest.rows import Encoded, Event, RawStep, Rewind
    from trainctl.guest.torch_store import Store

CLOSE_SECONDS: Final = 0.5
"""Most seconds for which the end of a run waits for the other ranks."""
HOLD_SECONDS: Final = 10.0
"""Most seconds for which a step waits for the other ranks' parts."""
MAX_PARTS: Final = 64
"""Most ranks of a run that the agent records."""
_POLL_SECONDS: Final = (0.025, 0.2)  # after progress, and at most
_URGENT_SECONDS: Final = 0.005  # while the loop waits for a decision
_WAIT_SECONDS: Final = 0.02
_STATM: Final = Path("/proc/self/statm")
_MAX_REPORTED: Final = 5_000  # steps in one report


_runs = itertools.count()
"""Runs of this process with several ranks, which count alike: each has its keys."""


class Group(ABC):
    """A rank's part in the agreement. The loop's thread calls `due_orders` at ticks, another thread asks the store."""

    def __init__(self, member: Member, agree: Store | None, offers: Offers) -> None:
        self.items: deque[RawStep | Event | Rewind] = deque()
        """Steps, events and rewinds from the loop, in order."""
        self.boundary = 0
        """Calls of step()."""
        self.next_tick: float = 1
        """The boundary at which the loop calls `due_orders`."""
        self.outcomes = Orders()
        """Outcomes of orders on this rank."""
        self._member, self._agree, self._offers = member, agree, offers
        self._encoder = RowEncoder()
        self._is_over = self._is_waiting = False
        self._store: Store | None = None
        self._prefix = f"{next(_runs)}/"
        self._exchange: Exchange | None = None
        self._lock = threading.Lock()  # around the member
        self._wake, self._progress = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainctl-ranks", daemon=True)
        self._thread.start()

    def due_orders(self) -> Iterator[Order]:
        """Yield the orders that all ranks carry out at this boundary. A pause passes in here."""
        member = self._member
        if self._store is None:
            self._begin()
        while self.boundary >= member.boundary:
            with self._lock:
                before = member.now = time.monotonic()
                self._progress.clear()
                decision, ended = member.arrive(), member.ended
            self._wake.set()
            if decision is None and ended:
                self.next_tick, self._is_waiting = math.inf, False
                return
            self._is_waiting = decision is None
            if decision is None:
                self._progress.wait(_WAIT_SECONDS)
                with self._lock:
                    member.wait(min(time.monotonic() - before, 0.5))  # more: this process was stopped
                continue
            yield from decision.orders
            with self._lock:
                member.leave()
            self._wake.set()
        self.next_tick = member.boundary

    def finish(self) -> None:
        """Report the last steps and orders to the other ranks, and wait for theirs."""
        with self._lock:
            self._member.closing = True
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        self._is_over = True  # what is not heard by now, isn't
        self._take()

    def _begin(self) -> None:
        """Find the store, at the loop's first step: the process group exists by then."""
        try:
            if self._agree is None and not is_initialized():
                raise RuntimeError("torch.distributed is not initialized; for other ranks pass agree= to attach()")
            self._store = self._agree or TorchStore()
        except Exception as error:  # noqa: BLE001  whatever it is, the loop trains on
            self._member.ended = f"the ranks have no store in common: {error}"
        self._exchange = self._member.exchange()

    def _run(self) -> None:
        delay, answer = _POLL_SECONDS[0], None
        while True:
            self._take()
            with self._lock:
                request = self._advance(answer)
            self._progress.set()
            if request is not None:
                answer, delay = self._ask(request), _POLL_SECONDS[0]
                continue
            if self._is_over or (self._member.closing and self._exchange is None):
                return
            answer = None
            if self._wake.wait(_URGENT_SECONDS if self._is_waiting else delay):
                self._wake.clear()
                delay = _POLL_SECONDS[0]
            else:
                delay = min(2 * delay, _POLL_SECONDS[1])

    def _advance(self, answer: Any) -> Put | Read | Delete | None:
        if self._exchange is None:
            return None
        self._member.now = time.monotonic()
        try:
            return self._exchange.send(answer)
        except StopIteration:
            self._exchange = None
            return None

    def _ask(self, request: Put | Read | Delete) -> Any:
        assert self._store is not None
        try:
            if isinstance(request, Put):
                return self._store.put(self._prefix + request.key, request.value)
            keys = [self._prefix + key for key in request.keys]
            if isinstance(request, Read):
                return self._store.read(keys)
            self._store.delete(keys)
        except Exception as error:  # noqa: BLE001  any store's errors end up here
            with self._lock:
                self._member.ended = self._member.ended or f"rank {self._member.rank} lost the ranks' store: {error}"
                self._exchange = None
        return None

    @abstractmethod
    def _take(self) -> None:
        """Take in what the loop has handed over."""

    def _fields(self, step: RawStep) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(b"{" + self._encoder.encode(step))
        if "loss" in fields:
            fields["loss"] = float(fields["loss"])  # "nan" too
        return fields

    def _new_outcomes(self) -> list[Outcome]:
        outcomes = self.outcomes.due(math.inf)
        self.outcomes.sent(outcomes)
        return outcomes


class Follower(Group):
    """A rank other than 0. The loop has it in the link's place."""

    lost = ""
    heard_monotonic = math.inf

    def __init__(self, rank: int, ranks: int, agree: Store | None, offers: Offers) -> None:
        self._rows: list[tuple[int, dict[str, Any]]] = []  # number, and its part without memory
        self._verbs: dict[str, str] = {}  # as rank 0 has them
        super().__init__(Member(rank, ranks, self._report), agree, offers)

    def change(self) -> None:
        """Do nothing: the next report has the verbs."""

    def close(self, state: str, reason: str) -> None:
        """Do nothing: rank 0 ends the run."""

    def abandon(self) -> None:
        """Let go of everything in a forked child."""
        self.items = deque(maxlen=0)

    def _take(self) -> None:
        while self.items:
            item = self.items.popleft()
            if isinstance(item, tuple):
                fields = self._fields((*item[:6], None, {}, None))
                self._rows.append((item[0], _part(self._member.rank, fields)))
        del self._rows[:-_MAX_REPORTED]

    def _report(self) -> str:
        report = {"rank": self._member.rank, "rows": self._rows, "memory": _memory_bytes()}
        report["outcomes"] = self._new_outcomes()
        if (verbs := self._offers.verbs()) != self._verbs:
            report["verbs"] = self._verbs = verbs
        self._rows = []
        return json.dumps(report)


class Lead(Group):
    """Rank 0: it has the orders, and hands on steps with the parts of all ranks."""

    def __init__(self, ranks: int, agree: Store | None, orders: Orders, offers: Offers, link: Link) -> None:
        self._orders, self._link = orders, link
        self._leader = Leader(ranks)
        self._held: deque[tuple[float, Any]] = deque()  # time, and (number, fields) of a step, an event or a rewind
        self._parts: dict[int, list[dict[str, Any]]] = defaultdict(list)  # number of a step -> other ranks' parts
        self._heard = dict.fromkeys(range(1, ranks), 0)  # rank -> newest step
        self._handed_on = 0  # newest step
        self._verbs: dict[int, dict[str, str]] = {}  # rank -> what it offers
        self._proposed: set[str] = set()
        self._heard_outcomes: dict[str, dict[int, Outcome]] = defaultdict(dict)  # order -> rank -> outcome
        self._stops: dict[str, Order] = {}  # orders that wait for their checkpoint
        self._refusal = ""
        self._is_forgotten = False
        super().__init__(self._leader, agree, offers)

    def _take(self) -> None:
        while self.items:
            item = self.items.popleft()
            now = time.monotonic()
            self._held.append((now, (item[0], self._fields(item)) if isinstance(item, tuple) else item))
            for text in self._encoder.complaints:
                self._held.append((now, {"severity": "warning", "text": text, "step": self._held[-1][1][0]}))
            self._encoder.complaints.clear()
        while self._leader.reports:
            self._hear(json.loads(self._leader.reports.popleft()))
        for outcome in self._new_outcomes():
            self._heard_outcomes[outcome["id"]][0] = outcome
        if not self._refusal and (why := self._leader.ended or _unsupported()):
            self._watch_only(why)
        self._settle()
        self._propose()
        is_forgotten = self._leader.is_paused and time.monotonic() - self._link.heard_monotonic > PAUSE_SECONDS
        if is_forgotten and not self._is_forgotten:
            self._warn(f"goes on after {PAUSE_SECONDS / 60:.0f} minutes of pause without an agent")
            self._order("", "resume")
        self._is_forgotten = is_forgotten
        self._hand_on()

    def _hear(self, report: dict[str, Any]) -> None:
        rank = report["rank"]
        self._verbs[rank] = report.get("verbs", self._verbs.get(rank, {}))
        for number, part in report["rows"]:
            self._heard[rank] = number
            if number > self._handed_on:
                self._parts[number].append(_with_memory(part, report["memory"]))
        for outcome in report["outcomes"]:
            self._heard_outcomes[outcome["id"]][rank] = outcome

    def _warn(self, text: str) -> None:
        self._held.append((0.0, {"severity": "warning", "text": text, "step": self._handed_on or None}))

    def _order(self, id: str, verb: str, **args: Any) -> None:
        with self._lock:
            self._leader.propose({"id": id, "verb": verb, "args": args})

    def _watch_only(self, why: str) -> None:
        """Refuse all orders from now on."""
        self._refusal = f"{why}; the run can only be watched"
        self._offers.refuse_all(self._refusal)
        self._link.change()
        self._warn(f"no more orders are taken: {why}")
        while self._proposed:
            self._orders.finish(self._proposed.pop(), "failed", None, self._refusal)

    def _propose(self) -> None:
        """Have the ranks carry out what has arrived, once it is known what each of them offers."""
        arrived = self._orders.arrived
        while arrived and (self._refusal or len(self._verbs) == len(self._heard)):
            order = arrived.popleft()
            id, verb, args = order["id"], order["verb"], order["args"]
            if why := self._refusal_of(order):
                self._orders.finish(id, "rejected", None, why)
                continue
            self._proposed.add(id)
            if verb == "stop" and self._offers.function("stop") is None and args.get("checkpoint", True):
                self._stops[id] = order
                self._order(id, "checkpoint")
                self._order("", "pause")  # until it is known that all ranks have written it
            else:
                self._order(id, verb, **args)

    def _refusal_of(self, order: Order) -> str:
        why, verb = self._offers.refusal(order), order["verb"]
        for rank, verbs in self._verbs.items():
            if not why and verb in EDITS and (why := verbs.get(verb, f"it does not offer {verb}")):
                why = f"rank {rank}: {why}"
        return why

    def _settle(self) -> None:
        """Finish the orders of which all ranks have said how they went; at the end those that rank 0 carried out."""
        ranks = {0} if self._is_over else {*range(self._leader.ranks)}
        for id in [id for id, outcomes in self._heard_outcomes.items() if outcomes.keys() >= ranks]:
            state, step, reason, changed = _merged(self._heard_outcomes.pop(id))
            if (stop := self._stops.pop(id, None)) is not None and state == "applied":
                self._order(id, "stop", **{**stop["args"], "checkpoint": False})
                continue
            if stop is not None:
                hint = "the loop goes on. To stop without one, add checkpoint=false"
                state, reason = "failed", f"its checkpoint failed ({reason}); {hint}"
                self._order("", "resume")
            if id in self._proposed:
                self._proposed.discard(id)
                self._orders.finish(id, state, step, reason, changed)
        while self._is_over and self._proposed:
            self._orders.finish(self._proposed.pop(), "failed", None, "the loop ended before its next step")

    def _hand_on(self) -> None:
        """Hand steps to the link in their order, each once the other ranks' parts are there."""
        heard, now = min(self._heard.values()), time.monotonic()
        is_alone = self._is_over or bool(self._leader.ended)
        memory = _memory_bytes() if self._held else None
        while self._held:
            at, item = self._held[0]
            if isinstance(item, tuple):
                if item[0] > heard and not is_alone and now - at < HOLD_SECONDS:
                    return
                item = self._joined(item[0], item[1], memory)
            elif isinstance(item, int):
                self._handed_on = item
                self._parts.clear()
            self._held.popleft()
            self._link.items.append(item)

    def _joined(self, number: int, fields: dict[str, Any], memory: int | None) -> Encoded:
        """Return a step with the parts of all ranks: its loss is their mean, its samples and tokens are their sums,
        or unknown where only some ranks count. What rank 0 alone counts stands for all."""
        self._handed_on = number
        (own,) = fields["parts"]
        own.update(_with_memory(_part(0, fields), memory))
        parts = [own, *sorted(self._parts.pop(number, ()), key=lambda part: int(part["rank"]))]
        losses = [part["values"]["own_loss"] for part in parts if "own_loss" in part["values"]]
        if losses:
            fields["loss"] = sum(losses) / len(losses)
        for name in ("samples", "tokens"):
            counts = [part[name] for part in parts if name in part]
            if len(counts) == self._leader.ranks:
                fields[name] = sum(counts)
            elif any(name in part for part in parts[1:]):
                fields.pop(name, None)
        fields["parts"] = parts[:MAX_PARTS]
        return number, to_json(fields)[1:]


def _part(rank: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's part of a step that it has counted."""
    part: dict[str, Any] = {"rank": rank, "values": {"own_loss": fields["loss"]} if "loss" in fields else {}}
    part.update((name, fields[name]) for name in ("step_seconds", "samples", "tokens") if name in fields)
    return part


def _with_memory(part: dict[str, Any], memory: int | None) -> dict[str, Any]:
    if memory is not None:
        part["values"]["memory_bytes"] = memory
    return part


def _merged(outcomes: dict[int, Outcome]) -> tuple[Any, int | None, str, tuple[Any, Any]]:
    """Return the state, step, reason and change of rank 0's outcome, or of the first rank's whose differs."""
    own = outcomes[0]
    for rank, outcome in sorted(outcomes.items()):
        if outcome["state"] != "applied" or outcome["step"] != own["step"]:
            return "failed", None, f"rank {rank}: {outcome['reason'] or 'at another step'}", (None, None)
    return own["state"], own["step"], own["reason"], (own["before"], own["after"])


def _unsupported() -> str:
    """Return why the ranks of this process take no orders, if its library forbids it."""
    deepspeed = sys.modules.get("deepspeed")
    comm = getattr(deepspeed, "comm", None)
    return "orders under DeepSpeed are not supported" if comm is not None and comm.is_initialized() else ""


def _memory_bytes() -> int | None:
    """Return the memory that this process uses: on its device, else of the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    try:
        return int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
