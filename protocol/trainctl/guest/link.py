"""The one thread that talks to the agent: it converts the loop's values, sends lines, and takes orders.

The loop never waits for it. While no agent answers, lines go to the spool.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import threading
import time
from collections import deque
from math import inf
from pathlib import Path

from trainctl.guest import find_agent
from trainctl.guest.rows import MAX_ROWS, Outbox, RowEncoder, line, steps_line
from trainctl.guest.spool import Spool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from trainctl.guest.orders import Orders, Outcome
    from trainctl.guest.rows import Batch, Encoded, Event, RawStep, Rewind

VERSION = 1
"""Version of the lines between loop and agent."""
TICK_SECONDS = 0.2
ABSENT_SECONDS = 10.0
"""Seconds without an answer after which lines go to the spool."""
PAUSE_SECONDS = 600.0
"""Seconds without an agent after which a paused loop goes on."""
ALIVE_SECONDS = 5.0
"""Seconds after which an empty line shows that the loop's process is alive."""
FLUSH_SECONDS = 1.0
"""Most seconds that the end of a run takes."""
_ANSWER_SECONDS = 0.5  # at the end: without an answer for so long, what is left goes to the spool
_SPOOL_SECONDS = 0.3  # at the end: kept for that
_CONVERSION_SECONDS = 30.0  # at the end: most seconds for a value that a device is computing
_RETRY_SECONDS = 1.0
_BUSY_SECONDS = 5.0  # after an agent has refused the run for now
_ITEMS_AT_ONCE = 64  # converted before the loop's thread gets its turn


class Link:
    """Sends a run's lines to the agent of this machine, and keeps them until it has them."""

    def __init__(
        self, attach: dict[str, Any], verbs: Callable[[], dict[str, str]], orders: Orders, *, continues: bool
    ) -> None:
        """`attach` describes the run; `verbs` says what the loop takes; `continues`: steps without numbers count from
        the newest that the record has."""
        self.items: deque[RawStep | Encoded | Event | Rewind] = deque(maxlen=MAX_ROWS)
        """Steps, events and rewinds from the loop, in order."""
        self.lost = ""
        """The steps that neither the agent nor the spool got at the end, and why; empty: none."""
        self.heard_monotonic = time.monotonic()
        self._attach, self._verbs, self._orders = attach, verbs, orders
        self._outbox, self._encoder = Outbox(), RowEncoder()
        self._is_base_known = not continues
        self._spool = Spool(find_agent.spool_state(), attach["run"])
        self._spool_due, self._has_spooled, self._has_complained = 0.0, False, False
        self._socket: socket.socket | None = None
        self._agent: tuple[str, Path] | None = None  # the socket whose agent has answered, and its state folder
        self._tried = ("", Path())  # those of the newest connection
        self._connect_due = self._connected_monotonic = self._sent_monotonic = 0.0
        self._received, self._unsent = b"", b""
        self._hello_sent = b""  # the newest on this connection
        self._in_flight: tuple[Batch | None, list[Outcome]] | None = None  # what the line awaiting its answer had
        self._newest = 0  # step up to which rows were sent on this connection
        self._is_hello_due = self._is_absent = self._is_refused = self._is_converting = False
        self._end: bytes | None = None
        self._is_ending = self._is_end_sent = self._is_over = False
        self._deadline = inf
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._said: set[str] = set()
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="trainctl-guest", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._is_refused, self.items = True, deque(maxlen=0)
            self._say(f"it isn't recorded: {error}")

    @property
    def is_answered(self) -> bool:
        """Return whether an agent has answered: the run exists, or is refused."""
        return self._agent is not None or self._is_refused

    def change(self) -> None:
        """Say hello again if the run or its verbs have changed."""
        self._is_hello_due = True

    def close(self, state: str, reason: str) -> None:
        """Send all that is left and the end, within FLUSH_SECONDS."""
        end = line("end", state=state, reason=reason[:1000])
        self._deadline = time.monotonic() + FLUSH_SECONDS
        self._end = end
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")
        if self._thread.ident is not None:
            self._thread.join(FLUSH_SECONDS)
        if self._is_converting:  # a thread that is in a library when the interpreter ends may abort the process
            self._thread.join(_CONVERSION_SECONDS)
        if self._thread.is_alive() or (self.items and not self.lost):
            self.lost = f"its last steps may be missing: not all were recorded within {FLUSH_SECONDS:g} s"
        if self._outbox.dropped:
            self.lost = f"{self._outbox.dropped} steps are lost: more than {MAX_ROWS:,} waited for an agent"

    def abandon(self) -> None:
        """Let go of everything in a forked child: the parent has the thread and sends."""
        for file in (self._socket, self._waker, self._woken):
            if file is not None:
                file.close()
        self._spool.close()
        self.items = deque(maxlen=0)

    # The thread.

    def _run(self) -> None:
        while not self._is_over and not self._is_refused:
            self._tick()
        self._disconnect()
        self._spool.close()
        while self._end is None:  # refused: the loop goes on, and its tensors are not kept
            self.items.clear()
            time.sleep(TICK_SECONDS)
        self._waker.close()
        self._woken.close()

    def _tick(self) -> None:
        self._is_ending = self._end is not None  # looked at before the items: the end comes after all of them
        try:
            self._convert()
            self._exchange()
            if not self._is_over:
                self._wait()
        except Exception as error:  # noqa: BLE001  whatever it is, the loop trains on
            self._disconnect()
            self._connect_due = time.monotonic() + _BUSY_SECONDS
            self._say(f"{type(error).__name__}: {error}")
            if self._is_ending:
                self._is_over = True
                with contextlib.suppress(Exception):
                    self._spool_rest()
            time.sleep(TICK_SECONDS)

    def _convert(self) -> None:
        """Make rows of what the loop has handed over."""
        items = self.items
        self._is_converting = True
        try:
            while items and time.monotonic() < self._deadline - _SPOOL_SECONDS:
                for _ in range(min(len(items), _ITEMS_AT_ONCE)):
                    item = items.popleft()
                    self._is_base_known = self._is_base_known or isinstance(item, int)
                    self._outbox.add(item, self._encoder)
                if items and self._end is None:
                    time.sleep(0.0005)
        finally:
            self._is_converting = False

    def _exchange(self) -> None:
        now = time.monotonic()
        if self._socket is None and now >= self._connect_due:
            self._connect(now)
        if self._socket is not None:
            self._send(now)
        self._is_absent = now - max(self.heard_monotonic, self._connected_monotonic) > ABSENT_SECONDS
        if self._is_ending and not self._is_over:
            asked = max(self.heard_monotonic, self._deadline - FLUSH_SECONDS)
            if self._socket is None or now > min(asked + _ANSWER_SECONDS, self._deadline - _SPOOL_SECONDS):
                self._spool_rest()
        elif self._is_absent and now >= self._spool_due:
            self._write_spool(now)

    def _wait(self) -> None:
        """Wait for an answer, an order, the end or the next tick."""
        until = time.monotonic() + (TICK_SECONDS if self._end is None else 0.02)
        while (left := until - time.monotonic()) > 0:
            if self._socket is not None and self._unsent:
                self._poll.modify(self._socket, select.POLLIN | select.POLLOUT)
            ready = dict(self._poll.poll(1000 * left))
            if self._woken.fileno() in ready:
                self._woken.recv(64)
                return
            if self._socket is None:
                return
            event = ready.get(self._socket.fileno(), 0)
            if event & ~select.POLLOUT:
                self._receive()
                if self._in_flight is None and (self._end is not None or not self._outbox.is_sent):
                    return
            elif event:
                self._poll.modify(self._socket, select.POLLIN)
                self._flush()

    # Connection.

    def _connect(self, now: float) -> None:
        self._connect_due = now + _RETRY_SECONDS
        for tried in [self._agent] if self._agent else find_agent.sockets():  # the one that has the run's steps
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            try:
                connection.connect(tried[0])
            except OSError:
                connection.close()
                continue
            self._socket, self._connected_monotonic, self._tried = connection, now, tried
            self._poll.register(connection, select.POLLIN)
            self._spool.close()
            self._outbox.send_again()
            self._received, self._unsent = b"", b""
            self._newest, self._is_end_sent = 0, False
            self._hello_sent = self._hello(None)
            self._put(self._hello_sent, None, [])
            return

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
            self._socket = None
        self._in_flight = None

    def _hello(self, after_step: int | None) -> bytes:
        self._is_hello_due = False
        socket_path = self._agent[0] if self._agent else ""
        attach = self._attach if after_step is None else {**self._attach, "after_step": after_step}
        return line("hello", version=VERSION, attach=attach, verbs=self._verbs(), socket=socket_path)

    def _text(self, batch: Batch | None, outcomes: list[Outcome]) -> bytes:
        kind, number, texts = batch or ("row", 0, [])
        if kind == "row":
            base = self._outbox.base
            moved = [{**one, "step": one["step"] and base + one["step"]} for one in outcomes] if base else outcomes
            return steps_line(texts, moved)
        return texts[0] if kind == "event" else self._hello(number)

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
        if self._in_flight is not None:
            return
        if self._is_hello_due and (hello := self._hello(None)) != self._hello_sent:
            self._hello_sent = hello
            self._put(hello, None, [])
            return
        batch = self._outbox.take()
        if batch is not None and batch[0] == "row":
            self._newest = batch[1]
        outcomes = self._orders.due(self._newest) if batch is None or batch[0] == "row" else []
        if batch is not None or outcomes:
            self._put(self._text(batch, outcomes), batch, outcomes)
        elif self._is_ending and not self._is_end_sent:
            assert self._end is not None
            self._is_end_sent = True
            self._put(self._end, None, [])
        elif now - self._sent_monotonic > (_RETRY_SECONDS if len(self._outbox) else ALIVE_SECONDS):
            self._put(steps_line((), ()), None, [])

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
            self._connect_due = 0.0 if self._end is None else self._connect_due
        *lines, self._received = (self._received + text).split(b"\n")
        for one in lines:
            self._hear(json.loads(one))

    def _hear(self, message: dict[str, Any]) -> None:
        self.heard_monotonic = time.monotonic()
        if self._spool.is_open:  # it was silent for so long; what was spooled it reads before it answers a hello
            self._disconnect()
            self._connect_due = 0.0
            return
        kind = message.get("type")
        if kind == "kept" and self._in_flight is not None and self._socket is not None:
            if self._agent is None:
                self._agent = self._tried
                self._spool = Spool(self._agent[1], self._attach["run"])
            self._confirm(int(message["step"]), int(message.get("event", 0)), *self._in_flight)
        elif kind == "order":
            names = ("id", "verb", "args", "expires_at")
            self._orders.take({"args": {}, **{name: message[name] for name in names if name in message}})
        elif kind == "refused":
            self._disconnect()
            self._connect_due = time.monotonic() + _BUSY_SECONDS
            if message.get("final"):
                self._is_refused = True
                self._say(f"the agent does not record it: {message.get('reason')}")

    def _confirm(self, step: int, event: int, batch: Batch | None, outcomes: list[Outcome]) -> None:
        self._in_flight = None
        if self._has_spooled:  # the agent has taken up the file
            self._has_spooled = False
            self._outbox.mark(spooled=False)
        if not self._is_base_known:
            self._is_base_known, self._outbox.base = True, step
        self._orders.sent(outcomes)
        self._outbox.confirm(step, event, rewound=batch is not None and batch[0] == "rewind")
        if self._outbox.dropped:
            text = f"{self._outbox.dropped} steps are missing: more than {MAX_ROWS} waited for an agent"
            self._outbox.dropped = 0
            self._outbox.add({"severity": "warning", "text": text, "step": None}, self._encoder)
        self._is_over = self._is_end_sent and not len(self._outbox)

    # Spool.

    def _write_spool(self, now: float) -> None:
        self._spool_due = now + _RETRY_SECONDS
        batches = [*self._outbox.unspooled()] if self._is_base_known else []
        if not batches:
            return
        outcomes = self._orders.due(batches[-1][1])
        lines = [*(self._text(batch, []) for batch in batches), self._text(None, outcomes)]
        try:
            self._spool.write(self._hello(None), lines if outcomes else lines[:-1])
        except OSError as error:
            self._spool_due = now + ABSENT_SECONDS
            if not self._has_complained:
                self._has_complained = True
                self._say(f"no agent answers, and steps wait in memory: {self._spool.path}: {error.strerror or error}")
        else:
            self._has_complained, self._has_spooled = False, True
            self._outbox.mark(spooled=True)
            self._orders.sent(outcomes)

    def _spool_rest(self) -> None:
        """Keep what the agent did not confirm, and the end."""
        assert self._end is not None
        self._disconnect()
        lines = [self._text(batch, []) for batch in self._outbox.unspooled()]
        try:
            self._spool.write(self._hello(None), [*lines, self._text(None, self._orders.due(inf)), self._end])
        except OSError as error:
            self.lost = f"no agent answers, and {self._spool.path}: {error.strerror or error}"
        rows = len(self.items) + (self._outbox.unspooled_rows if self.lost else 0)
        if rows:
            self.lost = f"{rows} steps are lost: {self.lost or 'their values came too late'}"
        self._is_over = True

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            with contextlib.suppress(Exception):
                sys.stderr.write(f"trainctl: {self._attach['run']}: {text}\n")
