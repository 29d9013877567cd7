"""Rates of the kernel's counters: from recorded files of Linux, and of this machine while it does something."""

import os
import time
from pathlib import Path

import pytest

from trainctl.node_agent.readings import kernel_counters as counters
from trainctl.node_agent.readings.host import HostReader
from trainctl.node_agent.readings.kernel_counters import RateMeter, SwapMeter
from trainctl.protocol.messages import METRICS

SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm RtoMin InSegs OutSegs RetransSegs InErrs
Tcp: 1 200 900 800 {} 0
Udp: InDatagrams
Udp: 4
"""


def test_a_rate_is_a_difference_by_the_seconds_between_two_readings() -> None:
    told = iter([{"a": 10.0, "b": 5.0}, {"a": 40.0, "b": 1.0, "c": 7.0}, {"a": 40.0, "c": 9.0}])
    meter = RateMeter(lambda: next(told))
    assert meter.read(100.0) == {}
    assert meter.read(102.0) == {"a": 15.0}  # b began again, and c is new
    assert meter.read(103.0) == {"a": 0.0, "c": 2.0}
    still = RateMeter(lambda: {"a": 1.0})
    assert still.read(5.0) == still.read(5.0) == {}, "no time has passed"


def test_retransmitted_segments_are_found_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "snmp").write_text(SNMP.format(17))
    assert counters._tcp(tmp_path) == {"retransmits_per_second": 17.0}
    for text in ("", "Tcp: RetransSegs\n", SNMP.replace("RetransSegs", "Other").format(3)):
        (tmp_path / "net" / "snmp").write_text(text)
        assert counters._tcp(tmp_path) == {}


@pytest.mark.needs("linux")
def test_a_disk_is_read_by_its_device_number(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    folder = tmp_path / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    folder.mkdir(parents=True)
    (folder / "stat").write_text("  100 0 2000 50  300 0 4000 70  0 1500 120\n")
    assert counters._disk(tmp_path, tmp_path) == {
        "disk_read_bytes_per_second": 2000 * 512, "disk_write_bytes_per_second": 4000 * 512, "disk_busy_percent": 150.0,
    }  # fmt: skip
    (folder / "stat").write_text("not numbers")
    assert counters._disk(tmp_path, tmp_path) == {}
    assert counters._disk(tmp_path / "gone", tmp_path) == {}


class _Swap:
    def __init__(self, total: int, used: int, sin: int, sout: int) -> None:
        self.total, self.used, self.sin, self.sout = total, used, sin, sout


def test_a_machine_without_swap_space_reports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([_Swap(0, 0, 0, 0), _Swap(100, 40, 10, 0), _Swap(100, 60, 10, 4096)])
    monkeypatch.setattr(counters.psutil, "swap_memory", lambda: next(told))
    meter = SwapMeter()
    assert meter.read(1.0) == {} and meter.read(2.0) == {}
    assert meter.read(61.0) == {"swap_used_bytes": 40.0}, "it has some since"
    assert meter.read(63.0) == {
        "swap_used_bytes": 60.0, "swap_in_bytes_per_second": 0.0, "swap_out_bytes_per_second": 2048.0,
    }  # fmt: skip


def test_every_reading_is_in_the_table_and_finite(tmp_path: Path) -> None:
    with HostReader("studio", tmp_path, devices=()) as reader:
        reader.read(0.0)
        time.sleep(0.05)
        values = reader.read(0.05).values
    assert values and set(values) <= {name for name, metric in METRICS.items() if metric.scope == "host"}
    assert all(0 <= value < 1e12 for value in values.values())
    assert all(value <= 100 for name, value in values.items() if METRICS[name].unit == "%" and "disk" not in name)
