"""`python -m trainctl.trainer.collective.reducer`: sums a shared buffer over all ranks, beside its trainer.

It holds nothing that would be missed. Whatever goes wrong ends it, and it ends with its trainer: a thread of its own
reads the channel and leaves at its end, in the middle of a sum too, since a sum that a dead rank still adds to would
look right to the others. Where the engine lets no thread run (see engines.py), the system ends it: at the trainer's
death on Linux, after the deadline elsewhere.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import NoReturn, assert_never

from trainctl.protocol.machine.process_title import set_title
from trainctl.protocol.messages import Engine
from trainctl.trainer.collective import engines
from trainctl.trainer.collective.channel import (
    Answer,
    Channel,
    Done,
    Failed,
    Fork,
    Join,
    Order,
    Prepare,
    Reduce,
    Release,
    started_with,
)
from trainctl.trainer.collective.engine_errors import lost_peer
from trainctl.trainer.collective.shared_buffer import SharedBuffer
from trainctl.trainer.common.errors import first_line

_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 1.0


class Reducer:
    """The state of the process: the engines it has imported and, once joined, the memory that it sums."""

    def __init__(self, ready: Mapping[Engine, engines.Collective] | None = None) -> None:
        """`ready`: engines that are imported already."""
        self._engines: dict[Engine, engines.Collective] = {**(ready or {})}
        self._collective: engines.Collective | None = None
        self._buffer: SharedBuffer | None = None
        self._chunk_words = 1
        self._joining: Join | None = None

    def carry_out(self, order: Order, descriptors: list[int]) -> None:
        """Raises whatever the engine does, and RuntimeError for an order that isn't a reducer's."""
        match order:
            case Prepare():
                self._prepare(order.engine)
            case Join():
                self._join(order, descriptors)
            case Reduce():
                self._reduce(order)
            case Fork() | Release():
                raise RuntimeError("a reducer cannot fork")
            case _:
                assert_never(order)

    def _prepare(self, engine: Engine) -> engines.Collective:
        if engine not in self._engines:
            self._engines[engine] = engines.load(engine)
        return self._engines[engine]

    def _join(self, order: Join, descriptors: list[int]) -> None:
        set_title("reducer", more=order.generation)
        self._joining, collective = order, self._prepare(order.engine)
        self._buffer, self._chunk_words = SharedBuffer(descriptors[0], order.size_bytes), order.chunk_words
        listener = descriptors[1] if len(descriptors) > 1 else None
        signal.setitimer(signal.ITIMER_REAL, order.deadline_seconds + _GRACE_SECONDS)
        collective.join(order.index, order.endpoints, order.interface, order.deadline_seconds, listener)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._collective = collective

    def lost_peer(self, text: str) -> int | None:
        """Place of the rank that an error of the engine is about, where it can be told."""
        order, ports = self._joining, self._collective.ports if self._collective is not None else {}
        return lost_peer(text, order.index, order.endpoints, ports) if order is not None else None

    def _reduce(self, order: Reduce) -> None:
        if self._buffer is None or self._collective is None:
            raise RuntimeError("received a sum request before joining")
        words = self._buffer.floats if order.words == "float32" else self._buffer.integers
        stop = order.start + order.count
        for start in range(order.start, stop, self._chunk_words):
            self._collective.all_reduce(words[start : min(stop, start + self._chunk_words)])


def main() -> int:
    """Serve one trainer until it ends, or until something fails."""
    serve(**started_with("reducer", "Sum gradients for one trainer."))


def serve(
    channel: Channel, ready: Mapping[Engine, engines.Collective] | None = None, whose: str | None = None
) -> NoReturn:
    """Be a reducer, with the engines that are `ready`, for the rest of this process. `whose`: see `set_title`."""
    set_title("spare reducer", whose)
    reset_signals()
    orders: SimpleQueue[tuple[Order, list[int]]] = SimpleQueue()
    threading.Thread(target=_read, args=(channel, orders), name="channel", daemon=True).start()
    reducer = Reducer(ready)
    while True:
        order, descriptors = orders.get()
        try:
            reducer.carry_out(order, descriptors)
        except (Exception, SystemExit) as error:  # noqa: BLE001  any error is reported to the trainer
            reason = f"{type(error).__name__}: {first_line(error)}"
            _leave(channel, reason, reducer.lost_peer(reason))
        if not isinstance(order, Prepare):
            _answer(channel, Done())


def reset_signals() -> None:
    """A trainer blocks the signals that end it, and so would what it starts. They end a reducer at once, even where
    no Python code runs; and on Linux it ends with the process that made it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGALRM})
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(channel: Channel, orders: "SimpleQueue[tuple[Order, list[int]]]") -> None:
    try:
        while True:
            orders.put(channel.next_order())
    finally:
        os._exit(0)


def _leave(channel: Channel, reason: str, peer: int | None) -> None:
    """End without the engine's own clean-up, which may wait for peers."""
    _answer(channel, Failed(reason[:300], peer))
    sys.stderr.flush()
    os._exit(1)


def _answer(channel: Channel, answer: Answer) -> None:
    try:
        channel.send(answer)
    except OSError:  # the trainer is gone
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
