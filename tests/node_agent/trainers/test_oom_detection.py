"""Trainers out of memory: told from a bare SIGKILL by recorded cgroup files, and half the micro-batch after them."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq.asyncio
from tests.memory_values import memory
from tests.node_agent.support.group_orders import group, texts
from tests.node_agent.support.groups import V1_MOUNTS, V2_MOUNTS, machine
from tests.node_agent.support.processes import ENVIRONMENT, wait_for
from tests.node_agent.support.records import report
from tests.node_agent.support.simulation import Simulation

from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.planning.durable import RankSetting, Settings
from trainctl.node_agent.trainers import rank_ports
from trainctl.node_agent.trainers.ipc import TrainerLink
from trainctl.node_agent.trainers.oom_detection import (
    WINDOW_SECONDS,
    Held,
    Kills,
    OomKills,
    count_file,
    read_count,
    recognised,
)
from trainctl.node_agent.trainers.supervisor import TrainerSupervisor
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec

GROWN, SAME = Kills(2, 3), Kills(2, 2)
NEAR, FAR = Held(40, 96, 100), Held(40, 60, 100)


@pytest.mark.parametrize(
    ("status", "kills", "held", "is_memory"),
    [
        (-9, GROWN, None, True), (-9, SAME, FAR, False), (-9, None, None, False), (-9, SAME, NEAR, True),
        (-6, SAME, NEAR, True), (-6, GROWN, FAR, False), (-15, GROWN, NEAR, False), (None, GROWN, NEAR, False),
        (-9, None, Held(99, None, None), False), (-9, None, Held(99, None, 100), True), (-11, None, NEAR, False),
    ],
)  # fmt: skip
def test_a_bare_sigkill_is_no_lack_of_memory(status, kills, held, is_memory):
    assert bool(recognised(status, kills, held)) == is_memory
    assert recognised(-9, GROWN, NEAR) == "the kernel killed it for memory (oom_kill 2 → 3)"
    assert recognised(-6, None, Held(1, 31_600_000_000, 32_000_000_000)) == "it had last reported 31.6 of 32.0 GB"


def test_the_last_step_tells_what_a_trainer_took_and_no_lighter_plan_after_it(tmp_path):
    async def peaks(*told: tuple[m.PlanKind, int]) -> list[int | None]:
        context = zmq.asyncio.Context()
        link = TrainerLink(context, lambda: tmp_path)
        trainer = context.socket(zmq.DEALER)
        trainer.connect(link.endpoint)
        seen = []
        for kind, peak in told:
            await trainer.send(codec.encode(report(run="run-1", kind=kind, values=memory(40, peak, 100))))
            assert await asyncio.wait_for(link.receive(), 20) is not None
            held = link.held("run-1", 0)
            seen.append(held.peak if held else None)
        link.close()
        context.destroy(linger=0)
        return seen

    told: list[tuple[m.PlanKind, int]] = [("measure", 90), ("train", 97), ("evaluate", 60), ("train", 80)]
    assert asyncio.run(peaks(*told)) == [90, 97, 97, 80]


V1_CGROUP = "9:name=systemd:/\n4:memory:/jobs/a\n1:cpu:/\n0::/\n"
V1_COUNT = "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"
V2_CGROUP = "0::/user.slice/user-1000.slice/session-2.scope\n"
V2_COUNT = "low 0\nhigh 0\nmax 41\noom 3\noom_kill 2\noom_group_kill 0\n"
CONTAINER_MOUNTS = "612 600 0:26 /docker/4f1a {fs} ro,nosuid - cgroup2 cgroup rw\n"


@pytest.mark.parametrize(
    ("mounts", "cgroup", "file", "text", "count"),
    [
        (V1_MOUNTS, V1_CGROUP, "fs/memory/jobs/a/memory.oom_control", V1_COUNT, 7),
        (V2_MOUNTS, V2_CGROUP, f"fs{V2_CGROUP[3:-1]}/memory.events", V2_COUNT, 2),
        (CONTAINER_MOUNTS, "0::/docker/4f1a/run\n", "fs/run/memory.events", V2_COUNT, 2),
        (V2_MOUNTS, "0::/\n", "proc/vmstat", "pgfault 123\noom_kill 5\n", 5),  # the root has no count of its own
    ],
)
def test_the_count_is_found(tmp_path, mounts, cgroup, file, text, count):
    proc = machine(tmp_path, mounts, cgroup, {file: text})
    found = count_file(42, proc)
    assert found == tmp_path / file
    assert read_count(found) == count


@pytest.mark.parametrize("text", ["oom_kill many\n", "", "oom_kill_disable 0\n"])
def test_where_there_is_none_nothing_is_known(tmp_path, text):
    proc = machine(tmp_path, V1_MOUNTS, V1_CGROUP, {"fs/memory/jobs/a/memory.oom_control": text})
    assert count_file(42, proc) is None
    assert count_file(43, tmp_path / "nowhere") is None
    watch = OomKills(proc)
    watch.look(42)
    assert watch.seen() is None


def test_only_kills_just_before_the_end_count(tmp_path):
    now, file = 0.0, tmp_path / "fs/memory/jobs/a/memory.oom_control"
    proc = machine(tmp_path, V1_MOUNTS, V1_CGROUP, {"fs/memory/jobs/a/memory.oom_control": V1_COUNT})
    watch = OomKills(proc, clock=lambda: now)
    watch.look(42)
    file.write_text(V1_COUNT.replace("7", "8"))  # another process of the same cgroup
    for _ in range(int(WINDOW_SECONDS) + 2):
        now += 1.0
        watch.look(42)
    assert watch.seen() == Kills(8, 8)
    file.write_text(V1_COUNT.replace("7", "9"))  # it is on its way out, and still found
    watch.look(42)
    assert watch.seen() == Kills(8, 9)


def micro(simulation: Simulation, rank: int) -> int:
    return simulation.conductor.durable.settings.ranks[rank].micro_in_force


def test_again_and_again_down_to_one_and_then_it_is_told():
    simulation = group(steps=900).begin().until_step(1)
    seen = []
    for _ in range(3):
        simulation.until(lambda: not simulation.conductor.durable.settings.ranks[1].out)
        simulation.until_step(simulation.conductor.progress.step + 2)
        seen.append(micro(simulation, 1))
        simulation.starve(simulation.ranks[1])
        simulation.until(lambda: bool(simulation.conductor.durable.settings.ranks[1].out))
        simulation.tick(1.1)
    assert seen == [4, 2, 1]
    told = next(each for each in simulation.happened if each.verb == "resize-batch")
    assert told.text == "micro-batch: b 4 → 2 (out of memory, the kernel killed it for memory (oom_kill 0 → 1))"
    assert (told.kind, told.before, told.after, told.by) == ("rank", "4", "2", "auto:out-of-memory")
    assert [simulation.conductor.durable.settings.ranks[rank].micro_batch for rank in (0, 2)] == [4, 4]
    assert any("b ran out of memory at a micro-batch of 1: the kernel killed it" in text for text in texts(simulation))


def test_one_that_dies_while_it_loads_keeps_its_micro_batch():
    simulation = group(steps=400).begin().until_step(2)
    simulation.kill(simulation.ranks[2])
    simulation.until(lambda: bool(simulation.conductor.durable.settings.ranks[2].out))
    simulation.tick(1.1)
    assert simulation.starts == 1
    simulation.ranks[2].load = lambda: None
    simulation.starve(simulation.ranks[2])
    simulation.until(lambda: simulation.conductor.ranks[2].ended)
    assert simulation.conductor.durable.settings.ranks[2].micro_batch == 4


def test_a_run_that_goes_back_begins_with_the_half():
    simulation = group("a", steps=400).begin().until_step(3)
    simulation.starve(simulation.ranks[0])
    simulation.until(lambda: simulation.ended is not None)
    assert simulation.conductor.goes_back
    kept = simulation.journal.settings
    assert (kept.ranks[0].micro_batch, kept.ranks[0].halved_to) == (2, 2)
    then = Settings(1, 12, {0: RankSetting("a", 12, 4)})
    assert share_edits.as_memory_allows(then, kept).ranks[0].micro_in_force == 2
    resized = Settings(9, 12, {0: RankSetting("a", 12, 8)})
    assert share_edits.as_memory_allows(then, resized) == then


def test_a_lone_rank_tries_the_half_in_its_first_step_too():
    simulation = group("a", steps=400)
    simulation.begin()
    simulation.starve(simulation.ranks[0])
    simulation.until(lambda: simulation.ended is not None)
    assert simulation.conductor.progress.step == 0 and simulation.conductor.goes_back
    kept = simulation.journal.settings
    assert (kept.ranks[0].micro_batch, kept.ranks[0].halved_to) == (2, 2)


HUNGRY = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
print("in", flush=True)
sys.stdin = open(sys.argv[2])
sys.stdin.read()
kept = [bytearray(os.urandom(1 << 20)) for _ in range(400)]
"""


def made_cgroup() -> Path | None:
    """A cgroup below this process's own that holds 48 MB; None where none that accounts for memory can be made."""
    file = count_file(os.getpid())
    if file is None or file.name == "vmstat":
        return None
    folder = file.parent / f"trainctl-test-{secrets.token_hex(4)}"
    limit = "memory.limit_in_bytes" if file.name == "memory.oom_control" else "memory.max"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(48 << 20))
        with contextlib.suppress(OSError):  # without swap
            swap = "memory.memsw.limit_in_bytes" if limit == "memory.limit_in_bytes" else "memory.swap.max"
            (folder / swap).write_text(str(48 << 20) if limit == "memory.limit_in_bytes" else "0")
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return folder


@pytest.fixture
def cap(by_hand: bool, tmp_path: Path) -> Iterator[Path]:
    """Where a process puts itself to be held to 48 MB; a plain folder where the machine has no such place."""
    folder = made_cgroup()
    if folder is None:
        assert by_hand
        yield tmp_path
        return
    yield folder

    def is_removed() -> bool:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return not folder.exists()

    wait_for(is_removed)


def by_kernel_too() -> list[bool]:
    """Return whether by hand: always; by the kernel where a process may be capped. Its counts as they were recorded are
    read above on every machine."""
    folder = made_cgroup()
    if folder is None:
        return [True]
    folder.rmdir()
    return [False, True]


@pytest.mark.parametrize("by_hand", by_kernel_too())
def test_a_trainer_that_the_kernel_kills_for_memory_is_told_from_one_that_is_killed(tmp_path, cap, by_hand):
    (tmp_path / "run-1").mkdir()
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    paths, host = RunPaths(tmp_path / "run-1"), TrainerSupervisor()

    async def main() -> rank_ports.Ending:
        context = zmq.asyncio.Context()
        link = TrainerLink(context, lambda: tmp_path)
        host.start(paths, 0, [sys.executable, "-c", HUNGRY, str(cap), str(gate)], ENVIRONMENT)
        port = rank_ports.LocalRank(host, link, paths, "a", 0)
        wait_for(lambda: "in" in host.log_tail(paths, 0, 5))
        pid = wait_for(lambda: port.look().pid)
        if by_hand:
            os.kill(pid, signal.SIGKILL)
        else:
            gate.write_text("go")
        ending = wait_for(lambda: port.look().ending)
        link.close()
        context.destroy(linger=0)
        return ending

    ending = asyncio.run(main())
    if by_hand:
        assert (ending.why, ending.memory) == ("was ended by signal 9", "")
    else:
        assert ending.why == "was ended by signal 9, out of memory"
        assert ending.memory == "the kernel killed it for memory (oom_kill 0 → 1)"
