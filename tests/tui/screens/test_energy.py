"""Energy in words: watt-hours as read, more than that where power wasn't read for a while, n/a where it never was."""

import msgspec
import pytest

from trainctl.protocol import messages as m
from trainctl.tui.text import energy
from trainctl.tui.text.glyphs import UNICODE
from trainctl.tui.text.styled_line import plain
from trainctl.tui.widgets import memory_breakdown

HOST = m.HostReading(
    node="a", read_at=4600.0, cpu_percent=None, memory_used_bytes=None, memory_total_bytes=None, disk_free_bytes=None,
    energy_joules=221_400.0, energy_since_at=1000.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "61.5 Wh"),
        ({"energy_joules": 36e6}, "10.00 kWh"),
        ({"energy_joules": 0.0}, "0.0 Wh"),
        ({"energy_gap_seconds": 30.0}, "61.5 Wh"),
        ({"energy_gap_seconds": 600.0}, "over 61.5 Wh (10m 00s unread)"),
        ({"energy_joules": None}, "n/a"),
        ({"energy_since_at": None}, "n/a"),
    ],
)
def test_what_is_told_of_one_machine(changes, text) -> None:
    assert energy.text([msgspec.structs.replace(HOST, **changes)]) == text


def test_machines_are_added_up_and_those_without_a_reading_left_out() -> None:
    unread = msgspec.structs.replace(HOST, energy_joules=None)
    assert energy.text([HOST, HOST, unread]) == "123 Wh"
    assert energy.text([]) == "n/a"


@pytest.mark.parametrize(("total", "text"), [(None, "disk free"), (1_000_000_000_000, "disk ")])
def test_the_node_screen_has_the_disk_used_of_its_size_where_that_is_known(total, text) -> None:
    host = msgspec.structs.replace(HOST, disk_free_bytes=212_000_000_000, disk_total_bytes=total)
    shown = plain(memory_breakdown._line(memory_breakdown.disk(host), 100, UNICODE))
    assert shown.strip().startswith(text.strip())
    assert ("788/1000" in shown.replace(",", "")) == (total is not None)
