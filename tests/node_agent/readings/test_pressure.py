"""Pressure and CPU quota of the agent's own control group: from recorded files, and of a real group with a quota."""

from pathlib import Path

import pytest
from tests.node_agent.support.groups import V1_MOUNTS, V2_MOUNTS, machine

from trainctl.node_agent.readings.kernel_counters import PressureReader

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
