"""Messages on their way to the control thread, from the main thread or the one that writes checkpoints, encoded by a
thread of their own.

The hand-over must cost the training loop microseconds. A write to a pipe would release the interpreter's lock and
let the woken thread encode while the loop waits; SimpleQueue's put only posts a semaphore, so the encoding happens
when the loop next computes outside the interpreter.
"""

import socket
import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue

from trainctl.protocol.messages import FromTrainer
from trainctl.protocol.wire import codec


class Outbox:
    """`put` on any thread; `descriptor` becomes readable when `take` has something to give."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[FromTrainer | None] = SimpleQueue()
        self._frames: deque[bytes] = deque()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    @property
    def descriptor(self) -> int:
        return self._woken.fileno()

    def put(self, message: FromTrainer) -> None:
        """Pass a message on; returns at once."""
        self._messages.put(message)

    def take(self) -> list[bytes]:
        """The frames encoded so far, oldest first."""
        with suppress(BlockingIOError):  # no one has called `wake` since the last time
            self._woken.recv(4096)
        return [self._frames.popleft() for _ in range(len(self._frames))]

    def wake(self) -> None:
        """Make `descriptor` readable."""
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            return  # as many wake-ups are waiting as the system holds: one is enough

    def finish(self) -> None:
        """Encode what has been put, and end the thread; `take` gives the rest."""
        self._messages.put(None)
        self._thread.join()

    def close(self) -> None:
        self._waker.close()
        self._woken.close()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            self._frames.append(codec.encode(message))
            self.wake()
