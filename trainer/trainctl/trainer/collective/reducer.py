"""The processes that sum for a trainer.

    python -m trainctl.trainer.collective.reducer --channel FD [--forks]

A **reducer** sums a shared buffer over all ranks, beside its trainer. It holds nothing that would be missed. Whatever
goes wrong ends it, and it ends with its trainer: a thread of its own reads the channel and leaves at its end, in the
middle of a sum too, since a sum that a dead rank still adds to would look right to the others. Where the engine lets no
thread run (see engines.py), the system ends it: at the trainer's death on Linux, after the deadline elsewhere.

A **fork server** (`--forks`, or forked itself from a trainer that begins, see standby.py) makes reducers on Linux: it
imports an engine once, and forks when a group is formed. MLX for CUDA is imported by each reducer instead. Importing an
engine takes seconds of CPU, which a rank on a busy machine would lose from its training after every group; a fork takes
milliseconds and shares the memory. The server stays single-threaded, for a fork takes only one thread along. A child is
reaped only when its trainer lets go of it, so its process id means no other until then.
"""

import argparse
import contextlib
import ctypes
import gc
import os
import signal
import socket
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
    Born,
    Channel,
    Done,
    Failed,
    Fork,
    Gone,
    Join,
    Order,
    Prepare,
    Reduce,
    Release,
    close_all,
)
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
        """Return the place of the rank that an error of the engine is about, where it can be told."""
        order, ports = self._joining, self._collective.ports if self._collective is not None else {}
        return engines.lost_peer(text, order.index, order.endpoints, ports) if order is not None else None

    def _reduce(self, order: Reduce) -> None:
        if self._buffer is None or self._collective is None:
            raise RuntimeError("received a sum request before joining")
        words = self._buffer.floats if order.words == "float32" else self._buffer.integers
        stop = order.start + order.count
        for start in range(order.start, stop, self._chunk_words):
            self._collective.all_reduce(words[start : min(stop, start + self._chunk_words)])


def serve(
    channel: Channel, ready: Mapping[Engine, engines.Collective] | None = None, whose: str | None = None
) -> NoReturn:
    """Be a reducer, with the engines that are `ready`, for the rest of this process. `whose`: see `set_title`."""
    set_title("spare reducer", whose)
    _reset_signals()
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


def _reset_signals() -> None:
    """Have signals end this process at once, even where no Python code runs; the trainer that started it blocks them.
    On Linux it also ends with the process that made it."""
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


class ForkServer:
    """Serves one trainer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._engines: dict[Engine, engines.Collective] = {}
        self._children: dict[int, int] = {}  # process ids by number

    def carry_out(self, order: Order, descriptors: list[int]) -> None:
        match order:
            case Prepare():
                self._prepare(order.engine)
            case Fork():
                self._fork(order.number, descriptors)
            case Release():
                self._channel.send(Gone(order.number, self._reap(order.number)))
            case Join() | Reduce():
                close_all(descriptors)  # a reducer's orders, which this isn't

    def _prepare(self, engine: Engine) -> None:
        if engine not in self._engines and engines.usable_after_fork(engine):  # else each reducer imports it itself
            gc.disable()  # what is imported stays
            with contextlib.suppress(Exception):  # a reducer that tries it again says what is wrong
                self._engines[engine] = engines.load(engine)
            gc.freeze()  # so that collections in a child don't copy what it shares
            gc.enable()

    def _fork(self, number: int, descriptors: list[int]) -> None:
        sys.stderr.flush()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_reducer(descriptors[0], server)
        close_all(descriptors)
        self._children[number] = pid
        self._channel.send(Born(number, pid))

    def _be_reducer(self, descriptor: int, server: int) -> NoReturn:
        try:
            self._channel.close()
            _reset_signals()
            if os.getppid() != server:  # it died before this process could ask to end with it
                os._exit(1)
            serve(Channel(socket.socket(fileno=descriptor)), self._engines)
        finally:
            os._exit(1)

    def _reap(self, number: int) -> int:
        pid = self._children.pop(number)
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def close(self) -> None:
        for number in [*self._children]:
            self._reap(number)


def serve_forks(channel: Channel, trainer: int | None = None, whose: str | None = None) -> NoReturn:
    """Be a fork server for the rest of this process, which the process `trainer` has forked, if any. `whose`: see
    `set_title`."""
    set_title("fork server", whose)
    _reset_signals()
    if trainer not in (None, os.getppid()):  # it died before this process could ask to end with it
        os._exit(1)
    server = ForkServer(channel)
    with contextlib.suppress(EOFError, OSError):
        while True:
            server.carry_out(*channel.next_order())
    server.close()
    os._exit(0)


def main() -> NoReturn:
    """Serve one trainer until it ends, or until something fails."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.collective.reducer", description="Sum gradients.")
    parser.add_argument("--channel", type=int, required=True, metavar="FD", help="descriptor of a connected socket")
    parser.add_argument("--whose", metavar="TEXT", help="text for the process title")
    parser.add_argument("--forks", action="store_true", help="be a fork server, which makes reducers")
    arguments = parser.parse_args()
    channel = Channel(socket.socket(fileno=arguments.channel))
    if arguments.forks:
        serve_forks(channel, whose=arguments.whose)
    serve(channel, whose=arguments.whose)


if __name__ == "__main__":
    main()
