"""Numbers with units as a person types them, and how they compare: 10k, 1.5M, 20GB, 90%, 200ms, 5m."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

_DECIMAL = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(.*)\Z", re.DOTALL)
UNKNOWN = "n/a"


@dataclass(frozen=True)
class Kind:
    """What a number counts: the factor of each unit that may stand after it, "" for none, and one that reads well."""

    name: str
    units: Mapping[str, float]
    example: str


class Kinds(Enum):
    """All kinds of numbers that the tables have."""

    COUNT = Kind("number", {"": 1.0, **_DECIMAL}, "100, 10k or 1.5M")
    BYTES = Kind(
        "size",
        {"": 1e9, "B": 1.0, **{f"{unit}B": size for unit, size in _DECIMAL.items()}, **_DECIMAL,
         **{f"{unit}iB": 1024.0**power for power, unit in enumerate("KMGT", 1)}},
        "20GB, 512MiB or 20 for gigabytes",
    )  # fmt: skip
    PERCENT = Kind("percentage", {"": 1.0, "%": 1.0}, "90% or 90")
    SECONDS = Kind(
        "time",
        {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0},
        "3s, 200ms, 5m, 2h or 1d",
    )  # fmt: skip
    CELSIUS = Kind("temperature", {"": 1.0, "C": 1.0, "°C": 1.0, "°": 1.0}, "85 or 85C")
    WATTS = Kind("power", {"": 1.0, "W": 1.0, "kW": 1e3}, "300 or 300W")
    HERTZ = Kind("clock rate", {"": 1e9, "Hz": 1.0, "MHz": 1e6, "GHz": 1e9}, "1.4GHz, 900MHz or 1.4 for gigahertz")


@dataclass(frozen=True)
class Quantity:
    """A number in its base unit; `half` is half of the last digit typed, so that 3.1 equals all that reads as 3.1."""

    value: float
    half: float


def parse(text: str, kind: Kind) -> Quantity | None:
    """The quantity that `text` means, None where it means none. `nan` and `inf` are numbers too."""
    if text.lower() in ("nan", "inf", "-inf"):
        return Quantity(float(text), 0.0)
    found = _NUMBER.match(text)
    factor = kind.units.get(found[2]) if found else None
    if found is None or factor is None:
        return None
    value = float(found[1])
    return Quantity(value * factor, _half_digit(found[1]) * factor) if math.isfinite(value) else None


def _half_digit(digits: str) -> float:
    mantissa, _, exponent = digits.lower().partition("e")
    places = len(mantissa.partition(".")[2])
    power = (int(exponent) if exponent else 0) - places
    return 0.5 * 10.0**power if -300 < power < 300 else 0.0


def equal(value: float, wanted: Quantity) -> bool:
    """Whether the value reads as what was typed; no number equals no number."""
    if math.isnan(value) or math.isnan(wanted.value):
        return math.isnan(value) and math.isnan(wanted.value)
    return value == wanted.value or abs(value - wanted.value) < wanted.half


ORDERED: Mapping[str, Callable[[float, Quantity], bool]] = {
    "<": lambda value, wanted: value < wanted.value, "<=": lambda value, wanted: value <= wanted.value,
    ">": lambda value, wanted: value > wanted.value, ">=": lambda value, wanted: value >= wanted.value,
    "=": equal, ":": equal, "!=": lambda value, wanted: not equal(value, wanted),
}  # fmt: skip
"""What each comparison asks of a known value."""
