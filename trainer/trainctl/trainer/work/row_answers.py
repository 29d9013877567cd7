"""The model's answers to rows: each row is a prompt."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages.requests import ANSWER_BYTES
from trainctl.trainer.backends.base import Decoding
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.rows import fields_of, prompt_of
from trainctl.trainer.step.answering import Answerer
from trainctl.trainer.work.scoring import ERROR_CHARACTERS


class RowAnswerer:
    """A model that answers rows."""

    def __init__(self, answerer: Answerer, how: Decoding) -> None:
        self._answerer, self._how = answerer, how

    def process(self, first: int, rows: Sequence[str]) -> list[dict[str, Any]]:
        """For each row, of which the first has index `first`: `answer`, `tokens` (how many were generated) and `ended`
        (whether the model ended the answer); `cut` if the answer was too large; or `error`, the reason why it has
        none."""
        return [self._result(number, row) for number, row in enumerate(rows, first)]

    def _result(self, number: int, row: str) -> dict[str, Any]:
        how = self._how._replace(seed=row_seed(self._how.seed, number))
        try:
            made = self._answerer.answer(prompt_of(fields_of(row, "row"), "row"), how, lambda: None)
        except InvalidInputError as error:
            return {"error": error.problem[:ERROR_CHARACTERS]}
        except (ValueError, TypeError, KeyError, IndexError) as error:  # of a library, about this row
            return {"error": first_line(error)[:ERROR_CHARACTERS]}
        text = fitting(made.text, ANSWER_BYTES)
        cut = {"cut": True} if text != made.text else {}
        return {"answer": text, "tokens": made.tokens, "ended": made.ended, **cut}


def row_seed(seed: int, number: int) -> int:
    """A row's own seed, whichever node answers it."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def fitting(text: str, size: int) -> str:
    """The longest start of a text that is at most `size` bytes long as a JSON string."""
    text = text.encode("utf-8", "replace").decode()
    if len(msgspec.json.encode(text)) <= size:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(msgspec.json.encode(text[:middle])) <= size else (low, middle - 1)
    return text[:low]
