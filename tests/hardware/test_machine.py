"""The machine itself: readings while a rank trains, sums through each network interface, an agent as a service, and
recorded outputs of the system's programs for tests to replay elsewhere."""

import contextlib
import os
import platform
import secrets
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.lacking import find
from tests.waiting import HANG_SECONDS, until

from trainctl.node_agent.services.managed_service import Service, call, manager_here, own_command, property_list, unit
from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.local_agents import LocalAgent, running
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.backends.backend import Device
from trainctl.trainer.backends.memory import SampledMemory
from trainctl.trainer.collective import engines
from trainctl.trainer.collective.group import Tail
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout, layout_digest

SHAPE = (1024, 1024)
"""Shape of the float32 numbers that two ranks sum."""
RECORDED = {
    "Darwin": (
        "sw_vers", "sysctl hw machdep.cpu", "notifyutil -g com.apple.system.thermalpressurelevel", "pmset -g therm",
        "pmset -g batt", "pmset -g", "ioreg -r -k AppleClamshellState -d 1", "vm_stat", "memory_pressure -Q",
        "sysctl vm.swapusage", "sysctl iogpu", "system_profiler -json -detailLevel mini SPDisplaysDataType",
        "netstat -s -p tcp", "macmon pipe -s 3", "launchctl version",
    ),
    "Linux": (
        "nvidia-smi --query-gpu=name,driver_version,power.draw,temperature.gpu,clocks.sm,memory.total --format=csv",
        "systemctl --version", "systemctl --user is-system-running", "lscpu",
        "cat /proc/pressure/cpu /proc/pressure/memory /proc/pressure/io",
    ),
}  # fmt: skip
"""Commands that only read and need no root, by system."""
MAX_CHARACTERS = 20_000


def test_readings_are_plausible_while_a_rank_trains(agent, run_config, figure):
    with agent.client() as client:
        client.send("start-run", {"config": run_config(run__steps=1_000_000)}, wait="accepted")
        wait_for_step(client, 2)
        host = until(lambda: _with_trainer(client.ask(m.SnapshotRequest, 0).node.host), what="a reading of the trainer")
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
    figure(cpu_percent=host.cpu_percent, temperature_celsius=host.temperature_celsius, values=host.values)
    assert 0 <= host.cpu_percent <= 100
    assert 0 < host.memory_used_bytes <= host.memory_total_bytes
    assert 0 < host.disk_free_bytes <= host.disk_total_bytes
    assert host.temperature_celsius is None or 1 < host.temperature_celsius < 125


def _with_trainer(host: m.HostReading | None) -> m.HostReading | None:
    roles = {process.role for process in host.processes} if host is not None else set()
    return host if {"agent", "trainer"} <= roles else None


class Numbers:
    """The part of a backend that a group needs: arrays to sum. They are integers, whose sum is exact."""

    device = Device("cpu", SampledMemory(lambda: 0, None))

    def __init__(self, rank: int) -> None:
        self.values = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE) * (rank + 1)

    def copy_out(self, part, arrays):
        np.copyto(arrays["weight"], self.values)

    def copy_in(self, part, arrays):
        self.values = arrays["weight"].copy()


@pytest.mark.parametrize("engine", engines.installed())
def test_two_ranks_sum_through_each_interface(fork_servers, engine, figure):
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    every = psutil.net_if_addrs().items()
    names = [name for name, found in every if name in up and any(one.family == socket.AF_INET for one in found)]
    assert names, "not even loopback has an IPv4 address"
    for name in names[:5]:
        for values in _sums(engine, name, fork_servers):
            assert np.array_equal(values, Numbers(0).values + Numbers(1).values), name
    figure(interfaces=len(names))


def _sums(engine, interface, standby):
    layout = Layout({"weight": SHAPE}, layout_digest({"weight": SHAPE}))
    generation = m.Generation(1, 1)
    with contextlib.ExitStack() as held:
        ranks = [Membership(rank, layout, GroupTable(), interface, None, standby=standby) for rank in range(2)]
        for rank in ranks:
            held.callback(rank.leave)
        offer = m.Offer(run="r", generation=generation, engine=engine)
        form = m.Form(
            run="r", generation=generation, engine=engine, ranks=(0, 1), layout_digest=layout.digest,
            endpoints=tuple(rank.offer(offer) for rank in ranks), deadline_seconds=HANG_SECONDS,
        )  # fmt: skip
        groups = [rank.form(form) for rank in ranks]
        for group in groups:
            held.callback(group.close)
        with ThreadPoolExecutor(len(groups)) as threads:
            return [*threads.map(_sum, groups, range(len(groups)))]


def _sum(group, rank):
    group.complete()
    group.formed()
    numbers = Numbers(rank)
    group.all_reduce(numbers, Tail({"loss": 0.0}, {"loss": 1.0}, {}, 1, 0))
    group.deliver(numbers)
    return numbers.values


# ---------------------------------------------------------------- an agent as a service


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An agent under this user's service manager, with a name that nothing else has; the name of its node."""
    node = f"hardware-{secrets.token_hex(4)}"
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    kept = ("HOME", "PATH", "TRAINCTL_STATE", "PYTHONUSERBASE", "XDG_RUNTIME_DIR")
    wanted = Service(
        command=(*own_command(), "run", "--name", node, "--state", str(tmp_path)), scope="user", user="",
        logs=tmp_path / node / "logs",
        environment=tuple(sorted((name, os.environ[name]) for name in kept if name in os.environ)),
    )  # fmt: skip
    with (_under_systemd if manager_here() == "systemd" else _under_launchd)(wanted, tmp_path):
        yield node


@contextlib.contextmanager
def _under_systemd(service: Service, _folder: Path) -> Iterator[None]:
    name = f"trainctl-{service.logs.parent.name}.service"
    file = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}") / "systemd/user" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(unit(service))
    try:
        call(("systemctl", "--user", "daemon-reload"))
        call(("systemctl", "--user", "start", name))
        yield
    finally:
        for words in (("kill", "-s", "KILL", name), ("stop", name)):
            subprocess.run(["systemctl", "--user", *words], timeout=HANG_SECONDS, check=False)
        file.unlink()


@contextlib.contextmanager
def _under_launchd(service: Service, folder: Path) -> Iterator[None]:
    label, domain = f"trainctl.{service.logs.parent.name}", f"gui/{os.getuid()}"
    file = folder / f"{label}.plist"
    file.write_bytes(property_list(service, label))
    call(("launchctl", "bootstrap", domain, str(file)))
    try:
        yield
    finally:
        call(("launchctl", "bootout", f"{domain}/{label}"))


@pytest.mark.needs("user-services")
def test_a_killed_service_is_started_again(service: str, figure) -> None:
    first = until(lambda: _answering(service), HANG_SECONDS, "the agent")
    psutil.Process(first.pid).kill()
    again = until(lambda: (agent := _answering(service)) and agent.pid != first.pid and agent, HANG_SECONDS, "another")
    figure(manager=manager_here(), restarted=again.pid != first.pid)


def _answering(node: str) -> LocalAgent | None:
    for agent in (agent for cluster in running() for agent in cluster if agent.node == node):
        with contextlib.suppress(TrainctlError), BlockingClient(agent.address, by="hardware") as client:
            return agent if client.ask(m.FactsRequest).node == node else None
    return None


# ---------------------------------------------------------------- outputs to replay


@pytest.mark.parametrize("command", RECORDED.get(platform.system(), ()))
def test_a_program_s_output_is_recorded(command: str, figure) -> None:
    program, *words = command.split()
    path = find(program)
    if path is None:
        figure(output=f"{program} is not on PATH")
        return
    done = subprocess.run([path, *words], capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    figure(status=done.returncode, output=(done.stdout + done.stderr)[:MAX_CHARACTERS])
    assert done.stdout or done.stderr
