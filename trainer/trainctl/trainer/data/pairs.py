"""Pairs of answers from JSONL or Parquet: a prompt, the answer that was chosen, and the one that was rejected.

A row has `prompt`, `chosen` and `rejected`, all text or all lists of messages; or `chosen` and `rejected` alone, two
conversations whose first messages are the same and are the prompt. Other fields are left alone.
"""

from collections.abc import Iterator
from typing import Any

from trainctl.protocol.config.input_checks import PAIR_KINDS
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.chunks import Chunk
from trainctl.trainer.data.rows import Row, objects_in, row_of

HALVES = ("chosen", "rejected")


def halves_in(chunk: Chunk) -> Iterator[Row]:
    """The chosen and the rejected half of each row of part of a file, as rows of prompt and completion. Raises
    InvalidInputError naming file, line and field."""
    for place, fields in objects_in(chunk):
        yield from pair_of(fields, place)


def pair_of(fields: Any, place: str) -> tuple[Row, Row]:
    """The chosen and the rejected half of one row. Raises InvalidInputError naming `place` and the field."""
    if not isinstance(fields, dict):
        raise InvalidInputError(place, "not a JSON object")
    if any(fields.get(half) is None for half in HALVES):
        raise InvalidInputError(place, f"needs {PAIR_KINDS}")
    if fields["chosen"] == fields["rejected"]:
        raise InvalidInputError(place, "chosen and rejected are equal, so the pair has no preference to learn")
    prompt, answers = _prompt_of(fields, place)
    whole = {name: value for name, value in fields.items() if name not in (*HALVES, "messages")} | {"prompt": prompt}
    chosen, rejected = (_half(whole, answer, place, half) for half, answer in zip(HALVES, answers, strict=True))
    return chosen, rejected


def _prompt_of(fields: dict[str, Any], place: str) -> tuple[Any, list[Any]]:
    """The prompt, and the two answers without it."""
    answers = [fields[half] for half in HALVES]
    if fields.get("prompt") is not None:
        return fields["prompt"], answers
    if not all(isinstance(answer, list) for answer in answers):
        raise InvalidInputError(f"{place}: prompt", "is missing: only lists of messages may begin with the prompt")
    same = 0
    for one, other in zip(*answers, strict=False):
        if one != other:
            break
        same += 1
    if not same:
        raise InvalidInputError(place, "chosen and rejected have no first message in common, so there is no prompt")
    return answers[0][:same], [answer[same:] for answer in answers]


def _half(fields: dict[str, Any], answer: Any, place: str, half: str) -> Row:
    if not answer:
        raise InvalidInputError(f"{place}: {half}", "is empty, so the pair has nothing to compare")
    try:
        return row_of({**fields, "completion": answer}, place)
    except InvalidInputError as error:
        where = error.where.replace(": completion", f": {half}")
        raise InvalidInputError(where, error.problem.replace("completion", half)) from None
