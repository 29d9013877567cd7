"""Readings of the machine and its processes: plausible or None, never a zero, and each with the step of its time."""

import ctypes
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.node_agent.support.processes import alive, wait_for
from tests.node_agent.support.records import part, reading

from trainctl.node_agent.readings import devices, host
from trainctl.node_agent.readings.devices import AppleReader, NvidiaReader, Readings, SensorReader, Watch, parse_macmon
from trainctl.node_agent.readings.host import CpuMeter, HostReader, ProcessMeter
from trainctl.node_agent.readings.kernel_counters import ThermalPressure
from trainctl.node_agent.readings.step_readings import StepReadings
from trainctl.node_agent.trainers.supervisor import TrainerSupervisor
from trainctl.protocol import messages as m
from trainctl.protocol.messages import GpuProcess, GpuReading
from trainctl.protocol.record.paths import RunPaths

SINCE_ACTIVE_RATIO = {
    "timestamp": "2026-06-02T20:38:15.427569+00:00",
    "temp": {"cpu_temp_avg": 43.75, "gpu_temp_avg": 36.5},
    "memory": {"ram_total": 25769803776, "ram_usage": 20985479168, "swap_total": 4294967296, "swap_usage": 2602434560},
    "gpu_freq_mhz": 461, "gpu_scaled_ratio": 0.0215, "gpu_active_ratio": 0.09, "cpu_power": 0.2, "gpu_power": 0.0175,
    "ane_power": 0.0, "all_power": 0.222, "sys_power": 5.87, "ram_power": 0.116, "gpu_ram_power": 0.00096,
}  # fmt: skip
BEFORE = {
    "timestamp": "2025-02-24T20:38:15.427569+00:00", "temp": {"cpu_temp_avg": 43.75, "gpu_temp_avg": 36.5},
    "ecpu_usage": [1181, 0.0827], "pcpu_usage": [1974, 0.0152], "gpu_usage": [461, 0.0215], "gpu_power": 0.0175,
}  # fmt: skip


@pytest.mark.parametrize(("line", "percent"), [(SINCE_ACTIVE_RATIO, 9.0), (BEFORE, 2.15)])
def test_both_formats_of_macmon_are_read(line: dict[str, object], percent: float) -> None:
    found = parse_macmon(json.dumps(line), "Apple M2 Ultra GPU")
    assert found.temperature_celsius == 43.75
    assert found.gpus == (
        GpuReading(
            name="Apple M2 Ultra GPU", utilization_percent=pytest.approx(percent), clock_mhz=461.0, power_watts=0.0175,
            temperature_celsius=36.5,
        ),
    )  # fmt: skip


def test_what_macmon_does_not_say_is_none_and_an_absent_sensor_is_not_zero() -> None:
    assert parse_macmon('{"temp": {"cpu_temp_avg": 0.0, "gpu_temp_avg": 0.0}}') == Readings(
        (GpuReading(name="Apple GPU"),)
    )
    for line in ("", "{", "[]", "null", "Error: no permission"):
        assert parse_macmon(line) == Readings()
    odd = '{"temp": 3, "gpu_usage": [1], "gpu_active_ratio": "much", "gpu_power": true}'
    assert parse_macmon(odd) == Readings((GpuReading(name="Apple GPU"),))


@pytest.mark.parametrize(
    ("reasons", "limits"),
    [
        (0x0, ()), (0x1, ()), (0x4, ("power",)), (0x48, ("thermal", "hardware")), (0x24, ("thermal", "power")),
    ],
)  # fmt: skip
def test_what_lowers_an_nvidia_clock_is_told_from_an_idle_device(reasons: int, limits: tuple[str, ...]) -> None:
    assert devices.clock_limits(reasons) == limits


@pytest.fixture
def macmon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name on PATH that prints two recorded lines and stays."""
    (tmp_path / "lines").write_text(f"{json.dumps(BEFORE)}\n{json.dumps(SINCE_ACTIVE_RATIO)}\n")
    program = tmp_path / "macmon"
    program.write_text(f'#!/bin/sh\ntest "$*" = pipe || exit 2\ncat {tmp_path}/lines\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program


def test_a_watch_gives_the_newest_line_and_leaves_no_process(macmon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = psutil.Process().children()
    watch = Watch(AppleReader, every_seconds=0.01)
    wait_for(lambda: watch.latest.gpus and watch.latest.gpus[0].utilization_percent == pytest.approx(9.0))
    assert set(psutil.Process().children()) - set(others)
    with HostReader("studio", macmon.parent, [watch, Watch(NvidiaReader)]) as reader:
        wait_for(lambda: reader.read(0.0).gpus)
        reading = reader.read(0.0)
        assert reading.gpus[0].clock_mhz == 461.0 and reading.temperature_celsius is not None
    monkeypatch.setattr(devices, "STALE_SECONDS", 0.0)
    assert watch.latest == Readings(), "an old reading is none"
    watch.close()
    assert not watch._thread.is_alive() and set(psutil.Process().children()) <= set(others)


def test_a_device_that_is_not_there_reads_as_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="macmon is not on PATH"):
        AppleReader()
    watch = Watch(AppleReader)
    wait_for(lambda: not watch._thread.is_alive())
    assert watch.latest == Readings()
    watch.close()


@pytest.mark.parametrize("reader", [NvidiaReader, SensorReader])
def test_a_reader_opens_and_reads_or_says_why_not(reader: type[NvidiaReader] | type[SensorReader]) -> None:
    try:
        opened = reader()
    except OSError as error:
        assert str(error)
        return
    gpus, temperature = opened.read()
    assert bool(gpus) or temperature is not None
    assert all(gpu.name and gpu.memory_total_bytes != 0 for gpu in gpus)
    opened.close()


def test_the_machine_as_it_is(tmp_path: Path) -> None:
    with HostReader("studio", tmp_path, devices=()) as reader:
        end = time.process_time() + 0.1
        while time.process_time() < end:
            pass
        reading = reader.read(1234.5)
    assert (reading.node, reading.read_at) == ("studio", 1234.5)
    assert reading.cpu_percent is not None and 0 < reading.cpu_percent <= 100
    assert reading.memory_used_bytes and reading.memory_total_bytes
    assert 10**7 < reading.memory_used_bytes < reading.memory_total_bytes
    assert reading.disk_free_bytes and reading.load_1min is not None and reading.gpus == ()
    with HostReader("studio", tmp_path / "gone", devices=()) as reader:
        assert reader.read(0.0).disk_free_bytes is None


def test_stolen_time_is_a_part_of_all_and_none_where_it_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([(60.0, 100.0, 5.0), (80.0, 140.0, 15.0), (90.0, 150.0, None)])
    monkeypatch.setattr(host, "_cpu_times", lambda: host._CpuTimes(*next(told)))
    meter = CpuMeter()
    assert meter.steal_percent is None, "not counted yet"
    assert (meter.percent(), meter.steal_percent) == (50.0, 25.0)
    assert (meter.percent(), meter.steal_percent) == (100.0, None)


class _Notifications:
    """notify(3) as its manual describes it: a registration gives a token, by which a state is read."""

    def __init__(self, state: int, registered: int = 0, read: int = 0) -> None:
        self._state, self._registered, self._read = state, registered, read

    def notify_register_check(self, name: bytes, token: Any) -> int:
        assert name == b"com.apple.system.thermalpressurelevel"
        ctypes.cast(token, ctypes.POINTER(ctypes.c_int))[0] = 4711
        return self._registered

    def notify_get_state(self, token: ctypes.c_int, state: Any) -> int:
        assert token.value == 4711
        ctypes.cast(state, ctypes.POINTER(ctypes.c_uint64))[0] = self._state
        return self._read


@pytest.mark.parametrize(
    ("library", "level"),
    [
        (_Notifications(0), 0), (_Notifications(4), 4), (_Notifications(5), None),
        (_Notifications(2, registered=1), None), (_Notifications(2, read=2), None),
    ],
)  # fmt: skip
def test_thermal_pressure_is_the_state_of_a_notification(library: _Notifications, level: int | None) -> None:
    assert ThermalPressure(library).level() == level


def test_other_processes_on_a_gpu_are_those_that_are_not_our_own(tmp_path: Path) -> None:
    others = tuple(GpuProcess(pid, "python", "anna", 10**9) for pid in (11, 12))

    class Device(devices.DeviceReader):
        def read(self) -> Readings:
            return Readings((GpuReading("NVIDIA", others=others),))

    with HostReader("studio", tmp_path, [Watch(Device, 0.01)]) as reader:
        wait_for(lambda: reader.read(0.0).gpus)
        assert reader.read(0.0, {12}).gpus[0].others == others[:1]


CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])"


def test_a_trainer_is_read_with_its_keeper_and_its_children(tmp_path: Path) -> None:
    host, paths = TrainerSupervisor(), RunPaths(tmp_path / "runs" / "r")
    paths.directory.mkdir(parents=True)
    meter = ProcessMeter()
    host.start(paths, 2, [sys.executable, "-c", CHILD])
    found = alive(host, paths, 2)
    assert found.pid is not None
    try:
        wait_for(lambda: psutil.Process(found.pid).children())
        meter.find(paths.directory)
        assert meter.trainers == (found.pid,)
        first = meter.read()
        time.sleep(0.01)
        second = {item.role: item for item in meter.read()}
        assert [item.role for item in first] == ["agent", "trainer", "keeper", "helper"]
        assert all(item.cpu_percent is None for item in first)
        assert second["agent"].pid == os.getpid() and second["agent"].rank is None
        assert (second["trainer"].pid, second["trainer"].rank) == (found.pid, 2)
        assert all(item.cpu_percent is not None and (item.memory_bytes or 0) > 10**6 for item in second.values())
    finally:
        for child in psutil.Process(found.pid).children():
            child.kill()
    wait_for(lambda: host.find(paths, 2) is None)
    meter.find(paths.directory)
    assert [item.role for item in meter.read()] == ["agent"]


def test_without_a_run_there_is_the_agent_alone() -> None:
    meter = ProcessMeter()
    meter.find(None)
    assert [item.pid for item in meter.read()] == [os.getpid()]


def read(node: str, at: float, percent: float | None, *gpus: float) -> m.HostReading:
    devices = tuple(m.GpuReading("H200", utilization_percent=used) for used in gpus)
    return msgspec.structs.replace(reading(at), node=node, cpu_percent=percent, gpus=devices, values={"user:fans": at})


def percent(joined: m.RankStep) -> float | None:
    return m.METRICS["cpu_percent"].of(joined)


def test_a_step_has_the_mean_of_what_came_while_it_was_made() -> None:
    readings = StepReadings()
    for at, used in ((1.0, 10.0), (2.0, 30.0), (2.0, 30.0), (3.0, None)):
        readings.take(read("node-0", at, used), 5)
    readings.take(read("node-1", 1.5, 90.0), 5)
    joined = readings.joined(part(5), None)
    assert percent(joined) == 20.0, "the newest came twice, and one without a value says nothing"
    assert joined.values.items() >= part(5).values.items()
    assert percent(readings.joined(part(5, rank=1), None)) == 90.0
    assert readings.joined(part(6), None) == part(6), "none came while it was made"


def test_late_parts_find_theirs_and_old_or_retracted_steps_are_forgotten() -> None:
    readings = StepReadings()
    for number in range(1, 6):
        readings.take(read("node-0", float(number), 10.0 * number), number)
    assert percent(readings.joined(part(3), None)) == 30.0
    assert percent(readings.joined(part(2), None)) is None
    readings.take(read("node-0", 9.0, 90.0), 4)  # a redo of what was retracted
    assert percent(readings.joined(part(5), None)) is None


@pytest.mark.parametrize(
    ("device", "used"), [("cuda:1 NVIDIA H200", 60.0), ("cuda:0", 40.0), ("cpu", None), (None, 40)]
)
def test_a_rank_has_what_is_read_of_its_own_device(device: str | None, used: float | None) -> None:
    readings = StepReadings()
    readings.take(read("node-0", 1.0, 10.0, 40.0, 60.0), 1)
    joined = readings.joined(part(1), device)
    assert m.METRICS["gpu_utilization_percent"].of(joined) == used
    assert "user:fans" not in joined.values, "only metrics of the table are kept by step"


def test_a_step_that_does_not_end_takes_no_more_memory() -> None:
    readings, held = StepReadings(), []
    for at in range(1, 3_001):
        readings.take(read("node-0", float(at), at % 5 * 10.0, 40.0, at % 2 * 50.0), 7)
        if at in (1_000, 3_000):
            held.append(len(pickle.dumps(readings)))
    assert held[0] == pytest.approx(held[1], abs=2_000), "2,000 readings more are kept"
    joined = readings.joined(part(7), "cuda:1")
    assert (percent(joined), m.METRICS["gpu_utilization_percent"].of(joined)) == (20.0, 25.0)
