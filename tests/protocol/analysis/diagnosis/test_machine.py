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
    assert found.what_if is not None and found.what_if.part > 0.2
    assert "slow-rank" not in causes(facts)
    assert "follows" in dict(said_of(facts, "slow-rank"))


def test_a_power_cap_needs_slower_passes() -> None:
    limits = {"clock_limits": ("power",), "clock_mhz": 1700.0}
    assert causes(with_gpu(healthy_facts(), "node-1", **limits)) == []
    assert first(with_gpu(slower(), "node-1", **limits)).title == "node-1 is held back by its power cap"
    both = with_gpu(healthy_facts(), "node-1", **{**limits, "clock_limits": ("power", "thermal")})
    assert first(both).title == "node-1 is held back by heat"


def test_a_lower_clock_is_named_without_a_reason() -> None:
    assert causes(with_gpu(healthy_facts(), "node-1", clock_mhz=1200.0)) == ["throttled"]


@pytest.mark.parametrize(
    ("values", "when_slow", "when_healthy"),
    [
        ({"cpu_throttled_percent": 20}, "throttled", []),
        ({"thermal_pressure": 2}, "throttled", ["throttled"]),
        ({"thermal_pressure": 1}, "slow-rank", []),
        ({"cpu_steal_percent": 5}, "stolen-cpu", []),
        ({"cpu_steal_percent": 15}, "stolen-cpu", ["stolen-cpu"]),
        ({"memory_pressure": 25}, "memory-pressure", ["memory-pressure"]),
    ],
)
def test_most_readings_are_a_cause_only_where_passes_are_slower(
    values: dict[str, float], when_slow: str, when_healthy: list[str]
) -> None:
    assert first(with_readings(slower(), "node-1", values)).cause == when_slow
    assert causes(with_readings(healthy_facts(), "node-1", values)) == when_healthy


def test_swap_is_told_apart_from_a_slow_disk() -> None:
    values = {"swap_in_bytes_per_second": 8e6, "swap_out_bytes_per_second": 2e6, "swap_used_bytes": 3e9,
              "memory_pressure": 40, "io_pressure": 60}  # fmt: skip
    facts = with_readings(longer(healthy_facts(), 1, {"data": 30, "forward": 1.5, "backward": 1.5}), "node-1", values)
    found = first(facts)
    assert found.evidence[:3] == ("10 MB/s swapped in and out", "3.0 GB of swap in use", "memory pressure 40 %")
    assert "trainctl send resize-batch micro=8 --node node-1" in commands(found)
    assert causes(facts) == ["swap"]


def test_a_machine_s_full_memory_is_named() -> None:
    assert first(with_readings(slower(), "node-1", {}, memory_used_bytes=63_000_000_000)).cause == "memory-pressure"


def test_a_busy_disk_is_a_cause_only_if_data_are_late() -> None:
    busy = {"io_pressure": 45, "disk_busy_percent": 97, "disk_read_bytes_per_second": 12e6}
    calm = with_readings(healthy_facts(), "node-1", busy)
    assert causes(calm) == []
    assert "clear" in dict(said_of(calm, "slow-disk"))
    found = first(with_readings(longer(healthy_facts(), 1, {"data": 30}), "node-1", busy))
    assert (found.cause, found.node) == ("slow-disk", "node-1")
    assert "a machine swaps: swap 0 MB/s" in found.ruled_out
    assert {"trainctl data bench RUN.toml", "trainctl run RUN.toml --set data.prefetch=4"} <= {*commands(found)}


def test_pressure_that_was_there_before_steals_nothing() -> None:
    """Ranks that share a machine's processors always wait for each other."""
    facts = slower()

    def always(percent: float) -> DiagnosisFacts:
        before = tuple(
            msgspec.structs.replace(one, values={**one.values, "cpu_pressure": percent})
            for one in facts.readings["node-1"]
        )
        return dataclasses.replace(facts, readings={**facts.readings, "node-1": before})

    assert causes(with_readings(facts, "node-1", {"cpu_pressure": 60})) == ["stolen-cpu"]
    assert causes(always(60.0)) == ["slow-rank"]
    assert causes(with_readings(always(60.0), "node-1", {"cpu_pressure": 85})) == ["stolen-cpu"]
    assert causes(with_readings(always(88.0), "node-1", {"cpu_pressure": 92})) == ["slow-rank"]
    nearly_full = with_readings(always(88.0), "node-1", {"cpu_pressure": 96})
    assert causes(nearly_full) == ["stolen-cpu"], "it can't rise by 15 points"


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
    unread = dataclasses.replace(healthy_facts(), readings={})
    assert {result for cause in ("throttled", "swap", "slow-disk", "stolen-cpu", "gpu-shared", "memory-pressure")
            for result, _ in said_of(unread, cause)} == {"unknown"}  # fmt: skip
    assert causes(slower(unread)) == ["slow-rank"]
