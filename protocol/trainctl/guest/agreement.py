"""Agreement of several ranks on which orders they carry out at which boundary: pure, without a store or a clock.

Each rank counts its boundaries, the calls of `step()`. Some of them are ticks. Rank 0 publishes one decision per tick,
one tick ahead: the orders that all ranks carry out there, and the boundary of the next tick. A key of the store is
written once: whoever comes first decides, also when a rank gives up on a decision, so that all ranks read the same.

A store that does not answer could leave a rank behind that goes on without a decision. So rank 0 gives notice of orders
first. A rank that has confirmed a notice waits for the decisions after it for as long as the store is silent; only when
all have confirmed it, rank 0 publishes the orders.

`Member` is a rank's side, `Leader` that of rank 0. The loop's thread calls `arrive` and `leave` at ticks; a second
thread carries out the requests that `exchange` yields, and sends the answers into it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainctl.guest.orders import Order

GIVE_UP_SECONDS: Final = 10.0
"""Seconds without a decision after which a rank goes on without one."""
IN_DOUBT_SECONDS: Final = 600.0
"""Seconds without one for a rank that has confirmed a notice, while the store is silent. Also for an order."""
TICK_SECONDS: Final = 0.2
NOTICE_SECONDS: Final = 0.05
"""Seconds between two ticks while orders wait."""
PAUSE_SECONDS: Final = 1.0
"""Seconds between two decisions of a pause without orders."""
MAX_BOUNDARIES: Final = 50
"""Most boundaries between two ticks."""


@dataclass(frozen=True)
class Put:
    """A request to keep a value under a key that has none. The answer: the value that the key has then."""

    key: str
    value: str


@dataclass(frozen=True)
class Read:
    """A request for the values of some keys. The answer: None if one of them has none yet."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Delete:
    """A request to forget keys."""

    keys: tuple[str, ...]


Exchange = Generator[Put | Read | Delete | None, Any, None]
"""Requests to the store; None: nothing to ask now."""


@dataclass(frozen=True)
class Decision:
    """One tick's decision. `following`: the boundary of the next tick, the same one during a pause."""

    tick: int
    following: int
    orders: Sequence[Order] = ()
    notice: bool = False
    ended: str = ""  # why the ranks no longer agree

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Decision:
        return cls(**json.loads(text))


class Member:
    """A rank other than 0. `report` returns what happened on it since the last call."""

    def __init__(self, rank: int, ranks: int, report: Callable[[], str]) -> None:
        self.rank, self.ranks = rank, ranks
        self.now = 0.0  # monotonic time; the caller sets it
        self.ended = ""
        """Why the ranks no longer agree; empty while they do."""
        self.boundary = 1  # of the next tick
        self.closing = False
        self._report = report
        self._tick = 0  # the loop's next one
        self._decisions = {0: Decision(0, 2)}  # of ticks that the loop has not left
        self._promised = False  # it has confirmed a notice: orders may follow
        self._waited = 0.0
        self._lost = False  # it went on without a decision, which the others don't know yet

    def arrive(self) -> Decision | None:
        """Return the decision for the tick whose boundary the loop has reached; None: wait, or go on if `ended`."""
        return self._decisions.get(self._tick)

    def wait(self, seconds: float) -> None:
        """Count the seconds for which the loop has waited for a decision; at the limit it goes on without."""
        self._waited += seconds
        if self._waited >= (IN_DOUBT_SECONDS if self._promised else GIVE_UP_SECONDS + 1):  # +1: the store may answer
            self.give_up(f"rank {self.rank} could not read a decision for {GIVE_UP_SECONDS:.0f} s")

    def give_up(self, why: str) -> None:
        """Go on without further decisions."""
        self._lost = not self.ended
        self.ended = self.ended or why

    def leave(self) -> None:
        """Note that the loop has carried out the decision."""
        self.boundary = self._decisions.pop(self._tick).following
        self._tick, self._waited = self._tick + 1, 0.0

    def exchange(self) -> Exchange:
        """Yield requests to the store; the caller sends the answers."""
        while not (self.ended or self.closing):
            if self._tick in self._decisions:
                yield None
                continue
            tick = self._tick
            texts = yield Read((_decision_key(tick),))
            if texts is None and self._waited < GIVE_UP_SECONDS:
                yield None
                continue
            why = f"rank {self.rank} could not read a decision for {GIVE_UP_SECONDS:.0f} s"
            self._learn(Decision.parse(texts[0] if texts else (yield _end(tick, why))))
            if not self.ended:
                yield Put(_report_key(tick, self.rank), self._report())
        yield from self._tell(self._tick)
        if self.closing:
            yield Put(_last_key(self.rank), self._report())

    def _learn(self, decision: Decision) -> None:
        if not self.ended:  # else the loop went on without it
            self.ended, self._promised = decision.ended, decision.notice
            if not self.ended:
                self._decisions[decision.tick] = decision

    def _tell(self, tick: int) -> Exchange:
        """Tell the others that this rank went on, by the first decision that nobody has published."""
        while self._lost:
            self._lost = not Decision.parse((yield _end(tick, self.ended))).ended
            tick += 1


class Leader(Member):
    """Rank 0: it decides, and hears of the others."""

    def __init__(self, ranks: int) -> None:
        super().__init__(0, ranks, str)
        self.reports: deque[str] = deque()
        """The other ranks' reports; the caller takes them."""
        self._waiting: list[Order] = []
        self._arrived = -1  # newest tick that the loop has reached
        self._published = Decision(0, 2)
        self._published_at = 0.0
        self._confirmed = 0  # newest tick that all ranks have confirmed
        self._unconfirmed: deque[tuple[int, float]] = deque()  # ticks after that one, each with the seconds for it
        self._late_at = 0.0  # a rank that has not confirmed the first of them then is late
        self._noticed = 0  # tick since which each decision gives notice
        self.is_paused = False
        self._spacing = 1  # boundaries between two ticks
        self._paced: tuple[int, float] | None = None  # boundary and time of the last tick outside a pause

    def propose(self, order: Order) -> None:
        """Have all ranks carry out an order."""
        self._waiting.append(order)

    def arrive(self) -> Decision | None:
        if self._arrived < self._tick:
            self._arrived = self._tick
            self._pace()
        return super().arrive()

    def exchange(self) -> Exchange:
        while not (self.ended or self.closing):
            if self._is_due():
                if self._waiting and self._unconfirmed:
                    yield from self._collect()
                yield from self._publish(self._next())
            elif not (self._unconfirmed and (yield from self._collect())):
                late = yield from self._late_rank()
                if late:
                    yield from self._publish(self._end_without(late))
                else:
                    yield None
        yield from self._tell(self._published.tick + 1)
        if self.closing:
            yield _end(self._published.tick + 1, "rank 0 has closed its run")
            while (texts := (yield Read(tuple(map(_last_key, range(1, self.ranks)))))) is None:
                yield None
            self.reports.extend(texts)

    def _pace(self) -> None:
        if self._paced and self.boundary > self._paced[0]:
            seconds = max(1e-6, (self.now - self._paced[1]) / (self.boundary - self._paced[0]))
            wanted = (NOTICE_SECONDS if self._waiting else TICK_SECONDS) / seconds
            self._spacing = max(1, int(min(wanted, 2 * self._spacing, MAX_BOUNDARIES)))
        self._paced = None if self.is_paused else (self.boundary, self.now)

    def _is_due(self) -> bool:
        """Say whether to publish the next decision: the loop is at the tick before, in a pause or busy with orders."""
        is_urgent = self._waiting and (not self._published.notice or self._confirmed >= self._noticed)
        seconds = NOTICE_SECONDS if is_urgent or self._published.orders else PAUSE_SECONDS
        if self.is_paused or self._arrived == self._tick < self._published.tick:
            return self.now - self._published_at >= seconds
        return self._arrived >= self._published.tick

    def _next(self) -> Decision:
        last, orders = self._published, self._waiting
        if last.notice and self._confirmed >= self._noticed:
            self._waiting = []
        else:
            orders = []
        for order in orders:
            if order["verb"] in ("pause", "resume", "stop"):
                self.is_paused = order["verb"] == "pause"
        following = last.following + (0 if self.is_paused else self._spacing)
        if self._waiting and not last.notice:
            self._noticed = last.tick + 1
        return Decision(last.tick + 1, following, orders, notice=bool(self._waiting))

    def _publish(self, decision: Decision) -> Exchange:
        self._promised = bool(decision.orders)  # in doubt until the store answers
        kept = Decision.parse((yield Put(_decision_key(decision.tick), decision.text())))
        patience = IN_DOUBT_SECONDS if self._published.orders else GIVE_UP_SECONDS  # orders are carried out before
        self._unconfirmed.append((kept.tick, patience))
        if len(self._unconfirmed) == 1:
            self._late_at = self.now + patience
        self._published, self._published_at = kept, self.now
        self._learn(kept)
        self._promised = False

    def _collect(self) -> Generator[Any, Any, bool]:
        """Take in the oldest unconfirmed tick's reports, if all are there. Then nobody needs its keys any more."""
        tick, _ = self._unconfirmed[0]
        keys = tuple(_report_key(tick, rank) for rank in range(1, self.ranks))
        texts = yield Read(keys)
        if texts is None:
            return False
        self._unconfirmed.popleft()
        if self._unconfirmed:
            self._late_at = self.now + self._unconfirmed[0][1]
        self._confirmed = tick
        self.reports.extend(texts)
        yield Delete((_decision_key(tick), *keys))
        return True

    def _late_rank(self) -> Generator[Any, Any, int]:
        """Return a rank that has not confirmed a decision in time, while the loop went on; 0 if there is none."""
        if not self._unconfirmed or self.now < self._late_at:
            return 0
        tick, _ = self._unconfirmed[0]
        if self._arrived < tick + 2:
            return 0
        for rank in range(1, self.ranks):
            if (yield Read((_report_key(tick, rank),))) is None:
                return rank
        return 0

    def _end_without(self, rank: int) -> Decision:
        why = f"rank {rank} has not confirmed a decision for {GIVE_UP_SECONDS:.0f} s; does it call attach() and step()?"
        return Decision(self._published.tick + 1, 0, ended=why)


def _decision_key(tick: int) -> str:
    return f"decision/{tick}"


def _report_key(tick: int, rank: int) -> str:
    return f"report/{tick}/{rank}"


def _last_key(rank: int) -> str:
    return f"last/{rank}"


def _end(tick: int, why: str) -> Put:
    return Put(_decision_key(tick), Decision(tick, 0, ended=why).text())
