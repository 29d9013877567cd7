"""The thread that talks with the agent: it answers a fence and sends heartbeats while the main thread computes.

It owns the socket. Orders that need the model go to the main thread's queue; `Offer`, `Form` and `Fence` take effect
here at once, in the progress and in the reducer's process; what is queued of them is the group that was joined or is
being joined, and that a fence was answered. Messages that the agent cannot take are kept until it is back, for a fence
repeats the newest reports anyway.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from trainctl.protocol import messages
from trainctl.protocol.config.addresses import split
from trainctl.protocol.errors import InvalidInputError, ProtocolError, TrainctlError
from trainctl.protocol.messages import (
    Alive,
    Fence,
    Fenced,
    Form,
    FromTrainer,
    Leave,
    Offer,
    Preflight,
    Ready,
    ReferenceSlice,
    Sealed,
    StepPlan,
    ToTrainer,
    TrainerFailed,
    WorkSlice,
)
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.protocol.wire import codec
from trainctl.protocol.wire.sockets import check_frames, new_socket
from trainctl.trainer.common.errors import OutdatedError, first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.control.orders import Broken, GroupOrders, Order, Orphaned, Signalled
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity

_ALIVE_SECONDS = 1.0
_FENCE_RETRY_MILLISECONDS = 20
_UNSENT_RETRY_MILLISECONDS = 200
_FLUSH_SECONDS = 3.0
_LONG_PHASES = ("starting", "checkpoint", "probe", "sample", "profile")


class Control:
    """Use as a context manager around the trainer's life: leaving it with an exception tells the agent why."""

    def __init__(self, who: Identity, endpoint: str, progress: Progress, status: StatusWriter) -> None:
        """Raises InvalidInputError for an endpoint that cannot be connected to."""
        split(endpoint)
        self._who, self._progress, self._status = who, progress, status
        self.orders: SimpleQueue[Order] = SimpleQueue()
        self.orphan_seconds = float("inf")  # until the run file has been read
        self.ready: Ready | None = None
        self.preflight: Preflight | None = None  # which heartbeats tell until the first group is formed
        self.detail = ""  # how far the phase has come
        self._sealed: Sealed | None = None  # of a growing file
        self.repeated: list[Callable[[], messages.FromTrainer | None]] = [lambda: self._sealed]
        """Messages that heartbeats repeat: about a growing file, the newest checkpoint and the newest profile."""
        self.on_recorded: Callable[[StepPlan], None] = lambda _: None
        """Receives a checkpoint's plan that comes again, since the lead's disk has its record up to that step."""
        self._outbox = Outbox()
        self._reference_slices: SimpleQueue[ReferenceSlice] = SimpleQueue()
        self.groups = GroupOrders(who, progress, self.orders, self._say)
        self._unsent: deque[bytes] = deque()  # few while the agent is away: no plans come then
        self._pending_fence: Fence | None = None
        self._away_since: float | None = time.monotonic()
        self._next_alive = 0.0
        self._closing: float | None = None  # when to give up flushing
        self._context = zmq.Context()
        self._socket = new_socket(self._context, zmq.DEALER)
        # A try costs nothing here, and ever longer pauses would make an agent that is back take the trainer for hung.
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
        # Watched before it connects, or the handshake could be over before anyone looks.
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise InvalidInputError(endpoint, f"cannot connect: {error}") from None
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def __enter__(self) -> "Control":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, SystemExit):
            prefix = "" if isinstance(error, TrainctlError) else f"{type(error).__name__}: "
            reason = prefix + first_line(error)
            self.send(TrainerFailed(run=self._who.run, rank=self._who.rank, reason=reason))
        self._outbox.finish()
        self._closing = time.monotonic() + _FLUSH_SECONDS
        self._outbox.wake()
        self._thread.join()
        self._outbox.close()

    def send(self, message: messages.FromTrainer) -> None:
        """Pass a message on, from any thread; never a wait."""
        self._outbox.put(message)

    def receive(self, seconds: float) -> ReferenceSlice | None:
        """Return the next answer to a ReferenceAsk, if one comes within this time."""
        try:
            return self._reference_slices.get(timeout=seconds)
        except Empty:
            return None

    def seal(self, sealed: Sealed) -> None:
        """Tell the agent how far a growing file is sealed, now and with every heartbeat; from any thread."""
        self._sealed = sealed
        self.send(sealed)

    def fail(self, error: TrainctlError) -> None:
        """Make the main thread raise `error` before its next order; from any thread."""
        self.orders.put(Broken(error))

    @property
    def is_away(self) -> bool:
        """True while the agent can't be reached."""
        return self._away_since is not None

    def leave_if_asked(self) -> None:
        """End this process, its last words in its log, if the rank is to leave or the agent has been gone for too long:
        for waits before there is anything to save."""
        away_since, reason = self._away_since, self._progress.leaving
        if away_since is not None and (away := time.monotonic() - away_since) >= self.orphan_seconds:
            reason = reason or f"the agent has been gone for {away:.0f} s"
        if reason:
            log.info("leaving: %s", reason)
            raise SystemExit(0)

    def leave(self, order: Leave | Signalled) -> None:
        """Make the main thread leave; from any thread. By a signal, after a checkpoint if it trains alone."""
        self._progress.leaving = order.reason
        self.groups.abort()
        self.orders.put(order)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self.orders.put(Broken(TrainctlError("the control thread has ended")))  # wakes a main thread that waits
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=int(_FLUSH_SECONDS * 1000))
            self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._outbox.descriptor):
            poller.register(source, zmq.POLLIN)
        while not self._is_done():
            now = time.monotonic()
            if now >= self._next_alive and self._away_since is None:
                self._say(self._alive())
                for state in self.repeated:
                    if (message := state()) is not None:
                        self._say(message)
                self._next_alive = now + _ALIVE_SECONDS
            self._flush()
            events = dict(poller.poll(self._wait_milliseconds(now)))
            if self._monitor in events:
                self._note_connection()
            if self._socket in events:
                self._receive()
            self._answer_fence()
            self._look_for_orphanhood()

    def _wait_milliseconds(self, now: float) -> int:
        if self._pending_fence:
            return _FENCE_RETRY_MILLISECONDS
        longest = _UNSENT_RETRY_MILLISECONDS if self._unsent else int(_ALIVE_SECONDS * 1000)
        return min(longest, max(1, int(1000 * (self._next_alive - now)))) if self._away_since is None else longest

    def _is_done(self) -> bool:
        if self._closing is None:
            return False
        self._flush()
        return time.monotonic() >= self._closing or not self._unsent

    def _note_connection(self) -> None:
        event = recv_monitor_message(self._monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._away_since, self._next_alive = None, 0.0
        elif self._away_since is None:
            self._away_since = time.monotonic()

    def _receive(self) -> None:
        frames = self._socket.recv_multipart()
        try:
            order = codec.decode_order(check_frames(frames, 1)[0])
        except ProtocolError as error:
            log.warning("dropped a message from the agent: %s", error)
            return
        if order.run == self._who.run and not isinstance(order, WorkSlice):
            self._obey(order)

    def _obey(self, order: ToTrainer) -> None:
        match order:
            case Fence():
                self.groups.fence(order)  # at once; the answer may have to wait for an update
                self._pending_fence = order
            case Offer():
                self.groups.offer(order)
            case Form():
                if self._pending_fence and self._pending_fence.generation <= order.generation:
                    self._pending_fence = None  # answered late, it would leave the generation that is formed here
                self.groups.form(order)
            case Leave():
                self.leave(msgspec.structs.replace(order, reason=order.reason or "asked to leave"))
            case StepPlan(recorded=True):
                self.on_recorded(order)
            case StepPlan():
                self.orders.put(order)
            case ReferenceSlice():
                self._reference_slices.put(order)

    def _answer_fence(self) -> None:
        """Answer once the state is known and no update is in progress; until then heartbeats continue."""
        fence = self._pending_fence
        if fence is None or not self._progress.loaded:
            return
        try:
            answer = self._progress.try_fence(fence.generation, _FENCE_RETRY_MILLISECONDS / 1000)
        except OutdatedError as error:
            self._pending_fence = None
            log.warning("dropped a fence from the agent: %s", error)
            return
        if answer is None:
            return
        self._pending_fence = None
        self.orders.put(fence)
        self._say(Fenced(run=self._who.run, rank=self._who.rank, generation=fence.generation, **vars(answer)))
        self._flush()

    def _look_for_orphanhood(self) -> None:
        away = 0.0 if self._away_since is None else time.monotonic() - self._away_since
        if away >= self.orphan_seconds and self._progress.loaded:
            self.groups.abort()  # or the main thread may wait for ranks that are gone too
            self.orders.put(Orphaned(away))
            self.orphan_seconds = float("inf")

    def _alive(self) -> Alive:
        ready = self.ready
        if ready is not None:
            ready = msgspec.structs.replace(ready, last_step=self._progress.last_step, cursor=self._progress.cursor)
        return Alive(
            run=self._who.run,
            rank=self._who.rank,
            generation=self._progress.highest,
            step=self._status.step,
            phase=self._status.phase,
            progress=self._signs_of_life(),
            ready=ready,
            detail=self.detail,
            preflight=self.preflight if self._progress.highest is None else None,
        )

    def _signs_of_life(self) -> int:
        """Count what the status page was shown; in phases that show nothing for long, also the seconds that all threads
        but this one have worked."""
        worked = time.process_time() - time.thread_time() if self._status.phase in _LONG_PHASES else 0.0
        return self._status.shown + int(worked)

    def _flush(self) -> None:
        """Send what is waiting, in order, without waiting for an agent that is away."""
        self._unsent.extend(self._outbox.take())
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _say(self, message: messages.FromTrainer) -> None:
        self._unsent.append(codec.encode(message))


class Outbox:
    """Messages to the agent, from any thread; `descriptor` becomes readable when `take` has something to give.

    The hand-over must cost the training loop microseconds. A write to a pipe would release the interpreter's lock and
    let the woken thread encode while the loop waits. SimpleQueue's put only posts a semaphore, so a thread of its own
    encodes when the loop next computes outside the interpreter.
    """

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
        """Return the frames encoded so far, oldest first."""
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
