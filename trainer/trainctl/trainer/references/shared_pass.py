"""A rank's part in computing a reference's log-probabilities together with the run's other ranks.

The lead deals units, which are one sample or several consecutive ones. The rank computes what it is dealt, and fetches
all values while it does, so that in the end every rank has the same bits.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import ReferenceAsk, ReferenceSlice
from trainctl.trainer.common.reference_cache import DTYPE, ReferenceKey, Values
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.data.token_cache import Report

MAX_UNITS = 8192
"""Units in all: their sizes are sent in one message."""
MAX_VALUES = 200_000
"""Values of a unit, which are sent in one message."""
PART_BYTES = 60 * 1024
MAX_UNLIKE = 2
"""Times that all fetched values may differ from the lead's digest before they count as damaged."""
AGAIN_SECONDS = 1.0
"""Time after which an unanswered ask is repeated."""
IDLE_SECONDS = 0.1
"""Time between asks while there is nothing to compute or to fetch."""


Look = Callable[[int], object]
"""Called after each forward pass with the samples done so far; what it raises ends the computation."""


class Supply(Protocol):
    """The source of a rank's values."""

    def values(self, first: int, samples: int, look: Look) -> Values:
        """Return the values of so many usable samples; `look` is called now and then with the samples done."""
        ...


class AgentLine(Protocol):
    """The way to the lead, by this node's agent."""

    def send(self, ask: ReferenceAsk) -> None: ...
    def receive(self, seconds: float) -> ReferenceSlice | None:
        """Return the next answer, if one comes within this time."""
        ...


class SharedPass:
    """A pass over the samples of one data set."""

    def __init__(
        self,
        run: str,
        rank: int,
        key: ReferenceKey,
        supply: Supply,
        line: AgentLine,
        report: Report,
        *,
        counts: Indices,
        targets: Indices,
    ) -> None:
        """`counts` and `targets`: of each usable sample, its values and its tokens to process; `check_sizes` takes the
        counts."""
        self._asks: dict[str, Any] = {"run": run, "rank": rank, "reference": key.name}
        self._key, self._supply, self._line, self._report = key, supply, line, report
        self._samples, self._each = len(counts), _samples_each(len(counts))
        self._counts, self._tokens = (_by_unit(sizes, self._each) for sizes in (counts, targets))
        self._own = ""  # digest of the values from an earlier run, as long as the others' may be the same
        self._received = self._number = self._done = self._unlike = 0
        self._whole = hashlib.sha256()  # of what was received

    def run(self, path: Path, own_digest: str = "") -> str:
        """Write all values to a file; return their digest. With `own_digest`, the rank has values from an earlier run:
        nothing is written if the others' are the same. Raises TrainctlError if the lead can't keep or give them, and
        what computing or `report` raises."""
        self._own, self._received = own_digest, self._key.counted if own_digest else 0
        with path.open("wb") as file:
            ask = self._ask()
            while True:
                answer = self._answer_to(ask)
                self._take(answer, file)
                if answer.digest and self._is_whole(answer, file):
                    return answer.digest
                ask = self._next(answer, file)

    def _is_whole(self, answer: ReferenceSlice, file: IO[bytes]) -> bool:
        """Return whether the rank has the values that all ranks must have. If they differ, it fetches all again."""
        if self._own or self._received == self._key.counted:
            if answer.digest == (self._own or self._whole.hexdigest()):
                return True
            self._unlike += not self._own
            self._own = ""
            file.seek(0)
            file.truncate()
            self._received, self._whole = 0, hashlib.sha256()
        elif not answer.values:
            self._unlike = MAX_UNLIKE
        if self._unlike >= MAX_UNLIKE:
            name = self._key.name
            raise TrainctlError(
                f"the lead's values of the reference are damaged: delete {name} and .{name}.* in its caches"
            )
        return False

    def _next(self, answer: ReferenceSlice, file: IO[bytes]) -> ReferenceAsk:
        if not answer.known:
            return self._ask(counts=_packed(self._counts), tokens=_packed(self._tokens))
        if answer.slice is None:
            if not answer.values:
                time.sleep(IDLE_SECONDS)
            return self._ask()
        first = answer.first * self._each
        samples = min(answer.units * self._each, self._samples - first)
        raw = self._supply.values(first, samples, self._fetching(answer, file)).astype(DTYPE).tobytes()
        parts = tuple(raw[start : start + PART_BYTES] for start in range(0, len(raw), PART_BYTES))
        return self._ask(slice=answer.slice, first=answer.first, units=answer.units, values=parts)

    def _fetching(self, answer: ReferenceSlice, file: IO[bytes]) -> Look:
        """Return what fetches, between two forward passes, the values that others have computed."""
        asked: ReferenceAsk | None = None

        def look(done: int) -> None:
            nonlocal asked
            self._show(answer.answered * self._each + done)
            part = self._line.receive(0.0)
            while part is not None and (asked is None or part.ask != asked.ask):
                part = self._line.receive(0.0)
            if part is not None:
                self._take(part, file)
            if not self._own and (part is not None or asked is None):
                asked = self._ask(wants=False)
                self._line.send(asked)

        return look

    def _answer_to(self, ask: ReferenceAsk) -> ReferenceSlice:
        """Repeat an ask until it is answered: a message may be lost, or the lead may change."""
        while True:
            self._line.send(ask)
            due = time.monotonic() + AGAIN_SECONDS
            while (left := due - time.monotonic()) > 0:
                self._show(self._done)
                answer = self._line.receive(min(left, AGAIN_SECONDS / 4))
                if answer is None or answer.ask != ask.ask:
                    continue
                if answer.problem:
                    raise TrainctlError(answer.problem)
                return answer

    def _take(self, answer: ReferenceSlice, file: IO[bytes]) -> None:
        """Write the values that follow those already here."""
        if answer.values and answer.offset == self._received:
            file.write(answer.values)
            self._whole.update(answer.values)
            self._received += len(answer.values) // DTYPE.itemsize
        if answer.known:
            self._show(answer.answered * self._each)

    def _show(self, done: int) -> None:
        self._done = min(done, self._samples)
        self._report(self._done, self._samples)

    def _ask(self, *, wants: bool = True, **fields: Any) -> ReferenceAsk:
        self._number += 1
        fields |= {"ask": self._number, "offset": self._received, "digest": self._own, "wants": wants}
        return ReferenceAsk(**self._asks, **fields)


class StoredValues:
    """Values from an earlier run, for ranks that have none."""

    def __init__(self, values: Values, counts: Indices) -> None:
        """`counts`: of each usable sample."""
        self._values, self._ends = values, np.concatenate([[0], np.cumsum(counts)])

    def values(self, first: int, samples: int, look: Look) -> Values:
        look(samples)
        return self._values[self._ends[first] : self._ends[first + samples]]


def check_sizes(counts: Indices, where: str, *, has_adapter: bool) -> None:
    """Check that ranks can compute the values of samples of such counts together. Raises InvalidInputError if a unit
    has more values than a message can hold."""
    each = _samples_each(len(counts))
    most = int(_by_unit(counts, each).max(initial=0))
    if most <= MAX_VALUES:
        return
    unit = f"{each:,} consecutive pairs have" if each > 1 else "a pair has"
    problem = f"{unit} {most:,} answer tokens of {int(counts.sum()):,} in all; with several nodes, {MAX_VALUES:,} may"
    remedy = 'set objective.reference = "adapter-off"' if has_adapter else "use fewer pairs, or train on one node"
    if each == 1 and not has_adapter:
        remedy = "set a lower data.sequence_length, or train on one node"
    raise InvalidInputError(f"{where}: data.path", f"{problem}: {remedy}")


def _samples_each(samples: int) -> int:
    """Return the samples of a unit."""
    return -(-samples // MAX_UNITS)


def _by_unit(sizes: Indices, each: int) -> Indices:
    """Return the sums over so many consecutive samples."""
    sums: Indices = np.add.reduceat(sizes, np.arange(0, len(sizes), each)) if len(sizes) else sizes
    return sums


def _packed(sizes: Indices) -> bytes:
    return sizes.astype("<u4").tobytes()
