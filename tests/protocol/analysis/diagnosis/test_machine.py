"""Rules of a machine: heat, quota, swap, memory, disk, stolen processor time, other programs on a GPU."""

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
from tests.protocol.support import diagnosed
from tests.protocol.support.diagnosed import causes, commands, first, healthy_facts, longer, said_of, with_readings

from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.analysis.diagnosis.situation import Situation
from trainctl.protocol.config.run_tables import NodeTable


def slower(facts: DiagnosisFacts | None = None) -> DiagnosisFacts:
    return longer(facts or healthy_facts(), 1, {"data": 1.5, "forward": 1.5, "backward": 1.5})


def test_a_clock_s_limit_is_named() -> None:
    for limits, clock_mhz, words, when_healthy in (
        (("thermal",), 1100.0, "heat", ["throttled"]),
        (("power",), 1700.0, "its power cap", []),
        (("power", "thermal"), 1700.0, "its power cap", ["throttled"]),
        (("hardware",), 1700.0, "its hardware", ["throttled"]),
        ((), 1200.0, "a lower clock", ["throttled"]),
    ):
        gpu = {"clock_limits": limits, "clock_mhz": clock_mhz}
        facts = diagnosed.with_gpu(slower(), "node-1", **gpu)
        found = first(facts)
        assert (found.cause, found.title) == ("throttled", f"node-1 is held back by {words}")
        assert found.what_if is not None and found.what_if.part > 0.2
        assert "slow-rank" not in causes(facts) and "follows" in dict(said_of(facts, "slow-rank"))
        assert causes(diagnosed.with_gpu(healthy_facts(), "node-1", **gpu)) == when_healthy


def test_most_readings_are_a_cause_only_where_passes_are_slower() -> None:
    for values, when_slow, when_healthy in (
        ({"cpu_throttled_percent": 20}, "throttled", []),
        ({"thermal_pressure": 2}, "throttled", ["throttled"]),
        ({"thermal_pressure": 1}, "slow-rank", []),
        ({"cpu_steal_percent": 5}, "stolen-cpu", []),
        ({"cpu_steal_percent": 15}, "stolen-cpu", ["stolen-cpu"]),
        ({"memory_pressure": 25}, "memory-pressure", ["memory-pressure"]),
    ):
        assert first(with_readings(slower(), "node-1", values)).cause == when_slow
        assert causes(with_readings(healthy_facts(), "node-1", values)) == when_healthy


def test_swap_is_no_slow_disk_and_full_memory_no_swap() -> None:
    values = {
        "swap_in_bytes_per_second": 8e6,
        "swap_out_bytes_per_second": 2e6,
        "memory_pressure": 40,
        "io_pressure": 60,
    }
    facts = with_readings(longer(healthy_facts(), 1, {"data": 30, "forward": 1.5, "backward": 1.5}), "node-1", values)
    assert causes(facts) == ["swap"]
    assert first(facts).evidence[0] == "10 MB/s swapped in and out"
    assert "trainctl send resize-batch micro=8 --node node-1" in commands(first(facts))
    assert first(with_readings(slower(), "node-1", {}, memory_used_bytes=63_000_000_000)).cause == "memory-pressure"


def test_a_busy_disk_is_a_cause_only_if_data_are_late() -> None:
    busy = {"io_pressure": 45, "disk_busy_percent": 97, "disk_read_bytes_per_second": 12e6}
    calm = with_readings(healthy_facts(), "node-1", busy)
    assert causes(calm) == [] and "clear" in dict(said_of(calm, "slow-disk"))
    found = first(with_readings(longer(healthy_facts(), 1, {"data": 30}), "node-1", busy))
    assert (found.cause, found.node) == ("slow-disk", "node-1")
    assert "a machine swaps: swap 0 MB/s" in found.ruled_out
    assert {"trainctl data bench RUN.toml", "trainctl run RUN.toml --set data.prefetch=4"} <= {*commands(found)}


def test_pressure_that_was_there_before_steals_nothing() -> None:
    """Ranks that share a machine's processors always wait for each other; from 88 % it can't rise by 15 points."""
    pressed = slower()
    rows = pressed.readings["node-1"]
    for before, now, cause in (
        (2.0, 60, "stolen-cpu"), (60.0, 60, "slow-rank"), (60.0, 85, "stolen-cpu"), (88.0, 92, "slow-rank"),
        (88.0, 96, "stolen-cpu"),
    ):  # fmt: skip
        changed = [msgspec.structs.replace(row, values=row.values | {"cpu_pressure": before}) for row in rows]
        facts = dataclasses.replace(pressed, readings=pressed.readings | {"node-1": tuple(changed)})
        assert causes(with_readings(facts, "node-1", {"cpu_pressure": now})) == [cause]


def test_tasks_that_always_wait_on_a_machine_with_one_rank_are_others() -> None:
    """Ranks that share a machine may wait for each other: the cause isn't known then, and not cleared."""
    facts = with_readings(healthy_facts(), "node-1", {"cpu_pressure": 98})
    rows = [msgspec.structs.replace(row, values=row.values | {"cpu_pressure": 98}) for row in facts.readings["node-1"]]
    facts = dataclasses.replace(facts, readings=facts.readings | {"node-1": tuple(rows)})
    assert facts.view is not None
    for machines, state in ((("m0", "m1"), "found"), (("m0", "m0"), "unknown")):
        ranks = tuple(msgspec.structs.replace(rank, machine=machines[rank.rank % 2]) for rank in facts.view.ranks[:2])
        placed = dataclasses.replace(facts, view=msgspec.structs.replace(facts.view, ranks=ranks))
        assert state in [said for said, text in said_of(placed, "stolen-cpu") if "98" in text or state == "found"]


def test_other_programs_on_a_gpu_are_named_with_their_user(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(pid=4711, name="blender", user="ada", memory_bytes=6_000_000_000)
    small = SimpleNamespace(pid=12, name="desktop", user="root", memory_bytes=90_000_000)
    gpu = SimpleNamespace(name="A100", others=(small, other), clock_limits=(), clock_mhz=None, utilization_percent=None)
    monkeypatch.setattr(Situation, "gpus", lambda _, rank: [gpu] if rank == 1 else [])
    found = first(healthy_facts())
    assert (found.cause, found.severity) == ("gpu-shared", "info")
    assert found.evidence == ("blender (pid 4711, ada), 6.0 GB of device memory",)


def test_ranks_that_share_a_machine_have_no_more_threads_than_it_has_cores() -> None:
    def on_one_machine(threads: int, cores: float) -> DiagnosisFacts:
        facts = healthy_facts()
        assert facts.view is not None and facts.config is not None
        ranks = tuple(
            msgspec.structs.replace(rank, device="cpu", machine="boot", cores=cores) for rank in facts.view.ranks
        )
        nodes = {rank.node: NodeTable(threads=threads) for rank in ranks}
        config = msgspec.structs.replace(facts.config, nodes=nodes)
        return dataclasses.replace(facts, view=msgspec.structs.replace(facts.view, ranks=ranks), config=config)

    count = len(healthy_facts().view.ranks)  # type: ignore[union-attr]
    nodes = ",".join(rank.node for rank in healthy_facts().view.ranks)  # type: ignore[union-attr]
    found = first(on_one_machine(0, 2.0 * count))
    assert found.cause == "shared-cores"
    assert commands(found) == [f"trainctl run RUN.toml --set nodes={nodes} --set nodes.node-0.threads=2"]
    for threads, cores in ((2, 2.0 * count), (1, 1.0)):
        assert "shared-cores" not in causes(on_one_machine(threads, cores))


def test_missing_readings_are_unknown_and_not_zero() -> None:
    unread = dataclasses.replace(healthy_facts(), readings={})
    for cause in ("throttled", "swap", "slow-disk", "stolen-cpu", "gpu-shared", "memory-pressure"):
        assert {result for result, _ in said_of(unread, cause)} == {"unknown"}
    assert causes(slower(unread)) == ["slow-rank"]
