"""The fields that a table is filtered and sorted by: their units, the test of a comparison, and the order of rows."""

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from trainctl.tui.text.styled_line import Piece

_DECIMAL = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(.*)\Z", re.DOTALL)
UNKNOWN = "n/a"


@dataclass(frozen=True)
class Kind:
    """A kind of number: the factor of each unit that may stand after it, "" for none, and one that reads well."""

    name: str
    units: Mapping[str, float]
    example: str


class Kinds(Enum):
    """All kinds of numbers that the tables have."""

    COUNT = Kind("number", {"": 1.0, **_DECIMAL}, "100, 10k or 1.5M")
    BYTES = Kind(
        "size",
        {
            "": 1e9,
            "B": 1.0,
            **{f"{unit}B": size for unit, size in _DECIMAL.items()},
            **_DECIMAL,
            **{f"{unit}iB": 1024.0**power for power, unit in enumerate("KMGT", 1)},
        },
        "20GB, 512MiB or 20 for gigabytes",
    )
    PERCENT = Kind("percentage", {"": 1.0, "%": 1.0}, "90% or 90")
    SECONDS = Kind(
        "time",
        {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0},
        "3s, 200ms, 5m, 2h or 1d",
    )
    CELSIUS = Kind("temperature", {"": 1.0, "C": 1.0, "°C": 1.0, "°": 1.0}, "85 or 85C")
    WATTS = Kind("power", {"": 1.0, "W": 1.0, "kW": 1e3}, "300 or 300W")
    HERTZ = Kind("clock rate", {"": 1e9, "Hz": 1.0, "MHz": 1e6, "GHz": 1e9}, "1.4GHz, 900MHz or 1.4 for gigahertz")


@dataclass(frozen=True)
class Quantity:
    """A number in its base unit; `half` is half of the last digit typed, so that 3.1 equals all that reads as 3.1."""

    value: float
    half: float


def quantity_of(text: str, kind: Kind) -> Quantity | None:
    """Return the quantity that `text` means, None where it means none. `nan` and `inf` are numbers too."""
    if text.lower() in ("nan", "inf", "-inf"):
        return Quantity(float(text), 0.0)
    match = _NUMBER.match(text)
    factor = kind.units.get(match[2]) if match else None
    if match is None or factor is None:
        return None
    value = float(match[1])
    return Quantity(value * factor, _half_digit(match[1]) * factor) if math.isfinite(value) else None


def _half_digit(digits: str) -> float:
    mantissa, _, exponent = digits.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    power = (int(exponent) if exponent else 0) - places
    return 0.5 * 10.0**power if -300 < power < 300 else 0.0


def _equal(value: float, wanted: Quantity) -> bool:
    if math.isnan(value) or math.isnan(wanted.value):
        return math.isnan(value) and math.isnan(wanted.value)
    return value == wanted.value or abs(value - wanted.value) < wanted.half


_ORDERED: Mapping[str, Callable[[float, Quantity], bool]] = {
    "<": lambda value, wanted: value < wanted.value,
    "<=": lambda value, wanted: value <= wanted.value,
    ">": lambda value, wanted: value > wanted.value,
    ">=": lambda value, wanted: value >= wanted.value,
    "=": _equal,
    ":": _equal,
    "!=": lambda value, wanted: not _equal(value, wanted),
}
"""Tests that each comparison makes of a known value."""


R = TypeVar("R")
Value = float | str | tuple[str, ...] | None
Test = Callable[[Value], bool]
OPERATORS = ("<=", ">=", "!=", "<", ">", "=", ":", "~")
"""Longest first."""
_LONGEST_PATTERN = 200


class ValueProblem(ValueError):  # noqa: N818  it is reported as part of another
    """A comparison that can't be made of a field, in words; `at_operator` tells that it isn't for the value."""

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
    kind: Kinds | None = None
    states: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    is_metric: bool = False  # one of many, which are not listed one by one

    def sort_key(self, row: R) -> tuple[int, float, str]:
        """Return numbers before texts, and what is unknown after both."""
        value = self.get(row)
        if value is None or value != value:
            return (2, 0.0, "")
        if isinstance(value, float | int):
            return (0, float(value), "")
        return (1, 0.0, (value if isinstance(value, str) else " ".join(value)).casefold())


@dataclass(frozen=True)
class Table(Generic[R]):
    """The fields that the rows of one table are filtered by; `words` is all the text that a bare word is looked for
    in."""

    name: str
    fields: tuple[FilterField[R], ...]
    words: Callable[[R], str]

    def find(self, name: str) -> FilterField[R] | None:
        """Return the field of that name or alias, whatever its case."""
        wanted = name.lower()
        return next((field for field in self.fields if wanted in (field.name, *field.aliases)), None)

    @property
    def names(self) -> str:
        """Return the fields in a line, metrics as one."""
        metrics = "or a metric's name" if any(field.is_metric for field in self.fields) else ""
        return " ".join([*(field.name for field in self.fields if not field.is_metric), metrics]).rstrip()


def test_of(field: FilterField[R], operator: str, text: str) -> Test:
    """Return what `field operator text` asks of a value. Raises ValueProblem saying what would be right."""
    if text.lower() == UNKNOWN and operator in (":", "=", "!="):
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
    wanted = quantity_of(text, kind)
    if wanted is None:
        raise ValueProblem(f"{text!r} is not a valid {kind.name}; {field.name} takes {kind.example}")
    holds, right = _ORDERED[operator], wanted
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
    """Return the value as texts, none for what is unknown."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (f"{value:g}" if isinstance(value, float | int) else value,)


def pattern_of(text: str) -> re.Pattern[str]:
    """Return a regular expression, whatever the case of letters. Raises ValueProblem for one that is none."""
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


@dataclass(frozen=True)
class SortOrder:
    """`field` is empty for the table's own order."""

    field: str = ""
    falling: bool = False

    def arrow(self, field: str, up: str, down: str) -> str:
        """Return what a column's head carries: the way it is sorted, nothing for another column."""
        return "" if not field or field != self.field else down if self.falling else up


def next_order(order: SortOrder, fields: Sequence[str]) -> SortOrder:
    """Return the order by the next of `fields`, and after the last one the table's own."""
    at = fields.index(order.field) + 1 if order.field in fields else 0
    return SortOrder(fields[at]) if at < len(fields) else SortOrder()


def order_by(order: SortOrder, field: str) -> SortOrder:
    """Return the order after a click on a column's head: first rising, then falling, then the table's own order
    again."""
    if order.field != field:
        return SortOrder(field)
    return SortOrder() if order.falling else SortOrder(field, falling=True)


def in_order(rows: Sequence[R], order: SortOrder, table: Table[R]) -> list[R]:
    """Return the rows in that order; equal ones keep theirs, and what is unknown comes last either way."""
    field = table.find(order.field) if order.field else None
    if field is None:
        return list(reversed(rows)) if order.falling else list(rows)
    keyed = [(field.sort_key(row), row) for row in rows]
    known = [item for item in keyed if item[0][0] < 2]
    known.sort(key=lambda item: item[0], reverse=order.falling)
    return [row for _, row in known] + [row for key, row in keyed if key[0] == 2]


def column_title(field: str, text: str, size: int, order: SortOrder, *, right: bool = False) -> Piece:
    """Return a title in `size` cells, flush right or left, with the arrow of the column that is sorted by; `field` is
    empty for a column that nothing is sorted by."""
    arrow = order.arrow(field, "↑", "↓")
    text = f"{arrow}{text}".rjust(size) if right else f"{text[: size - len(arrow)]}{arrow}".ljust(size)
    return Piece(text[:size], "strong" if arrow else "label", f"screen.sort({field!r})" if field else "")
