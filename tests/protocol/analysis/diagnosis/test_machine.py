"""Rules of a machine: heat, quota, swap, memory, disk, stolen processor time, other programs on a GPU."""

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
from tests.protocol.support.diagnosed import (
    causes,
    commands,
    first,
    healthy_facts,
    longer,
    said_of,
    with_gpu,
    with_readings,
)

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.analysis.diagnosis.situation import Situation

WHOLE = {"data": 1.5, "forward": 1.5, "backward": 1.5}


def slower(facts: DiagnosisFacts | None = None) -> DiagnosisFacts:
    return longer(facts or healthy_facts(), 1, WHOLE)


@pytest.mark.parametrize(
    ("limit", "words"), [("thermal", "heat"), ("power", "its power cap"), ("hardware", "its hardware")]
)
def test_a_clock_limit_says_what_holds_the_device_back(limit: m.ClockLimit, words: str) -> None:
    facts = with_gpu(slower(), "node-1", clock_limits=(limit,), clock_mhz=1100.0, temperature_celsius=84.0)
    found = first(facts)
    assert (found.cause, found.title) == ("throttled", f"node-1 is held back by {words}")
    assert "84 °C, 1,100 MHz" in found.evidence[0]
    assert found.what_if is not None
    assert found.what_if.part > 0.2
    assert found.what_if.saying.startswith(f"without {words} on node-1 a step takes ")
    assert "slow-rank" not in causes(facts)
    assert ("follows", "node-1 is slow in backward and forward") in said_of(facts, "slow-rank")


def test_a_power_cap_needs_slower_passes() -> None:
    limits = {"clock_limits": ("power",), "clock_mhz": 1700.0}
    assert causes(with_gpu(healthy_facts(), "node-1", **limits)) == []
    assert first(with_gpu(slower(), "node-1", **limits)).title == "node-1 is held back by its power cap"
    both = with_gpu(healthy_facts(), "node-1", **{**limits, "clock_limits": ("power", "thermal")})
    assert first(both).title == "node-1 is held back by heat"


def test_a_lower_clock_is_named_without_a_reason() -> None:
    facts = with_gpu(healthy_facts(), "node-1", clock_mhz=1200.0)
    found = first(facts)
    assert found.title == "node-1 is held back by a lower clock"
    assert found.evidence[0] == "NVIDIA A100: 1,200 MHz under load, 1,700 MHz before"


def test_a_quota_needs_slower_passes_and_macos_reports_heat() -> None:
    assert causes(with_readings(healthy_facts(), "node-1", {"cpu_throttled_percent": 20})) == []
    found = first(with_readings(slower(), "node-1", {"cpu_throttled_percent": 20}))
    assert found.evidence[0] == "processes stopped in 20 % of the quota's periods"
    assert first(with_readings(slower(), "node-1", {"thermal_pressure": 2})).evidence[0] == "thermal pressure 2 of 4"
    assert causes(with_readings(healthy_facts(), "node-1", {"thermal_pressure": 1})) == []


def test_swap_is_told_apart_from_a_slow_disk() -> None:
    values = {"swap_in_bytes_per_second": 8e6, "swap_out_bytes_per_second": 2e6, "swap_used_bytes": 3e9,
              "memory_pressure": 40, "io_pressure": 60}  # fmt: skip
    facts = with_readings(longer(healthy_facts(), 1, {"data": 30, "forward": 1.5, "backward": 1.5}), "node-1", values)
    found = first(facts)
    assert (found.cause, found.title) == ("swap", "node-1 swaps")
    assert found.evidence[:3] == ("10 MB/s swapped in and out", "3.0 GB of swap in use", "memory pressure 40 %")
    assert "trainctl send resize-batch micro=8 --node node-1" in commands(found)
    assert causes(facts) == ["swap"]


def test_memory_pressure_is_named_without_swap() -> None:
    found = first(with_readings(healthy_facts(), "node-1", {"memory_pressure": 25}))
    assert (found.cause, found.evidence) == (
        "memory-pressure", ("62 % of the machine's memory in use", "memory pressure 25 %"),
    )  # fmt: skip
    full = with_readings(slower(), "node-1", {}, memory_used_bytes=63_000_000_000)
    assert first(full).cause == "memory-pressure"


def test_a_busy_disk_is_a_cause_only_if_data_are_late() -> None:
    busy = {"io_pressure": 45, "disk_busy_percent": 97, "disk_read_bytes_per_second": 12e6}
    calm = with_readings(healthy_facts(), "node-1", busy)
    assert causes(calm) == []
    assert ("clear", "I/O pressure 45 %, the disk is busy 97 % of the time; data take under 5 % of a step") in said_of(
        calm, "slow-disk"
    )
    found = first(with_readings(longer(healthy_facts(), 1, {"data": 30}), "node-1", busy))
    assert (found.cause, found.title) == ("slow-disk", "node-1's disk is slow")
    assert found.evidence[:3] == ("I/O pressure 45 %", "the disk is busy 97 % of the time", "12 MB/s read")
    assert "a machine swaps: swap 0 MB/s" in found.ruled_out
    assert "trainctl data bench RUN.toml" in commands(found)
    assert "trainctl run RUN.toml --set data.prefetch=4" in commands(found)


def test_stolen_time_needs_slower_passes_or_much_of_it() -> None:
    found = first(with_readings(slower(), "node-1", {"cpu_steal_percent": 5}))
    assert (found.cause, found.title) == ("stolen-cpu", "others take processor time from node-1")
    assert found.evidence[0] == "5 % of the processors' time goes to other virtual machines"
    assert causes(with_readings(healthy_facts(), "node-1", {"cpu_steal_percent": 5})) == []
    assert causes(with_readings(healthy_facts(), "node-1", {"cpu_steal_percent": 15})) == ["stolen-cpu"]


def test_pressure_that_was_there_before_steals_nothing() -> None:
    """Ranks that share a machine's processors always wait for each other."""
    assert causes(with_readings(slower(), "node-1", {"cpu_pressure": 60})) == ["stolen-cpu"]
    facts = slower()
    always = tuple(
        msgspec.structs.replace(one, values={**one.values, "cpu_pressure": 60.0}) for one in facts.readings["node-1"]
    )
    shared = dataclasses.replace(facts, readings={**facts.readings, "node-1": always})
    assert causes(shared) == ["slow-rank"]
    full = with_readings(shared, "node-1", {"cpu_pressure": 85})
    assert causes(full) == ["stolen-cpu"]
    fuller = tuple(
        msgspec.structs.replace(one, values={**one.values, "cpu_pressure": 88.0}) for one in facts.readings["node-1"]
    )
    nearly = dataclasses.replace(facts, readings={**facts.readings, "node-1": fuller})
    assert causes(with_readings(nearly, "node-1", {"cpu_pressure": 92})) == ["slow-rank"]
    assert causes(with_readings(nearly, "node-1", {"cpu_pressure": 96})) == ["stolen-cpu"], "it can't rise by 15 points"


def test_other_programs_on_a_gpu_are_named_with_their_user(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(pid=4711, name="blender", user="ada", memory_bytes=6_000_000_000)
    small = SimpleNamespace(pid=12, name="desktop", user="root", memory_bytes=90_000_000)
    gpu = SimpleNamespace(name="NVIDIA A100", others=(small, other), clock_limits=(), clock_mhz=None,
                          utilization_percent=None)  # fmt: skip
    monkeypatch.setattr(Situation, "gpus", lambda _, rank: [gpu] if rank == 1 else [])
    found = first(healthy_facts())
    assert (found.cause, found.severity) == ("gpu-shared", "info")
    assert found.evidence == ("blender (pid 4711, ada), 6.0 GB of device memory",)


def test_missing_readings_are_unknown_and_not_zero() -> None:
    facts = healthy_facts()
    unread = dataclasses.replace(facts, readings={})
    assert {result for cause in ("throttled", "swap", "slow-disk", "stolen-cpu", "gpu-shared", "memory-pressure")
            for result, _ in said_of(unread, cause)} == {"unknown"}  # fmt: skip
    assert causes(slower(unread)) == ["slow-rank"]
    assert any(line.startswith("a machine swaps: not known, for lack of swap rates") for line in
               first(slower(unread)).ruled_out)  # fmt: skip
