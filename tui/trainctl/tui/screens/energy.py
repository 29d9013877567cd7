"""What a run's machines have drawn since it began, in words; where their power wasn't always read, that it is more."""

from collections.abc import Iterable

from trainctl.protocol import messages as m
from trainctl.tui.text import formatting as f

JOULES_PER_WATT_HOUR = 3600.0
GAP_PART = 0.01
"""Of the time; a smaller part without a reading isn't worth a word."""


def text(hosts: Iterable[m.HostReading]) -> str:
    """`61.5 Wh`, `over 61.5 Wh (12 min unread)`; n/a where no power is read."""
    counted = [host for host in hosts if host.energy_joules is not None and host.energy_since_at is not None]
    if not counted:
        return f.NA
    watt_hours = sum(host.energy_joules or 0.0 for host in counted) / JOULES_PER_WATT_HOUR
    missing = max(counted, key=lambda host: host.energy_gap_seconds)
    seconds = missing.energy_gap_seconds
    if seconds <= GAP_PART * max(0.0, missing.read_at - (missing.energy_since_at or 0.0)):
        return _watt_hours(watt_hours)
    return f"over {_watt_hours(watt_hours)} ({f.duration(seconds)} unread)"


def _watt_hours(value: float) -> str:
    return f"{value / 1000:.2f} kWh" if value >= 9995 else f"{value:,.0f} Wh" if value >= 99.95 else f"{value:.1f} Wh"
