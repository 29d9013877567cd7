"""Groups of ranks, which sum between accumulating and updating: a group of one, and one that sums by reducers.

A reducer's group works in a buffer shared with that process. The accumulators are copied there, and their total stays
there until `deliver`, so a sum that failed or came too late leaves them as they were. What one rank gives to others
(`share`) goes the same way as integers, to which all others add zeros: the bits arrive as they were.
"""

import functools
import hashlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainctl.protocol.messages import Form
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.collective.channel import Join, Reduce
from trainctl.trainer.collective.engines import plain_error
from trainctl.trainer.collective.reducer_process import ReducerProcess
from trainctl.trainer.collective.shared_buffer import (
    WORD_BYTES,
    Layout,
    SharedBuffer,
    read_tail,
    tail_words,
    write_tail,
)
from trainctl.trainer.common.errors import AbandonedError, EngineError, GroupError
from trainctl.trainer.objectives.objective import reported_loss_sum

log = logging.getLogger(__name__)

_DIGEST_WORDS = 8  # SHA-256
_MAX_TAIL_VALUES = 128
"""Room in the buffer for the numbers of each rank's tail."""
_MIN_PART_WORDS = 1 << 18
"""Least words of a part when several links share a sum: MLX splits no shorter part further, and each part costs an
order and an answer."""


@dataclass(frozen=True)
class Tail:
    """The numbers that are summed over the ranks together with the gradients, and lie after them in the buffer: every
    rank decides from the same sums."""

    losses: Mapping[str, float]  # nats, by the weight that each is divided by
    weights: Mapping[str, float]
    metrics: Mapping[str, float]  # sums
    tokens: int
    bad_losses: int  # ranks whose loss sums are not all finite

    @functools.cached_property
    def weight(self) -> float:
        """The first weight, which divides reported losses and rates."""
        return next(iter(self.weights.values()))

    @property
    def loss_sum(self) -> float:
        """The loss times `weight`: each term is divided by its own weight."""
        return reported_loss_sum(self.losses, self.weights)

    def numbers(self) -> list[float]:
        """Return all numbers, in an order that is the same on all ranks."""
        named = (*self.losses.values(), *self.weights.values(), *self.metrics.values())
        return [*named, float(self.tokens), float(self.bad_losses)]

    def summed(self, ranks: Sequence[Sequence[float]]) -> "Tail":
        """Add up the `numbers` of all ranks, under the names of this one."""
        totals = iter([sum(values) for values in zip(*ranks, strict=True)])
        losses, weights, metrics = (
            {name: next(totals) for name in named} for named in (self.losses, self.weights, self.metrics)
        )
        return Tail(losses, weights, metrics, int(next(totals)), int(next(totals)))


@dataclass(frozen=True)
class Reduced:
    """The size of one rank's part in a sum, and how long that took, with the wait for slower ranks in it."""

    bytes: int
    seconds: float


class Solo:
    """A group of one rank: its sums are the totals. ReducerGroup says what each method does."""

    is_alone = True
    reduced: Reduced | None = None

    def all_reduce(self, backend: Backend, tail: Tail) -> Tail:
        return tail

    def deliver(self, backend: Backend) -> None:
        return

    def share(self, source: int | None, fill: Callable[[Mapping[str, Array]], object]) -> Mapping[str, Array] | None:
        return None

    def share_numbers(self, source: int | None, numbers: Sequence[float]) -> list[float]:
        return [*numbers]

    def is_source(self, source: int | None) -> bool:
        return True

    def close(self) -> None:
        return


class ReducerGroup:
    """The live ranks of one generation, by way of reducer processes, one for each link to a neighbour, which belong to
    it from here on. All but `abort` belongs to the main thread."""

    is_alone = False

    def __init__(
        self, form: Form, rank: int, layout: Layout, reducers: Sequence[ReducerProcess], nodes: Sequence[str] = ()
    ) -> None:
        """`nodes`: names by rank, for errors. Raises GroupError if there is no memory for the buffer."""
        self._nodes = nodes
        self._form, self._rank, self._layout, self._reducers = form, rank, layout, reducers
        self._index = form.ranks.index(rank)
        self._ports: list[socket.socket] = []
        self.reduced: Reduced | None = None  # by the last `all_reduce`
        self._is_pinned = False
        words = max(layout.elements + tail_words(len(form.ranks), _MAX_TAIL_VALUES), len(form.ranks) * _DIGEST_WORDS)
        try:
            self._buffer = SharedBuffer.create(words)
        except OSError as error:
            size = f"{words * WORD_BYTES:,} bytes"
            raise GroupError(f"cannot allocate {size} of shared memory: {error.strerror}") from None
        self._arrays = layout.views(self._buffer.floats)
        self._deadline: float | None = time.monotonic() + form.deadline_seconds  # None: formed

    # ------------------------------------------------------------ forming

    def begin(self, interface: str, chunk_words: int, endpoints: list[socket.socket]) -> None:
        """Have each reducer join the others of its link; returns at once. Any thread. The sockets behind this rank's
        endpoints are the group's from here on. Raises as `all_reduce`."""
        form, self._ports = self._form, endpoints
        assert form.engine != "none"
        joins = [
            Join(
                form.engine,
                self._index,
                tuple((endpoint,) for endpoint in link),
                interface,
                form.deadline_seconds,
                self._buffer.size_bytes,
                max(1, chunk_words // len(self._reducers)),
                str(form.generation),
            )
            for link in zip(*form.endpoints, strict=False)
        ]
        is_host = form.engine == "gloo" and self._index == 0
        listener = [endpoints[0].fileno()] if is_host else []
        try:
            for reducer, order in zip(self._reducers, joins, strict=True):
                reducer.order(order, [self._buffer.descriptor, *listener])
        except (GroupError, AbandonedError):
            self.close()
            raise
        if form.engine == "gloo":  # the reducer has its own; this one would take connections that no one serves
            self._close_ports()

    def complete(self) -> None:
        """Wait until all ranks are connected, and see that all lay their parameters out alike. Raises as
        `all_reduce`, naming a rank that doesn't."""
        self._wait(self._reducers)
        for rank, digest in zip(self._form.ranks, self._digests(), strict=True):
            if digest != _digest(self._form.layout_digest or self._layout.digest):
                raise GroupError(f"rank {rank}'s parameter layout differs from the group's")

    def formed(self) -> None:
        """Let a wait for other ranks end by them or by `abort` alone, from here on."""
        self._deadline = None
        self._close_ports()

    def _digests(self) -> list[bytes]:
        count = len(self._form.ranks) * _DIGEST_WORDS
        slots = self._buffer.integers[:count]
        slots[:] = 0
        slots.reshape(-1, _DIGEST_WORDS)[self._index] = np.frombuffer(_digest(self._layout.digest), np.int32)
        self._reduce(Reduce("int32", 0, count))
        return [slot.tobytes() for slot in slots.reshape(-1, _DIGEST_WORDS)]

    # ------------------------------------------------------------ sums

    def all_reduce(self, backend: Backend, tail: Tail) -> Tail:
        """Sum the backend's accumulators and the tails over all ranks. Return the sum of the tails, and leave the
        accumulators alone. Raises GroupError, or AbandonedError if the group was aborted."""
        if not self._is_pinned:
            self._is_pinned = True
            backend.device.pin(self._buffer.floats)
        backend.copy_out("accumulators", self._arrays)
        numbers = tail.numbers()
        slots = self._buffer.floats[self._layout.elements :][: tail_words(len(self._form.ranks), len(numbers))]
        write_tail(slots, self._index, numbers)
        words, begun = self._layout.elements + len(slots), time.perf_counter()
        self._reduce(Reduce("float32", 0, words))
        self.reduced = Reduced(words * WORD_BYTES, time.perf_counter() - begun)
        return tail.summed(read_tail(slots, len(numbers)))

    def deliver(self, backend: Backend) -> None:
        """Replace the backend's accumulators by the sum that `all_reduce` made."""
        backend.copy_in("accumulators", self._arrays)

    def share(self, source: int | None, fill: Callable[[Mapping[str, Array]], object]) -> Mapping[str, Array] | None:
        """Return the arrays that the rank `source` (None: the lowest) fills in, one for each parameter; read-only, and
        until the next call. None if this rank is the only one. Raises as `all_reduce`."""
        if self.is_source(source):
            fill(self._arrays)
        else:
            self._buffer.integers[: self._layout.elements] = 0
        self._reduce(Reduce("int32", 0, self._layout.elements))
        return self._arrays

    def share_numbers(self, source: int | None, numbers: Sequence[float]) -> list[float]:
        """Return the rank `source`'s numbers, to the bit. Raises as `all_reduce`."""
        own = np.array(numbers, np.float64)
        words = self._buffer.integers[: 2 * len(own)]
        words[:] = own.view(np.int32) if self.is_source(source) else 0
        self._reduce(Reduce("int32", 0, len(words)))
        return [float(number) for number in words.copy().view(np.float64)]

    def is_source(self, source: int | None) -> bool:
        """Return whether `source` is this rank."""
        return self._rank == (self._form.ranks[0] if source is None else source)

    def abort(self) -> None:
        """Make a thread that waits for the others give up, at once; from any thread."""
        for reducer in self._reducers:
            reducer.kill()

    def close(self) -> None:
        """`abort`, and let go of everything."""
        for reducer in self._reducers:
            reducer.close()
        self._buffer.close()
        self._close_ports()

    def _close_ports(self) -> None:
        for port in self._ports:
            port.close()

    def _reduce(self, order: Reduce) -> None:
        """Have every link sum a part; all ranks part it alike."""
        parts = max(1, min(len(self._reducers), order.count // _MIN_PART_WORDS))
        words, busy = -(-order.count // parts), self._reducers[:parts]
        try:
            for part, reducer in enumerate(busy):
                done = part * words
                reducer.order(Reduce(order.words, order.start + done, min(words, order.count - done)))
        except GroupError:
            self.abort()
            raise
        self._wait(busy)

    def _wait(self, reducers: Sequence[ReducerProcess]) -> None:
        """End all reducers after a failure, so that the others don't wait for this rank."""
        try:
            for reducer in reducers:
                reducer.wait(None if self._deadline is None else max(0.001, self._deadline - time.monotonic()))
        except EngineError as error:
            self.abort()
            raise self._explained(error) from None
        except GroupError:
            self.abort()
            raise
        except TimeoutError:
            self.abort()
            seconds = self._form.deadline_seconds
            raise GroupError(
                f"ranks {list(self._form.ranks)} did not connect to each other within {seconds:g} s"
            ) from None

    def _explained(self, error: EngineError) -> GroupError:
        """Return an engine's error for a person; its own words go to the log."""
        log.warning("%s, %s: %s", self._form.generation, self._form.engine, error)
        peer = None if error.peer is None else self._name(self._form.ranks[error.peer])
        what = "the sum" if self._deadline is None else "joining"
        return GroupError(plain_error(str(error), peer, self._name(self._rank), what))

    def _name(self, rank: int) -> str:
        return self._nodes[rank] if rank < len(self._nodes) else f"rank {rank}"


Group = Solo | ReducerGroup


def _digest(text: str) -> bytes:
    """Return any layout digest as 32 bytes."""
    return hashlib.sha256(text.encode()).digest()
