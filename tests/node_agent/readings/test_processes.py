"""Which processes belong to a node's trainers, and what they take."""

import os
import sys
import time
from pathlib import Path

import psutil
from tests.node_agent.support.processes import alive, wait_for

from trainctl.node_agent.readings.processes import ProcessMeter
from trainctl.node_agent.trainers.supervisor import TrainerSupervisor
from trainctl.protocol.record.paths import RunPaths

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
