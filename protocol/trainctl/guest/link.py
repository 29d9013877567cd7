"""The one thread that talks to the agent: it converts the loop's values, sends lines, and takes orders.

The loop never waits for it. While no agent answers, lines go to the spool.
"""

import contextlib
import json
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from trainctl.guest import find_agent
from trainctl.guest.orders import Order, Orders, Outcome
from trainctl.guest.rows import Batch, Event, Outbox, RawStep, Rewind, RowEncoder, line, steps_line
from trainctl.guest.spool import Spool

VERSION: Final = 1
"""Version of the lines between loop and agent."""
TICK_SECONDS: Final = 0.2
ABSENT_SECONDS: Final = 10.0
"""Seconds without an answer after which lines go to the spool."""
ALIVE_SECONDS: Final = 5.0
"""Seconds after which an empty line shows that the loop's process is alive."""
FLUSH_SECONDS: Final = 1.0
"""Most seconds that the end of a run takes."""
_ANSWER_SECONDS: Final = 0.5  # at the end, before lines go to the spool
_SPOOL_SECONDS: Final = 0.3  # left for writing them
_RETRY_SECONDS: Final = 1.0
_BUSY_SECONDS: Final = 5.0  # after an agent has refused the run for now

Item = RawStep | Event | Rewind


class Link:
    """Sends a run's lines to the agent of this machine, and keeps them until it has them."""

    def __init__(self, attach: dict[str, Any], verbs: Callable[[], dict[str, str]], orders: Orders) -> None:
        """`attach` describes the run; `verbs` says what the loop takes."""
        self.items: deque[Item] = deque()
        """Steps, events and rewinds from the loop, in order."""
        self.refused = ""
        """Why an agent has refused the run for good."""
        self.lost = ""
        """The steps that neither the agent nor the spool got at the end, and why; empty: none."""
        self._attach, self._verbs, self._orders = attach, verbs, orders
        self._outbox, self._encoder = Outbox(), RowEncoder()
        self._state = find_agent.state_folder()
        self._spool = Spool(self._state, attach["run"])
        self._spool_problem, self._spool_due = "", 0.0
        self._socket: socket.socket | None = None
        self._path = ""  # where the agent was that has answered
        self._connect_due = 0.0
        self._received, self._unsent = bytearray(), b""
        self._in_flight: tuple[Batch | None, list[Outcome]] | None = None
        self._sent_monotonic = 0.0
        self._newest = 0  # step up to which rows were sent
        self._is_hello_due = self._is_absent = self._has_spooled = False
        self._connected_monotonic = 0.0
        self.heard_monotonic = time.monotonic()
        self._base_known = True
        self._end: bytes | None = None
        self._is_end_sent = self._is_end_kept = False
        self._deadline = 0.0
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="trainctl-guest", daemon=True)

    def start(self, *, continues: bool) -> None:
        """`continues`: steps are counted from the newest that the record has."""
        self._base_known = not continues
        self._thread.start()

    def change(self) -> None:
        """Say hello again: the run or its verbs have changed."""
        self._is_hello_due = True

    def close(self, state: str, reason: str) -> None:
        """Send all that is left and the end, within FLUSH_SECONDS."""
        self._deadline = time.monotonic() + FLUSH_SECONDS
        self._end = line("end", state=state, reason=reason[:1000])
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join(FLUSH_SECONDS)
        if self._thread.is_alive():
            self.lost = self.lost or "its last steps may be missing: the end took too long"

    def abandon(self) -> None:
        """Let go of everything in a forked child: the parent has the thread and sends."""
        for file in (self._socket, self._wake, self._woken):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._spool.close()
        self.items = deque(maxlen=0)

    # The thread.

    def _run(self) -> None:
        while not self._is_over():
            self._tick()
        self._disconnect()
        self._spool.close()
        for end in (self._wake, self._woken):
            end.close()

    def _is_over(self) -> bool:
        if self.refused:
            return True
        if self._end is None:
            return False
        return self._is_end_kept or time.monotonic() >= self._deadline

    def _tick(self) -> None:
        try:
            self._exchange()
        except Exception as error:  # noqa: BLE001  whatever it is, the loop trains on
            self._disconnect()
            self._connect_due = time.monotonic() + _BUSY_SECONDS
            _say(f"{self._attach['run']}: {type(error).__name__}: {error}")
            time.sleep(TICK_SECONDS)

    def _exchange(self) -> None:
        self._take_items()
        now = time.monotonic()
        if self._socket is None and now >= self._connect_due:
            self._connect(now)
        if self._socket is not None:
            self._send(now)
        self._is_absent = now - max(self.heard_monotonic, self._connected_monotonic) > ABSENT_SECONDS
        if self._end is not None and not self._is_end_kept:
            asked = max(self.heard_monotonic, self._deadline - FLUSH_SECONDS)
            if self._socket is None or now > min(asked + _ANSWER_SECONDS, self._deadline - _SPOOL_SECONDS):
                self._spool_rest()
                return
        elif self._is_absent and now >= self._spool_due:
            self._write_spool(now)
        self._wait()

    def _take_items(self) -> None:
        items, outbox = self.items, self._outbox
        while items:
            item = items.popleft()
            if isinstance(item, tuple):
                outbox.add_row(item[0], self._encoder.encode(item))
                for complaint in self._encoder.complaints:
                    outbox.add_event(Event(complaint, "warning", item[0]))
                self._encoder.complaints.clear()
            elif isinstance(item, Event):
                outbox.add_event(item)
            else:
                self._base_known = True
                outbox.add_rewind(item)

    def _wait(self) -> None:
        """Wait for an answer, an order, the end or the next tick."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        until = time.monotonic() + (TICK_SECONDS if self._end is None else 0.02)
        while (left := until - time.monotonic()) > 0:
            ready = dict(poll.poll(1000 * left))
            if self._woken.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(64)
                return
            if not ready or self._socket is None:
                return
            if ready.get(self._socket.fileno(), 0) & select.POLLOUT:
                self._flush()
                return
            self._receive()
            if self._in_flight is None and (self._end is not None or not self._outbox.is_sent):
                return

    # Connection.

    def _connect(self, now: float) -> None:
        self._connect_due = now + _RETRY_SECONDS
        paths = find_agent.sockets()
        if self._path:  # the steps that it has recorded are known there alone
            paths = [self._path]
        for path in paths:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(path)
            except OSError:
                connection.close()
                continue
            self._socket, self._connected_monotonic = connection, now
            self._spool.close()
            self._received.clear()
            self._unsent, self._in_flight = b"", None
            self._outbox.send_again()
            self._newest, self._is_end_sent = 0, False
            self._put(self._hello(None), None, [])
            return

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _hello(self, after_step: int | None) -> bytes:
        self._is_hello_due = False
        attach = self._attach if after_step is None else {**self._attach, "after_step": after_step}
        return line("hello", version=VERSION, attach=attach, verbs=self._verbs(), socket=self._path)

    def _put(self, text: bytes, batch: Batch | None, outcomes: list[Outcome]) -> None:
        self._in_flight = (batch, outcomes)
        self._sent_monotonic = time.monotonic()
        self._unsent += text
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent and self._socket is not None:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._disconnect()

    def _send(self, now: float) -> None:
        """Send the next line, if the one before was answered."""
        if self._in_flight is not None or self._socket is None:
            return
        if self._is_hello_due:
            self._put(self._hello(None), None, [])
        elif (batch := self._outbox.take()) is not None:
            self._put_batch(batch)
        elif outcomes := self._orders.due(self._newest):
            self._put(steps_line((), self._fields(outcomes)), None, outcomes)
        elif self._end is not None and not self._is_end_sent:
            self._is_end_sent = True
            self._put(self._end, None, [])
        elif now - self._sent_monotonic > (ALIVE_SECONDS if not len(self._outbox) else _RETRY_SECONDS):
            self._put(steps_line((), ()), None, [])

    def _put_batch(self, batch: Batch) -> None:
        if batch.kind == "row":
            self._newest = batch.number
            outcomes = self._orders.due(batch.number)
            text = steps_line(batch.texts, self._fields(outcomes))
            self._put(text, batch, outcomes)
        else:
            text = batch.texts[0] if batch.kind == "event" else self._hello(batch.number)
            self._put(text, batch, [])

    def _receive(self) -> None:
        assert self._socket is not None
        try:
            text = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        if not text:
            self._disconnect()
            return
        self._received += text
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for one in lines:
            self._hear(json.loads(one))

    def _hear(self, message: dict[str, Any]) -> None:
        self.heard_monotonic = time.monotonic()
        if self._is_absent:  # it was silent so long that the spool has lines, which it reads at a hello
            self._is_absent = False
            if self._spool.is_open:
                self._disconnect()
                self._connect_due = 0.0
                return
        match message.get("type"):
            case "kept":
                self._kept(int(message.get("step", 0)), int(message.get("event", 0)))
            case "order":
                self._orders.take(Order(message["id"], message["verb"], message.get("args") or {}))
            case "refused":
                self._disconnect()
                self._connect_due = time.monotonic() + _BUSY_SECONDS
                if message.get("final"):
                    self.refused = str(message.get("reason", ""))
                    _say(f"the agent does not record {self._attach['run']}: {self.refused}")
            case _:
                pass

    def _kept(self, step: int, event: int) -> None:
        if self._in_flight is None or self._socket is None:
            return
        batch, outcomes = self._in_flight
        self._in_flight = None
        self._path = str(self._socket.getpeername())
        if self._has_spooled:  # it has taken up the file
            self._has_spooled = False
            self._outbox.mark(spooled=False)
        if not self._base_known:
            self._base_known = True
            self._outbox.base = step
        self._orders.sent(outcomes)
        self._outbox.confirm(step, event, rewound=batch is not None and batch.kind == "rewind")
        if self._outbox.dropped:
            text = f"{self._outbox.dropped} steps are missing: more than could be kept waited for an agent"
            self._outbox.dropped = 0
            self._outbox.add_event(Event(text, "warning"))
        if self._is_end_sent and batch is None and not len(self._outbox):
            self._is_end_kept = True

    def _fields(self, outcomes: list[Outcome]) -> list[dict[str, Any]]:
        return [outcome.fields(self._outbox.base) for outcome in outcomes]

    # Spool.

    def _write_spool(self, now: float) -> None:
        self._spool_due = now + _RETRY_SECONDS
        batches = self._outbox.spool() if self._base_known else []
        if not batches:
            return
        try:
            self._spool.write(self._hello(None), [self._spooled(batch) for batch in batches])
        except OSError as error:
            self._spool_due = now + ABSENT_SECONDS
            if not self._spool_problem:
                self._spool_problem = f"{self._spool.path}: {error.strerror or error}"
                _say(f"no agent, and steps can't be kept in {self._spool_problem}; {len(self._outbox)} wait in memory")
        else:
            self._spool_problem = ""
            self._outbox.mark(spooled=True)
            self._has_spooled = True

    def _spooled(self, batch: Batch) -> bytes:
        if batch.kind == "row":
            return steps_line(batch.texts, self._fields(self._orders.due(batch.number)))
        return batch.texts[0] if batch.kind == "event" else self._hello(batch.number)

    def _spool_rest(self) -> None:
        """Keep what the agent did not confirm, and the end."""
        assert self._end is not None
        self._disconnect()
        lines = [self._spooled(batch) for batch in self._outbox.spool()]
        if outcomes := self._orders.due(sys.maxsize):
            lines.append(steps_line((), self._fields(outcomes)))
        try:
            self._spool.write(self._hello(None), [*lines, self._end])
        except OSError as error:
            rows = self._outbox.unspooled
            self.lost = f"{rows} steps are lost: no agent answers, and {self._spool.path}: {error.strerror or error}"
        self._is_end_kept = True


def _say(text: str) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write(f"trainctl: {text}\n")
