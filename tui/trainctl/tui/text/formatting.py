"""Numbers, durations and times as the screen's words. What is unknown is `n/a`, never a zero; a NaN is `nan`."""

import datetime
import math

from trainctl.protocol.messages import event_prose

NA = "n/a"
_DAY_SECONDS = 86400
_GIGABYTE = 1e9


def _without_digits(value: float | None) -> str:
    return NA if value is None else str(value)


def count(value: float | None) -> str:
    """Return whole number with thousands separated: 18,240."""
    return _without_digits(value) if value is None or not math.isfinite(value) else f"{round(value):,}"


def rate(value: float | None) -> str:
    """Return a rate in a column: 7,100 up to 99,999, then 123k, 1.2M."""
    if value is None or not math.isfinite(value):
        return _without_digits(value)
    return count(value) if abs(value) < 99_999.5 else compact(value)


def compact(value: float | None) -> str:
    """Return three significant digits with k, M, G, T: 10.7k, 842, 1.2M."""
    if value is None or not math.isfinite(value):
        return _without_digits(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            scaled = value / limit
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.5 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}" if abs(value) >= 9.95 or value == int(value) else f"{value:.1f}"


def loss(value: float | None) -> str:
    """Return a loss or another number of order one, four digits: 1.842, 12.31, nan."""
    if value is None or not math.isfinite(value):
        return _without_digits(value)
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return scientific(value)
    return f"{value:.3f}" if size < 10 else f"{value:.2f}" if size < 100 else f"{value:.1f}"


def scientific(value: float | None) -> str:
    """Return a learning rate: 1.62e-4, 3e-5, 0."""
    if value is None or not math.isfinite(value):
        return _without_digits(value)
    if value == 0:
        return "0"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def learning_rate(value: float | None) -> str:
    """Return a learning rate that stands still where it is shown: always three digits, 2.90e-3."""
    if value is None or not math.isfinite(value) or value == 0:
        return scientific(value)
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{digits}e{int(exponent)}"


def short_unit(unit: str) -> str:
    """Return the unit of a rate where there is little room: tok/s, pairs/s."""
    return "tok/s" if unit == "tokens/s" else unit


def figure(value: float | None, spec: str) -> str:
    """Return a value in a format of its own, such as `{:.0f} W`."""
    return NA if value is None else spec.format(value)


def money(value: float | None, currency: str) -> str:
    """Return an amount: 12.40 USD, 12,340 USD; below a tenth with two digits that count, 0.0042 USD."""
    if value is None or not math.isfinite(value):
        return NA
    size = abs(value)
    if 0 < size < 1e-8:
        return f"{scientific(value)} {currency}"
    places = 0 if size >= 9_999.5 else 2 if size >= 0.0995 or size == 0 else 1 - math.floor(math.log10(size))
    return f"{value:,.{places}f} {currency}"


def percent(part: float | None) -> str:
    """Return a fraction of one as whole percent: 92%."""
    return _without_digits(part) if part is None or not math.isfinite(part) else f"{100 * part:.0f}%"


def gigabytes(value: float | None) -> str:
    """Return bytes in GB of 10^9, without the unit: 160, 41, 2.4, 0.31."""
    if value is None:
        return NA
    size = value / _GIGABYTE
    return f"{size:.0f}" if size >= 9.95 else f"{size:.1f}" if size >= 0.995 else f"{size:.2f}"


def space(value: float | None) -> str:
    """Format a number of bytes on a disk: 4.2 GB, 310 MB, 12 kB."""
    if value is None:
        return NA
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if value >= size:
            return f"{value / size:,.{1 if value < 10 * size else 0}f} {unit}"
    return f"{value / 1e3:.0f} kB"


def used_of(used: float | None, cap: float | None) -> str:
    """Return memory as used/cap in GB; one unknown half is left out, both unknown are n/a."""
    if used is None:
        return NA
    return gigabytes(used) if cap is None else f"{gigabytes(used)}/{gigabytes(cap)}"


def seconds(value: float | None) -> str:
    """Return a step's length as texts of events have it: 3.06 s, 41 ms, 75 s."""
    return _without_digits(value) if value is None or not math.isfinite(value) else event_prose.seconds(value)


def age(value: float | None) -> str:
    """Return how long ago, in one unit: 1s, 12m, 4h, 3d."""
    if value is None or not math.isfinite(value):
        return NA
    value = max(value, 0.0)
    for unit_seconds, unit in ((_DAY_SECONDS, "d"), (3600, "h"), (60, "m")):
        if value >= unit_seconds * (2 if unit != "d" else 1):
            return f"{value / unit_seconds:.0f}{unit}"
    return f"{int(value)}s"


def duration(value: float | None) -> str:
    """Return how long, in two units: 1d 11h, 3h 05m, 4m 20s, 12s."""
    if value is None or not math.isfinite(value):
        return NA
    whole = round(max(value, 0.0))
    if whole >= _DAY_SECONDS:
        return f"{whole // _DAY_SECONDS}d {whole % _DAY_SECONDS // 3600}h"
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def moment(at: float, zone: datetime.tzinfo | None) -> datetime.datetime | None:
    """Return Unix second `at` in `zone` (None: the machine's own), where a date can say it."""
    try:
        return datetime.datetime.fromtimestamp(at, zone or datetime.UTC).astimezone(zone)
    except (OverflowError, OSError, ValueError):
        return None


def clock(at: float, now: float, zone: datetime.tzinfo | None = None) -> str:
    """Return time of day of Unix second `at` as seen at `now`: 14:31 today, Sat 02:02 within six days, else 12 Mar
    02:02."""
    when, today = moment(at, zone), moment(now, zone)
    if when is None or today is None:
        return NA
    days = abs((when.date() - today.date()).days)
    if days == 0:
        return f"{when:%H:%M}"
    return f"{when:%a %H:%M}" if days <= 6 else f"{when.day} {when:%b %H:%M}"


def eta(remaining_seconds: float | None, now: float, zone: datetime.tzinfo | None = None) -> str:
    """Return `1d 11h, Sat 02:02`: how long it still takes and when that is."""
    if remaining_seconds is None or not math.isfinite(remaining_seconds):
        return NA
    return f"{duration(remaining_seconds)}, {clock(now + remaining_seconds, now, zone)}"


def span(best_seconds: float | None, worst_seconds: float | None) -> str:
    """Return `1h 36m to 1h 55m`; empty where either isn't known."""
    known = [value for value in (best_seconds, worst_seconds) if value is not None and math.isfinite(value)]
    return " to ".join(duration(value) for value in known) if len(known) == 2 else ""
