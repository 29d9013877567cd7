"""Readings of the kernel: counters, pressure, energy and sleep, from recorded files and of this machine."""

import os
import time
from pathlib import Path

import msgspec
import pytest
from tests.node_agent.support.groups import V1_MOUNTS, V2_MOUNTS, machine
from tests.node_agent.support.records import reading

from trainctl.node_agent.readings import kernel_counters as counters
from trainctl.node_agent.readings.host import Energy, EnergyMeter, HostReader, drawn_watts
from trainctl.node_agent.readings.kernel_counters import PressureReader, RateMeter, SwapMeter
from trainctl.node_agent.readings.sleep_clock import REPORT_SECONDS, Clocks, Sleep, SleepClock
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.messages import METRICS
from trainctl.protocol.record.paths import RunPaths

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


PSI = "some avg10={} avg60=0.47 avg300=0.79 total=6302517\nfull avg10=0.16 avg60=0.41 avg300=0.71 total=5856162\n"
STAT = "usage_usec 5\nnr_periods {}\nnr_throttled {}\nthrottled_usec 1\n"
V2_GROUP = "0::/system.slice/trainctl.service\n"
FOLDER = "fs/system.slice/trainctl.service"


def test_a_group_of_version_2_has_its_own_pressure(tmp_path: Path) -> None:
    files = {
        f"{FOLDER}/cpu.pressure": PSI.format(12.5), f"{FOLDER}/io.pressure": PSI.format(0.0),
        "proc/pressure/cpu": PSI.format(99.0), "proc/pressure/memory": PSI.format(3.25),
    }  # fmt: skip
    proc = machine(tmp_path, V2_MOUNTS, V2_GROUP, files, pid="self")
    assert PressureReader(proc).read() == {"cpu_pressure": 12.5, "io_pressure": 0.0, "memory_pressure": 3.25}


def test_elsewhere_it_is_the_machines(tmp_path: Path) -> None:
    proc = machine(tmp_path, V1_MOUNTS, "1:cpu:/jobs\n0::/\n", {"proc/pressure/cpu": PSI.format(7.0)}, pid="self")
    assert PressureReader(proc).read() == {"cpu_pressure": 7.0}


@pytest.mark.parametrize("text", ["", "some avg10=\n", "full avg10=1.0\n"])
def test_what_the_kernel_does_not_report_is_no_zero(tmp_path: Path, text: str) -> None:
    proc = machine(tmp_path, V2_MOUNTS, V2_GROUP, {"proc/pressure/io": text}, pid="self")
    assert PressureReader(proc).read() == {}
    assert PressureReader(tmp_path / "nowhere").read() == {}


@pytest.mark.parametrize(("mounts", "group", "folder"), [
    (V2_MOUNTS, V2_GROUP, FOLDER), (V2_MOUNTS, V2_GROUP, "fs/system.slice"),
    (V1_MOUNTS, "1:cpu:/jobs/a\n0::/\n", "fs/cpu/jobs/a"), (V1_MOUNTS, "1:cpu:/jobs/a\n0::/\n", "fs/cpu/jobs"),
])  # fmt: skip
def test_throttling_is_a_part_of_the_quotas_periods_also_of_a_group_above(tmp_path, mounts, group, folder):
    name = f"{folder}/cpu.stat"
    reader = PressureReader(machine(tmp_path, mounts, group, {name: STAT.format(100, 20)}, pid="self"))
    seen = []
    for periods, throttled in ((100, 20), (110, 25), (110, 25), (120, 25), (5, 1)):
        (tmp_path / name).write_text(STAT.format(periods, throttled))
        seen.append(reader.read().get("cpu_throttled_percent"))
    assert seen == [None, 50.0, None, 0.0, None]
    (tmp_path / name).write_text(STAT.format(0, 0))  # without a quota
    assert reader.read() == reader.read() == {}


def meter(*readings: tuple[float, float | None], run: str = "run-1") -> EnergyMeter:
    """With power in watts at times in seconds."""
    made = EnergyMeter()
    made.begin(run, 1000.0)
    for now, watts in readings:
        made.add(watts, now)
    return made


@pytest.mark.parametrize(
    ("readings", "joules", "gap_seconds"),
    [
        (((0, 60.0), (1, 60.0), (2, 100.0)), 140.0, 0.0),
        (((0, 60.0), (1, None), (2, None), (3, 60.0), (4, 60.0)), 60.0, 3.0),  # not readable for a while
        (((0, 60.0), (1, 60.0), (100, 60.0), (101, 60.0)), 120.0, 99.0),  # the machine slept
        (((0, None), (1, None)), None, 1.0),  # no power is ever read: n/a, never zero
    ],
)
def test_power_is_added_up_and_what_is_not_read_is_a_gap_and_not_guessed(readings, joules, gap_seconds) -> None:
    assert drawn_watts([m.GpuReading("a", power_watts=20.0), m.GpuReading("b")]) == 20.0
    assert drawn_watts([m.GpuReading("b")]) is None
    energy = meter(*readings).energy
    assert energy is not None
    assert (energy.joules, energy.gap_seconds) == (joules, gap_seconds)


def test_another_run_begins_at_nothing_and_no_run_adds_nothing() -> None:
    made = meter((0, 60.0), (1, 60.0))
    made.pause()
    for now in (2.0, 3.0, 4.0):
        made.add(60.0, now)
    assert made.energy == Energy(1000.0, 60.0)  # of the run that has ended
    made.begin("run-2", 2000.0)
    made.add(60.0, 5.0)
    made.add(60.0, 6.0)
    assert made.energy == Energy(2000.0, 60.0)
    assert EnergyMeter().energy is None


def test_an_agent_that_is_restarted_goes_on_and_counts_its_absence_as_a_gap(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run-1")
    paths.directory.mkdir()
    own = {"energy_joules": 720.0, "energy_since_at": 1000.0, "energy_gap_seconds": 2.0}
    kept = msgspec.structs.replace(reading(5000.0), **own)
    other = msgspec.structs.replace(reading(5001.0), node="b", energy_joules=1.0, energy_since_at=1.0)
    with RunDb(paths) as recorder:
        recorder.host(kept)
        recorder.host(other)
    with HostReader("a", tmp_path, devices=()) as reader:
        assert reader.read(5009.0).energy_since_at is None  # no run yet
        reader.count_for("run-1", 5010.0, paths)
        again = reader.read(5010.0)
    assert (again.energy_joules, again.energy_since_at) == (720.0, 1000.0)
    assert again.energy_gap_seconds >= 12.0
    with HostReader("a", tmp_path, devices=()) as reader:
        reader.count_for("run-1", 9000.0, paths)  # taken up again much later
        later = reader.read(9000.0)
    assert (later.energy_joules, later.energy_since_at) == (None, 9000.0)


NOW = Clocks(1_000_000.0, 500.0, 800.0)


def after(wall: float, monotonic: float, suspended: float | None) -> Clocks:
    """All clocks so many seconds on; None: a machine without one that counts a suspend."""
    return Clocks(NOW.wall + wall, NOW.monotonic + monotonic, None if suspended is None else 800.0 + suspended)


@pytest.mark.parametrize(
    ("moved", "seconds"),
    [
        (after(600.25, 0.25, 600.25), 600.25),  # suspended
        (after(0.25, 0.25, 3600.25), 3600.25),  # and its wall clock is set later
        (after(605.0, 5.0, 5.0), 605.0),  # stopped, as a virtual machine that is suspended
        (after(5.0, 5.0, 5.0), None),  # stopped for a while, and no clock says that more time passed
        (after(600.0, 0.25, 0.25), None),  # the wall clock was set
        (after(1.5, 0.5, 1.5), None),  # too short
    ],
)
def test_sleep_is_told_by_the_clocks(moved, seconds):
    sleep = SleepClock(NOW).look(moved)
    assert sleep == (None if seconds is None else Sleep(seconds, moved.wall, moved.monotonic))


def test_a_sleep_is_found_once_and_reported_for_a_while():
    clock, woke = SleepClock(NOW), after(605.0, 5.0, 5.0)
    assert clock.reported(NOW.monotonic) is None
    found = clock.look(woke)
    assert found is not None and clock.look(after(605.25, 5.25, 5.25)) is None
    assert clock.reported(woke.monotonic + REPORT_SECONDS - 1) == found
    assert clock.reported(woke.monotonic + REPORT_SECONDS) is None
