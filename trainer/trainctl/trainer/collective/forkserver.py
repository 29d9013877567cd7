"""The process that makes a trainer's reducers on Linux: it imports an engine once, and forks when a group is formed.
MLX for CUDA is imported by each reducer instead.

    python -m trainctl.trainer.collective.forkserver --channel FD

or forked itself from a trainer that begins (see fork_self.py).

Importing an engine takes seconds of CPU, which a rank on a busy machine would lose from its training after every
group; a fork takes milliseconds and shares the memory. It stays single-threaded, for a fork takes only one thread
along. A child is reaped only when its trainer lets go of it, so its process id means no other until then.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
from typing import NoReturn

from trainctl.protocol.machine.process_title import set_title
from trainctl.protocol.messages import Engine
from trainctl.trainer.collective import engines, reducer
from trainctl.trainer.collective.channel import (
    Born,
    Channel,
    Fork,
    Gone,
    Join,
    Order,
    Prepare,
    Reduce,
    Release,
    close_all,
    started_with,
)

ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment in which libraries that start threads on import start none."""


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
            reducer.reset_signals()
            if os.getppid() != server:  # it died before this process could ask to end with it
                os._exit(1)
            reducer.serve(Channel(socket.socket(fileno=descriptor)), self._engines)
        finally:
            os._exit(1)

    def _reap(self, number: int) -> int:
        pid = self._children.pop(number)
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def close(self) -> None:
        for number in [*self._children]:
            self._reap(number)


def main() -> NoReturn:
    """Serve until the trainer lets go, or ends."""
    serve(**started_with("forkserver", "Forks reducers."))


def serve(channel: Channel, trainer: int | None = None, whose: str | None = None) -> NoReturn:
    """Be a fork server for the rest of this process, which the process `trainer` has forked, if any. `whose`: see
    `set_title`."""
    set_title("fork server", whose)
    reducer.reset_signals()
    if trainer not in (None, os.getppid()):  # it died before this process could ask to end with it
        os._exit(1)
    server = ForkServer(channel)
    with contextlib.suppress(EOFError, OSError):
        while True:
            server.carry_out(*channel.next_order())
    server.close()
    os._exit(0)


if __name__ == "__main__":
    main()
