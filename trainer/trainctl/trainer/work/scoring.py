"""Log-probabilities of rows: how likely the model finds a completion, an assistant's turns, or a text."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.batch import Batch, Tokens, collate, collate_apart
from trainctl.trainer.data.row_tokens import RowTokenizer
from trainctl.trainer.data.rows import fields_of, row_of

ERROR_CHARACTERS = 120
"""Longest reason why a row has no result, so that the results of a slice fit into one message."""


class _Sample(NamedTuple):
    place: int  # of the row in its slice
    tokens: Tokens
    counted: NDArray[np.bool_]  # which targets count
    prompt: Tokens  # of an encoder, with a token after it that is never read; empty without an encoder

    @property
    def length(self) -> int:
        """Tokens in a pass, at most."""
        return max(len(self.tokens), len(self.prompt))


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
        read, prompt = row_of(fields_of(row, "row"), "row"), list[int]()
        if self._tokenizer.encodes_prompts:
            (prompt, _), (tokens, mask) = self._tokenizer.encode_apart([read])
        else:
            ((tokens, mask),) = self._tokenizer.encode([read])
        longest = max(len(tokens), len(prompt)) - (1 if prompt else 0)  # both have one that isn't counted
        if self._longest is not None and longest > self._longest:
            raise InvalidInputError("row", f"is {longest:,} tokens long; the model allows {self._longest:,}")
        counted = np.array(mask[1:], np.bool_)
        if not counted.any():
            raise InvalidInputError("row", "has no token to score: the first token has no log-probability")
        return _Sample(place, np.array(tokens, np.int32), counted, np.array(prompt, np.int32))

    def _batches(self, samples: Sequence[_Sample]) -> Iterator[list[_Sample]]:
        """The longest first, each batch as wide as its first sample."""
        batch: list[_Sample] = []
        for sample in sorted(samples, key=lambda one: -one.length):
            if batch and (len(batch) + 1) * batch[0].length > self._batch_tokens:
                yield batch
                batch = []
            batch.append(sample)
        if batch:
            yield batch

    def _sums(self, batch: Sequence[_Sample]) -> list[float]:
        """In halves if memory is short. Raises DeviceMemoryError if it isn't enough for one row."""
        try:
            whole = _collated(batch)
            found = self._backend.token_log_probabilities(whole)
        except DeviceMemoryError:
            if len(batch) == 1:
                raise
        else:
            return [math.fsum(row) for row in found * whole.counted]
        half = len(batch) // 2
        self._batch_tokens = max(1, half * batch[0].length)
        return self._sums(batch[:half]) + self._sums(batch[half:])


def _collated(samples: Sequence[_Sample]) -> Batch:
    rows = [(sample.tokens, sample.counted) for sample in samples]
    return collate_apart([sample.prompt for sample in samples], rows) if len(samples[0].prompt) else collate(rows)
