"""Log-probabilities of rows: how likely the model finds a completion, an assistant's turns, or a text.

`python -m trainctl.trainer.work.scoring FILE [--prompts]` checks whether every row of a JSONL file can be used, as
training uses it or as a prompt. Exit status 0: it can; 2: one line on standard error names the first row that can't,
and why.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.batch import Tokens, collate, collate_apart
from trainctl.trainer.data.row_tokens import RowTokenizer
from trainctl.trainer.data.rows import NoAnswerError, fields_of, lines_in, prompt_of, row_chunks, row_of

ERROR_CHARACTERS = 120
"""Longest reason why a row has no result, so that the results of a slice fit into one message."""


@dataclass(frozen=True)
class _Sample:
    place: int  # of the row in its slice
    tokens: Tokens
    counted: NDArray[np.bool_]  # which targets count
    prompt: Tokens  # of an encoder, with a token after it that is never read; empty without an encoder

    @property
    def length(self) -> int:
        """Return the tokens in a pass, at most."""
        return max(len(self.tokens), len(self.prompt))


class Scorer:
    """A model that scores rows."""

    def __init__(self, backend: Backend, tokenizer: RowTokenizer, longest: int | None, batch_tokens: int) -> None:
        """`longest`: tokens that the model allows, None: any number. `batch_tokens`: in one forward pass, with
        padding."""
        self._backend, self._tokenizer = backend, tokenizer
        self._longest, self._batch_tokens = longest, batch_tokens

    def process(self, first: int, rows: Sequence[str]) -> list[dict[str, Any]]:
        """Return for each row `logprob` (the sum over its counted tokens, in nats), `tokens` (how many there are) and
        `mean`; or `error`, the reason why it has none."""
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
        """Return a row's tokens. Raises InvalidInputError if the model can't score it."""
        parsed, prompt = row_of(fields_of(row, "row"), "row"), list[int]()
        if self._tokenizer.encodes_prompts:
            (prompt, _), (tokens, mask) = self._tokenizer.encode_apart([parsed])
        else:
            ((tokens, mask),) = self._tokenizer.encode([parsed])
        longest = max(len(tokens), len(prompt)) - (1 if prompt else 0)  # both have one that isn't counted
        if self._longest is not None and longest > self._longest:
            raise InvalidInputError("row", f"is {longest:,} tokens long; the model allows {self._longest:,}")
        counted = np.array(mask[1:], np.bool_)
        if not counted.any():
            raise InvalidInputError("row", "has no token to score: the first token has no log-probability")
        return _Sample(place, np.array(tokens, np.int32), counted, np.array(prompt, np.int32))

    def _batches(self, samples: Sequence[_Sample]) -> Iterator[list[_Sample]]:
        """Yield the longest first, each batch as wide as its first sample."""
        left = sorted(samples, key=lambda sample: -sample.length)
        while left:
            size = max(1, self._batch_tokens // left[0].length)
            yield left[:size]
            left = left[size:]

    def _sums(self, batch: Sequence[_Sample]) -> list[float]:
        """Return the sums of a batch, in halves if memory is short. Raises DeviceMemoryError if it isn't enough for one
        row."""
        rows = [(sample.tokens, sample.counted) for sample in batch]
        prompts = [sample.prompt for sample in batch]
        try:
            whole = collate_apart(prompts, rows) if len(prompts[0]) else collate(rows)
            log_probabilities = self._backend.token_log_probabilities(whole)
        except DeviceMemoryError:
            if len(batch) == 1:
                raise
        else:
            return [math.fsum(row) for row in log_probabilities * whole.counted]
        half = len(batch) // 2
        self._batch_tokens = max(1, half * batch[0].length)
        return self._sums(batch[:half]) + self._sums(batch[half:])


def main() -> int:
    """Check a file; return the exit status."""
    use = prompt_of if "--prompts" in sys.argv[2:] else row_of
    try:
        for chunk in row_chunks(Path(sys.argv[1])):
            for place, line in lines_in(chunk):
                use(fields_of(line, place), place)
    except NoAnswerError as error:
        print(f"{error.where}: no assistant turn to score; use --answers", file=sys.stderr)
        return error.exit_code
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
