"""Log-probabilities of rows: how likely the model finds a completion, an assistant's turns, or a text."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.batch import Tokens, collate
from trainctl.trainer.data.row_tokens import RowTokenizer
from trainctl.trainer.data.rows import fields_of, row_of

ERROR_CHARACTERS = 120
"""Longest reason why a row has no result, so that the results of a slice fit into one message."""


class _Sample(NamedTuple):
    place: int  # of the row in its slice
    tokens: Tokens
    counted: NDArray[np.bool_]  # which targets count


class Scorer:
    """A model that scores rows."""

    def __init__(self, backend: Backend, tokenizer: RowTokenizer, longest: int | None, batch_tokens: int) -> None:
        """`longest`: tokens that the model allows, None: any number. `batch_tokens`: in one forward pass, with
        padding."""
        self._backend, self._tokenizer = backend, tokenizer
        self._longest, self._batch_tokens = longest, batch_tokens

    def process(self, first: int, rows: Sequence[str]) -> list[dict[str, Any]]:
        """For each row `logprob` (the sum over its counted tokens, in nats), `tokens` (how many there are) and `mean`;
        or `error`, the reason why it has none."""
        results: list[dict[str, Any]] = [{} for _ in rows]
        samples = []
        for place, row in enumerate(rows):
            try:
                samples.append(self._sample(place, row))
            except InvalidInputError as error:
                results[place] = {"error": error.problem[:ERROR_CHARACTERS]}
        for batch in self._batches(samples):
            for sample, logprob in zip(batch, self._sums(batch), strict=True):
                count = int(sample.counted.sum())
                results[sample.place] = {"logprob": logprob, "tokens": count, "mean": logprob / count}
        return results

    def _sample(self, place: int, row: str) -> _Sample:
        """Raises InvalidInputError if the model can't score the row."""
        ((tokens, mask),) = self._tokenizer.encode([row_of(fields_of(row, "row"), "row")])
        if self._longest is not None and len(tokens) > self._longest:
            raise InvalidInputError("row", f"is {len(tokens):,} tokens long; the model allows {self._longest:,}")
        counted = np.array(mask[1:], np.bool_)
        if not counted.any():
            raise InvalidInputError("row", "has no token to score: the first token has no log-probability")
        return _Sample(place, np.array(tokens, np.int32), counted)

    def _batches(self, samples: Sequence[_Sample]) -> Iterator[list[_Sample]]:
        """The longest first, each batch as wide as its first sample."""
        batch: list[_Sample] = []
        for sample in sorted(samples, key=lambda one: -len(one.tokens)):
            if batch and (len(batch) + 1) * len(batch[0].tokens) > self._batch_tokens:
                yield batch
                batch = []
            batch.append(sample)
        if batch:
            yield batch

    def _sums(self, batch: Sequence[_Sample]) -> list[float]:
        """In halves if memory is short. Raises DeviceMemoryError if it isn't enough for one row."""
        try:
            whole = collate([(sample.tokens, sample.counted) for sample in batch])
            found = self._backend.token_log_probabilities(whole)
        except DeviceMemoryError:
            if len(batch) == 1:
                raise
        else:
            return [math.fsum(row) for row in found * whole.counted]
        half = len(batch) // 2
        self._batch_tokens = max(1, half * len(batch[0].tokens))
        return self._sums(batch[:half]) + self._sums(batch[half:])
