"""The fields that a table can be filtered and sorted by: what each is, and the test that a comparison makes of it."""

import contextlib
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trainctl.tui.state import units as q

R = TypeVar("R")
Value = float | str | tuple[str, ...] | None
Test = Callable[[Value], bool]
OPERATORS = ("<=", ">=", "!=", "<", ">", "=", ":", "~")
"""Longest first."""
_LONGEST_PATTERN = 200


class ValueProblem(ValueError):  # noqa: N818  it is reported as part of another
    """Why a field can't be compared as wanted, in words; `at_operator` tells that it isn't for the value."""

    def __init__(self, problem: str, *, at_operator: bool = False) -> None:
        super().__init__(problem)
        self.at_operator = at_operator


@dataclass(frozen=True)
class FilterField(Generic[R]):
    """One field of a table's rows.

    A number if it has a `kind`, one of a few words if it has `states` (a row may have several of them), else text.
    `get` gives None for what is unknown.
    """

    name: str
    about: str
    get: Callable[[R], Value]
    kind: q.Kinds | None = None
    states: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    is_metric: bool = False  # one of many, which are not listed one by one

    def sort_key(self, row: R) -> tuple[int, float, str]:
        """Numbers before texts, and what is unknown after both."""
        value = self.get(row)
        if value is None or value != value:
            return (2, 0.0, "")
        if isinstance(value, float | int):
            return (0, float(value), "")
        return (1, 0.0, (value if isinstance(value, str) else " ".join(value)).casefold())


@dataclass(frozen=True)
class Table(Generic[R]):
    """What the rows of one table are filtered by; `words` is all the text that a bare word is looked for in."""

    name: str
    fields: tuple[FilterField[R], ...]
    words: Callable[[R], str]

    def find(self, name: str) -> FilterField[R] | None:
        """The field of that name or alias, whatever its case."""
        wanted = name.lower()
        return next((field for field in self.fields if wanted in (field.name, *field.aliases)), None)

    @property
    def names(self) -> str:
        """The fields in a line, metrics as one."""
        metrics = "or a metric's name" if any(field.is_metric for field in self.fields) else ""
        return " ".join([*(field.name for field in self.fields if not field.is_metric), metrics]).rstrip()


def test_of(field: FilterField[R], operator: str, text: str) -> Test:
    """What `field operator text` asks of a value. Raises ValueProblem saying what would be right."""
    if text.lower() == q.UNKNOWN and operator in (":", "=", "!="):
        return (lambda value: value is not None) if operator == "!=" else (lambda value: value is None)
    if operator == "~":
        pattern = pattern_of(text)
        return lambda value: any(pattern.search(word) for word in words_of(value))
    if field.kind is not None:
        return _number_test(field, operator, text)
    if operator not in (":", "=", "!="):
        raise ValueProblem(
            f"{field.name} is not a number, so {operator} can't compare it; use : = != or ~", at_operator=True
        )
    return _state_test(field, operator, text) if field.states else _text_test(operator, text)


def _number_test(field: FilterField[R], operator: str, text: str) -> Test:
    assert field.kind is not None
    kind = field.kind.value
    wanted = q.parse(text, kind)
    if wanted is None:
        raise ValueProblem(f"{text!r} is not a valid {kind.name}; {field.name} takes {kind.example}")
    holds, right = q.ORDERED[operator], wanted
    return lambda value: isinstance(value, float | int) and holds(float(value), right)


def _state_test(field: FilterField[R], operator: str, text: str) -> Test:
    wanted = text.lower()
    if wanted not in field.states:
        raise ValueProblem(f"{text!r} is not a valid {field.name}; one of {' '.join(field.states)}")
    negated = operator == "!="
    return lambda value: isinstance(value, tuple) and (wanted in value) != negated


def _text_test(operator: str, text: str) -> Test:
    wanted = text.casefold()
    if operator == ":":
        return lambda value: isinstance(value, str) and wanted in value.casefold()
    negated = operator == "!="
    return lambda value: isinstance(value, str) and (value.casefold() == wanted) != negated


def words_of(value: Value) -> Sequence[str]:
    """The value as texts, none for what is unknown."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (f"{value:g}" if isinstance(value, float | int) else value,)


def pattern_of(text: str) -> re.Pattern[str]:
    """A regular expression, whatever the case of letters. Raises ValueProblem for one that is none."""
    if len(text) > _LONGEST_PATTERN:
        raise ValueProblem(f"a pattern may have at most {_LONGEST_PATTERN} characters")
    reason = "too large"
    with warnings.catch_warnings(), contextlib.suppress(OverflowError, RecursionError, MemoryError):
        warnings.simplefilter("ignore")  # of what a later Python may read otherwise
        try:
            return re.compile(text, re.IGNORECASE)
        except re.error as error:
            reason = error.msg
    raise ValueProblem(f"the pattern {text!r} can't be read: {reason}")
