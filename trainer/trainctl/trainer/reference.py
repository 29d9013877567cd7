"""A run's reference log-probabilities before its first step: from the node's cache, or computed into it.

A run's held-out files have a cache of their own. With several ranks, the lead deals units, which are one sample or
several consecutive ones. A rank computes what it is dealt, and fetches all values while it does, so that in the end
every rank has the same bits.
"""

import functools
import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from trainctl.protocol.config.objectives import caches_reference
from trainctl.protocol.config.run_tables import NodeTable, RunFile, micro_of, micro_tokens_of
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.files.durable_files import sync, sync_all
from trainctl.protocol.messages import ReferenceAsk, ReferenceSlice
from trainctl.protocol.record.paths import VALUES_NAME, stored_digest
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.atomic_folder import part_of, remove_parts
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.common.logs import log
from trainctl.trainer.common.reference_cache import (
    DTYPE,
    ReferenceKey,
    Values,
    compute_of,
    read_values,
    spans,
    write_notes,
)
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.data.token_cache import Report, no_report
from trainctl.trainer.data.tokenizing import make_cache

AT_ONCE = 256
"""Samples computed between two writes; the longest of them come first."""
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
Supply = Callable[[int, int, Look], Values]
"""Returns the values of so many usable samples from the first one on, and calls `look` now and then."""


class AgentLine(Protocol):
    """The way to the lead, by this node's agent."""

    def send(self, ask: ReferenceAsk) -> None: ...
    def receive(self, seconds: float) -> ReferenceSlice | None:
        """Return the next answer, if one comes within this time."""
        ...


@dataclass(frozen=True)
class ReferenceSettings:
    """The reference of a run on a node, and where its values are kept."""

    folder: Path  # of the node's caches
    model: str  # digest of the base model's files
    compute: str  # as `compute_of` says
    batch_tokens: int  # in one forward pass

    @classmethod
    def of(cls, config: RunFile, node: str, folder: Path, model: str) -> "ReferenceSettings":
        """Return the settings of a node. A forward and backward pass of so many tokens fits into its memory."""
        table = config.nodes.get(node, NodeTable())
        tokens = micro_tokens_of(config, table)
        sequences = 2 * micro_of(config, table)
        return cls(folder, model, compute_of(config.model), tokens or sequences * config.data.sequence_length)


@dataclass(frozen=True)
class Company:
    """The parts with which a rank computes the values together with the run's other ranks."""

    run: str
    rank: int
    line: AgentLine


def wants_reference(config: RunFile) -> bool:
    """Return whether a run needs the values before its first step."""
    return caches_reference(config.objective, has_adapter=config.adapter.kind != "full")


class ReferenceModel:
    """A loaded model in which nothing has been trained, and its data."""

    def __init__(self, backend: Backend, dataset: Dataset, batch_tokens: int) -> None:
        """`batch_tokens`: in one forward pass, with padding; at least one sample."""
        self._backend, self._dataset, self._batch_tokens = backend, dataset, batch_tokens
        self.computed = 0  # samples, again if they were computed twice
        self.targets, self.counts = dataset.usable_targets()

    def values(self, first: int, samples: int, look: Look) -> Values:
        """Return the nats of the counted tokens of so many usable samples, in their order. Raises TrainctlError if
        memory isn't enough for one sample, InvalidInputError naming a sample whose values aren't finite, and what
        `look` does."""
        numbers = np.arange(first, first + samples, dtype=np.int64)
        counts = self.counts[numbers]
        starts = np.cumsum(counts) - counts
        values, done = np.empty(int(counts.sum()), np.float32), 0
        order = numbers[np.argsort(-self.targets[numbers], kind="stable")]  # the longest first
        while done < len(order):
            size = max(1, self._batch_tokens // int(self.targets[order[done]]))
            batch = order[done : done + size]
            values[spans(starts[batch - first], counts[batch - first])] = self._computed(batch)
            done += len(batch)
            self.computed += len(batch)
            look(done)
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            number = int(numbers[np.searchsorted(np.cumsum(counts), wrong[0], side="right")])
            place = self._dataset.place(self._dataset.index(number))
            raise InvalidInputError(place, 'the reference has no finite log-probability; try model.dtype = "float32"')
        return values

    def _computed(self, numbers: Indices) -> Values:
        """Return the values of one batch, in halves if memory is short."""
        batch = self._dataset.usable_batch(numbers)
        try:
            values: Values = self._backend.token_log_probabilities(batch, reference=True)[batch.counted > 0]
        except DeviceMemoryError as error:
            if len(numbers) == 1:
                raise TrainctlError(f"out of memory with one sample for the reference: {error}") from None
        else:
            return values
        half = len(numbers) // 2
        self._batch_tokens = max(1, half * int(self.targets[numbers[0]]))
        return np.concatenate([self._computed(numbers[:half]), self._computed(numbers[half:])])


def prepare_reference(
    settings: ReferenceSettings,
    dataset: Dataset,
    backend: Backend,
    report: Report = no_report,
    company: Company | None = None,
) -> None:
    """Attach the values of all samples, for training and held out; without `company`, the rank computes them alone.
    `report` takes the samples done and all there are. Raises InvalidInputError for a cache that can't be read
    and as `check_sizes`, TrainctlError as `SharedPass.run`, and as `ReferenceModel.values`."""
    for part in (dataset, *([dataset.evaluation] if dataset.evaluation is not None else [])):
        key = part.reference_key(settings.model, settings.compute)
        target = settings.folder / key.name
        model = ReferenceModel(backend, part, settings.batch_tokens)
        if company is not None:
            check_sizes(model.counts, "run file", has_adapter=backend.recipe.adapter is not None)
            _compute_together(key, model, target, company, report)
        elif not target.is_dir():
            make_cache(target, functools.partial(_write, key, model), report)
        log.info("reference: computed %s of %s pairs here", f"{model.computed:,}", f"{part.usable:,}")
        part.attach_reference(read_values(target, key))


def _write(key: ReferenceKey, model: ReferenceModel, work: Path, report: Report) -> None:
    samples = len(model.counts)

    def look(done: int) -> None:
        report(first + done, samples)

    with (work / VALUES_NAME).open("wb") as file:
        for first in range(0, samples, AT_ONCE):
            file.write(model.values(first, min(AT_ONCE, samples - first), look).astype(DTYPE).tobytes())
    write_notes(work, key)


def _compute_together(key: ReferenceKey, model: ReferenceModel, target: Path, company: Company, report: Report) -> None:
    """Get the values that all ranks of the run have. They replace this node's own values if those differ."""
    own_digest = stored_digest(target) if target.is_dir() else ""
    supply = stored_values(read_values(target, key), model.counts) if own_digest else model.values
    shared = SharedPass(company, key, supply, report, model.counts, model.targets)
    remove_parts(target.parent)
    with part_of(target) as work:
        digest = shared.run(work / VALUES_NAME, own_digest)
        if digest == stored_digest(target):
            return  # as before, or another rank with the same folder was first
        write_notes(work, key)
        sync_all(work)
        shutil.rmtree(target, ignore_errors=True)
        try:
            work.rename(target)
        except OSError:
            if digest != stored_digest(target):
                raise
        sync(target.parent)


class SharedPass:
    """A pass over the samples of one data set."""

    def __init__(
        self, company: Company, key: ReferenceKey, supply: Supply, report: Report, counts: Indices, targets: Indices
    ) -> None:
        """`counts` and `targets`: of each usable sample, its values and its tokens to process; `check_sizes` takes the
        counts."""
        self._asks: dict[str, Any] = {"run": company.run, "rank": company.rank, "reference": key.name}
        self._key, self._supply, self._line, self._report = key, supply, company.line, report
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
            return self._ask(counts=self._counts.astype("<u4").tobytes(), tokens=self._tokens.astype("<u4").tobytes())
        if answer.slice is None:
            if not answer.values:
                time.sleep(IDLE_SECONDS)
            return self._ask()
        first = answer.first * self._each
        samples = min(answer.units * self._each, self._samples - first)
        raw = self._supply(first, samples, self._fetching(answer, file)).astype(DTYPE).tobytes()
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


def stored_values(values: Values, counts: Indices) -> Supply:
    """Return what gives values from an earlier run to ranks that have none; `counts`: of each usable sample."""
    ends = np.concatenate([[0], np.cumsum(counts)])

    def supply(first: int, samples: int, look: Look) -> Values:
        look(samples)
        return values[ends[first] : ends[first + samples]]

    return supply


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
