"""What a run's machines have drawn since it began, in words; where their power wasn't always read, that it is more."""

from collections.abc import Iterable

import msgspec

from trainctl.protocol import messages as m
from trainctl.tui.text import formatting as f

JOULES_PER_WATT_HOUR = 3600.0
GAP_PART = 0.01
"""Of the time; a smaller part without a reading isn't worth a word."""
BEGINNING_SECONDS = 60.0
"""How far from the run's beginning a machine's count may begin to be of the whole run."""


class EnergyFigures(msgspec.Struct, frozen=True):
    """Energy of a run's machines; None: unknown."""

    joules: float | None
    unread_seconds: float  # the longest time of a machine without power readings
    joules_per_1000: float | None  # per 1,000 samples or pairs, if power was read on all machines for the whole run


def text(hosts: Iterable[m.HostReading], per_1000: float | None = None) -> str:
    """`61.5 Wh`, `over 61.5 Wh (12 min unread)`, with the joules per 1,000 samples `61.5 Wh (2.1 Wh per 1,000)`; n/a
    where no power is read."""
    counted = _counted(hosts)
    if not counted:
        return f.NA
    watt_hours = sum(host.energy_joules or 0.0 for host in counted) / JOULES_PER_WATT_HOUR
    missing = max(counted, key=lambda host: host.energy_gap_seconds)
    if not _is_read(missing):
        return f"over {_watt_hours(watt_hours)} ({f.duration(missing.energy_gap_seconds)} unread)"
    each = f" ({per_1000 / JOULES_PER_WATT_HOUR:.3g} Wh per 1,000)" if per_1000 is not None else ""
    return f"{_watt_hours(watt_hours)}{each}"


def of_run(hosts: Iterable[m.HostReading], run: m.RunView) -> list[m.HostReading]:
    """The readings of the machines that take part; of a run that has ended only those whose count is surely its own."""
    nodes, active = {view.node for view in run.ranks}, run.state in m.ACTIVE_RUN_STATES
    return [host for host in hosts if host.node in nodes and (active or _began_with(host, run))]


def figures(hosts: Iterable[m.HostReading], run: m.RunView, cursor: int | None) -> EnergyFigures:
    """Of the run's machines; `cursor`: the first position that the run has not come to yet."""
    own, samples = of_run(hosts, run), run.trained(cursor)
    counted = _counted(own)
    joules = sum(host.energy_joules or 0.0 for host in counted) if counted else None
    whole = {host.node for host in counted if _is_read(host) and _began_with(host, run)}
    is_whole = joules is not None and whole == {view.node for view in run.ranks}
    return EnergyFigures(
        joules, max((host.energy_gap_seconds for host in counted), default=0.0),
        1000 * joules / samples if joules is not None and is_whole and samples else None,
    )  # fmt: skip


def words(hosts: Iterable[m.HostReading], run: m.RunView, cursor: int | None) -> str:
    """The run's energy, and per 1,000 samples where that is known."""
    own = of_run(hosts, run)
    return text(own, figures(own, run, cursor).joules_per_1000)


def _counted(hosts: Iterable[m.HostReading]) -> list[m.HostReading]:
    return [host for host in hosts if host.energy_joules is not None and host.energy_since_at is not None]


def _is_read(host: m.HostReading) -> bool:
    """Whether hardly any time is without a reading."""
    return host.energy_gap_seconds <= GAP_PART * max(0.0, host.read_at - (host.energy_since_at or 0.0))


def _began_with(host: m.HostReading, run: m.RunView) -> bool:
    return host.energy_since_at is not None and abs(host.energy_since_at - run.started_at) <= BEGINNING_SECONDS


def _watt_hours(value: float) -> str:
    return f"{value / 1000:.2f} kWh" if value >= 9995 else f"{value:,.0f} Wh" if value >= 99.95 else f"{value:.1f} Wh"
