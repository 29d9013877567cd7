"""Micro-batches as rectangular arrays, the weight their loss is divided by, and threads that assemble the next ones.

Shapes: B rows, L targets of the longest row, S tokens of the longest prompt for an encoder.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.trainer.data.permutation import Indices

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Prompts:
    """Inputs of the encoder of an encoder-decoder model."""

    inputs: Tokens  # [B, S], padded on the right
    lengths: NDArray[np.int64]  # [B]

    def rows(self, chosen: NDArray[np.int64]) -> "Prompts":
        return Prompts(self.inputs[chosen], self.lengths[chosen])


@dataclass(frozen=True)
class Batch:
    """B sequences of up to L targets. Row b's first target is its second token; a causal model needs no attention
    mask for padding on the right, since no counted target can see it."""

    inputs: Tokens  # [B, L]
    targets: Tokens  # [B, L]
    counted: NDArray[np.float32]  # [B, L], 1 where the target's loss counts, 0 elsewhere and in padding
    lengths: NDArray[np.int64]  # [B], targets without padding
    weight: float  # counted targets
    positions: Tokens | None = None  # [B, L], each input's place in its document; None: one document per row
    keys: NDArray[np.int32] | None = None  # [B, L], of dropout; None: nothing is dropped
    reference: NDArray[np.float32] | None = None  # [B, L], log-probabilities by it; None: not computed before
    sequences: int = 1  # of a sample: rows n * sequences and those that follow it are those of sample n
    prompts: Prompts | None = None  # of an encoder; None: a prompt is the beginning of its row

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs) // self.sequences

    @property
    def tokens(self) -> int:
        """Tokens to process: with those that have no loss, without padding."""
        return int(self.lengths.sum()) + (0 if self.prompts is None else int(self.prompts.lengths.sum()))

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens."""
        read = [self.inputs, self.targets, *([] if self.prompts is None else [self.prompts.inputs])]
        return hashlib.sha256(b"".join(tokens.tobytes() for tokens in read)).hexdigest()

    @property
    def every_target(self) -> NDArray[np.float32]:
        """[B, L], 1 for all targets, counted or not; 0 in padding."""
        return (np.arange(self.targets.shape[1]) < self.lengths[:, None]).astype(np.float32)

    def rows(self, chosen: NDArray[np.int64]) -> "Batch":
        """Return some of the samples, padded as they are."""
        counted = self.counted[chosen]
        weight = float(counted.sum(dtype=np.float64))
        positions = None if self.positions is None else self.positions[chosen]
        prompts = None if self.prompts is None else self.prompts.rows(chosen)
        rows = self.inputs[chosen], self.targets[chosen], counted, self.lengths[chosen]
        return Batch(*rows, weight, positions, prompts=prompts)


def collate(samples: Sequence[tuple[Tokens, NDArray[np.bool_]]]) -> Batch:
    """Pad samples of k + 1 tokens and k flags (which targets count) on the right to the longest."""
    lengths = np.array([len(flags) for _, flags in samples], np.int64)
    tokens = np.concatenate([tokens for tokens, _ in samples])
    counted = np.concatenate([np.insert(flags, 0, False) for _, flags in samples]).astype(np.uint8)
    return gathered(tokens, counted, np.cumsum(lengths + 1) - lengths - 1, lengths)


def collate_apart(prompts: Sequence[Tokens], completions: Sequence[tuple[Tokens, NDArray[np.bool_]]]) -> Batch:
    """Collate completions for a decoder; `prompts` are for the encoder, each with one token more than it reads."""
    encoded = collate([(tokens, np.zeros(len(tokens) - 1, np.bool_)) for tokens in prompts])
    return replace(collate(completions), prompts=Prompts(encoded.inputs, encoded.lengths))


def gathered(
    tokens: NDArray[np.integer[Any]], counted: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Batch:
    """Collate samples that begin at `starts` in flat arrays, each of `lengths` + 1 tokens."""
    columns = np.arange(int(lengths.max()))
    holds = columns < lengths[:, None]
    places = np.where(holds, starts[:, None] + columns, 0)
    inputs = np.where(holds, tokens[places], 0).astype(np.int32)
    targets = np.where(holds, tokens[places + 1], 0).astype(np.int32)
    flags = (holds & (counted[places + 1] > 0)).astype(np.float32)
    return Batch(inputs, targets, flags, lengths, float(flags.sum(dtype=np.float64)))


def packed(
    tokens: NDArray[np.integer[Any]],
    counted: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> Batch:
    """Collate samples as `gathered` does, with each sample in one of ascending `rows`, after those before it in its
    row."""
    before = np.cumsum(lengths) - lengths  # targets in samples before each, and before each row's first
    widths = np.bincount(rows, lengths).astype(np.int64)
    row_start = np.cumsum(widths) - widths
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    places = np.repeat(starts, lengths) + within
    at = np.repeat(rows, lengths), np.repeat(before - row_start[rows], lengths) + within
    inputs = np.zeros((len(widths), int(widths.max())), np.int32)
    targets, positions, flags = np.zeros_like(inputs), np.zeros_like(inputs), np.zeros(inputs.shape, np.float32)
    inputs[at], targets[at], positions[at], flags[at] = tokens[places], tokens[places + 1], within, counted[places + 1]
    weight = float(flags.sum(dtype=np.float64))
    return Batch(inputs, targets, flags, widths, weight, positions if len(rows) > len(widths) else None)


class Prefetch:
    """Batches that `make` assembles from positions, the same one whenever it is asked: up to `ahead` of them before
    they are needed, on `workers` threads. Belongs to one thread."""

    def __init__(self, make: Callable[[Indices], Batch], ahead: int, workers: int) -> None:
        self._make, self._ahead, self._workers = make, ahead, workers
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[bytes, Future[Batch]] = {}

    def get(self, positions: Indices, following: Iterable[Indices]) -> Batch:
        """Return the batch of `positions`, and begin those of the first `following`. Raises what `make` does, on
        whichever thread."""
        ready = self._begun.pop(positions.tobytes(), None)
        self.expect(following)
        return self._make(positions) if ready is None else ready.result()

    def expect(self, following: Iterable[Indices]) -> None:
        """Begin the batches of the first `following`, and forget the others."""
        if not self._ahead:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="prefetch")
        wanted = {positions.tobytes(): positions for positions in islice(following, self._ahead)}
        for key in self._begun.keys() - wanted.keys():
            self._begun.pop(key).cancel()
        for key in wanted.keys() - self._begun.keys():
            self._begun[key] = self._pool.submit(self._make, wanted[key])

    def close(self) -> None:
        """End the threads; a batch in the making is finished first."""
        self._begun.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
