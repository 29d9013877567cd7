"""This machine as an agent reads it: quotas, memory, lid, disks, links and cards."""

import gc
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.node_agent.support.groups import V1_MOUNTS, V2_MOUNTS, machine

from trainctl.protocol import messages as m
from trainctl.protocol.machine import facts, nvidia, speeds
from trainctl.protocol.machine.cgroups import core_pool, cpu_quota
from trainctl.protocol.machine.facts import lacking
from trainctl.protocol.machine.large_imports import import_large
from trainctl.protocol.machine.speeds import ROUNDS, echo, exchange, round_trip


def test_the_tightest_limit_of_the_control_groups_counts(tmp_path: Any) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("0::/user/app\n")
    (root / "user" / "app").mkdir(parents=True)
    (root / "user" / "app" / "memory.max").write_text("max\n")
    (root / "user" / "memory.max").write_text("8000000000\n")
    assert facts.memory_limit(proc, root) == 8 * 10**9
    proc.write_text("4:cpu:/\n5:memory:/box\n")
    (root / "memory" / "box").mkdir(parents=True)
    (root / "memory" / "box" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert facts.memory_limit(proc, root) is None
    assert facts.memory_limit(tmp_path / "none", root) is None


def test_a_lid_by_the_registry_of_a_mac() -> None:
    printed = '+-o IOPMrootDomain  <class IOPMrootDomain>\n    {\n      "AppleClamshellState" = %s\n    }\n'
    assert facts.lid_closed_by_ioreg(printed % "Yes") is True
    assert facts.lid_closed_by_ioreg(printed % "No") is False
    assert facts.lid_closed_by_ioreg("") is None


def test_the_modes_of_key_files_are_those_of_the_disk(tmp_path: Any) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    (folder / "agent.toml").touch(mode=0o600)
    (folder / "agent.toml").chmod(0o640)
    devices = (m.DeviceTypes("torch", "cuda:1", ()), m.DeviceTypes("torch", "cpu", ()), m.DeviceTypes("mlx", "gpu", ()))
    found = facts.gather("box", folder, tmp_path / "no" / "such", devices=devices)
    assert found.compile_lacks == {"cuda": lacking("cuda"), "cpu": lacking("cpu")}
    assert [(one.path, one.mode, one.is_own) for one in found.key_files] == [
        (str(folder), 0o700, True), (str(folder / "agent.toml"), 0o640, True),
    ]  # fmt: skip
    assert found.disk_free_bytes and found.at >= found.received_at


def test_packages_with_our_names_that_are_not_this_program_are_named(tmp_path: Any, monkeypatch: Any) -> None:
    for name, version in (("trainctl", "99.0"), ("trainctl-client", "0.2.0"), ("trainctl-tools", "1.0")):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)  # none of them has our programs
    found = facts.gather("a", tmp_path, tmp_path).namesakes
    assert {"trainctl 99.0", "trainctl-client 0.2.0"} <= {*found} and not any("tools" in name for name in found)


OWN = "fs/cpu/box/cpu.cfs_"
PERIOD = "100000\n"


@pytest.mark.parametrize(
    "mounts, cgroup, files, cores",
    [
        (V2_MOUNTS, "0::/pod/box\n", {"fs/pod/cpu.max": "150000 100000\n", "fs/pod/box/cpu.max": "max 9\n"}, 1.5),
        (V2_MOUNTS, "0::/pod/box\n", {"fs/pod/cpu.max": "max 100000\n", "fs/pod/box/cpu.max": "5000 20000\n"}, 0.25),
        (V2_MOUNTS, "0::/box\n", {}, None),
        (V1_MOUNTS, "4:cpu:/box\n", {f"{OWN}quota_us": "20000\n", f"{OWN}period_us": PERIOD}, 0.2),
        (V1_MOUNTS, "4:cpu:/box\n", {f"{OWN}quota_us": "-1\n", f"{OWN}period_us": PERIOD}, None),
    ],
)  # fmt: skip
def test_the_tightest_quota_counts(tmp_path, mounts, cgroup, files, cores):
    assert cpu_quota("42", machine(tmp_path, mounts, cgroup, files)) == cores


@pytest.mark.needs("linux")
def test_processes_share_cores_if_the_same_group_limits_them(tmp_path):
    """Containers each see their own group as /, with a limit that says the same: its inode differs."""
    pools = []
    for box, quotas in (("a", "50000"), ("b", "50000"), ("c", "max")):
        files = {"fs/pod/cpu.max": "max 100000\n", "fs/pod/box/cpu.max": f"{quotas} 100000\n"}
        proc = machine(tmp_path / box, V2_MOUNTS, "0::/pod/box\n", files, "self")
        pools += [core_pool("self", proc), core_pool("self", proc)]
    assert pools[0] == pools[1] and pools[4] == pools[5] and len({*pools}) == 3


@pytest.mark.needs("linux")
def test_processes_on_other_processors_share_no_cores():
    words = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}]); "
    asked = "from trainctl.protocol.machine.cgroups import core_pool; print(core_pool())"
    found = subprocess.run([sys.executable, "-c", words + asked], capture_output=True, text=True, check=True)
    assert (found.stdout.strip() == core_pool()) == (len(os.sched_getaffinity(0)) == 1)


def test_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "PROBE_BYTES", 9 << 20)  # the last part is shorter than between two waits
    found = speeds.measure_disk(tmp_path)
    assert found.write > 0 and (found.read is None or found.read > 0)
    assert not [*tmp_path.iterdir()]
    # A slow disk moves less in its time.
    monkeypatch.setattr(speeds, "PROBE_SECONDS", 1e-9)
    monkeypatch.setattr(speeds, "PROBE_BYTES", 1 << 60)
    assert speeds.measure_disk(tmp_path).write > 0
    with pytest.raises(FileNotFoundError):
        speeds.measure_disk(tmp_path / "none")


def test_a_module_is_imported_without_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "large_on.py").write_text("import gc\ncollects = gc.isenabled()\nmade = [[] for _ in range(1000)]\n")
    (tmp_path / "large_bad.py").write_text("1 / 0\n")
    gc.unfreeze()
    import_large("large_on")
    assert gc.isenabled() and not sys.modules["large_on"].collects
    assert gc.get_freeze_count() > 1000, "later collections skip what it made"
    with pytest.raises(ZeroDivisionError):
        import_large("large_bad")
    assert gc.isenabled()
    (tmp_path / "large_off.py").write_text("")
    gc.disable()
    try:
        import_large("large_off")
        assert not gc.isenabled()
    finally:
        gc.enable()


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


def received(connection: socket.socket) -> int:
    return sum(len(part) for part in iter(lambda: connection.recv(1 << 20), b""))


def test_both_directions_are_measured_at_once(ends: Ends) -> None:
    with ThreadPoolExecutor(2) as threads:
        assert min(threads.map(lambda end: exchange(end, 0.3), ends)) > 0


def test_a_side_sends_and_receives_no_more_than_its_bound(ends: Ends) -> None:
    near, far = ends
    most = 3_000_001

    def send_until_closed() -> None:
        while True:
            far.sendall(bytes(1 << 20))

    with ThreadPoolExecutor(2) as threads:
        sent, counted = threads.submit(send_until_closed), threads.submit(received, far)
        assert exchange(near, 60, most) > 0  # the bound ends it, not the time
        assert counted.result() == most
        near.close()
        assert isinstance(sent.exception(), OSError)


def test_a_round_trip_is_timed_and_ends_with_its_last_byte(ends: Ends) -> None:
    near, far = ends
    with ThreadPoolExecutor(1) as threads:
        echoed = threads.submit(echo, far)
        assert round_trip(near) > 0
        echoed.result()
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(ROUNDS)
    far.close()
    with pytest.raises(OSError):
        round_trip(near)


def test_silence_is_no_rate(ends: Ends) -> None:
    near, far = ends
    far.shutdown(socket.SHUT_WR)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(received, far)
        with pytest.raises(ValueError, match="no data arrived"):
            exchange(near, 0.1)
        near.close()


A, B = "GPU-5d1f3d3c-0c3f-8a5b-4a63-1f0f2f6b7c11", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
UNEQUAL = f"8.6, {A}\n6.1, {B}\n"
OLD_DRIVER = 'Field "compute_cap" is not a valid field to query.\n\n'


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (UNEQUAL, (nvidia.Card((8, 6), A), nvidia.Card((6, 1), B))), (f"12.0, {A}\r\n", (nvidia.Card((12, 0), A),)),
        (f"[N/A], {A}\n8.6, {B}\n", ()), ("No devices were found\n", ()), (OLD_DRIVER, ()),
    ],
)  # fmt: skip
def test_cards_are_read_from_nvidia_smi(said: str, found: tuple[nvidia.Card, ...]) -> None:
    assert nvidia.parse_cards(said) == found


@pytest.mark.parametrize(("status", "cards", "version"), [(0, nvidia.parse_cards(UNEQUAL), "570.86.10"), (2, (), "")])
def test_nvidia_smi_is_asked_where_nvmls_module_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, cards: tuple[nvidia.Card, ...], version: str
) -> None:
    program = tmp_path / "nvidia-smi"
    wanted = "--query-gpu=compute_cap,uuid --format=csv,noheader,nounits"
    other = "echo 570.86.10; echo 570.86.10"  # a line for each device
    program.write_text(f'#!/bin/sh\nif [ "$*" = "{wanted}" ]; then echo "{UNEQUAL}"; else {other}; fi\nexit {status}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it weren't installed
    assert nvidia.cards.__wrapped__() == cards
    assert nvidia.driver_version.__wrapped__() == version
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert nvidia.cards.__wrapped__() == ()


def test_devices_are_those_of_cuda_visible_devices_in_its_order() -> None:
    by_uuid = {"GPU-10aa": "a", "GPU-8932f937-d72c": "b", "GPU-89aa": "c"}
    shown = {
        "": "", "0": "a", "2,1": "cb", "0,2,-1,1": "ac", "7": "", " 1 , 0": "ba", "GPU-8932f937": "b", "GPU-89": "",
        "GPU-1,0": "a", "GPU-89aa,0": "ca", "1,1": "b", "MIG-1/2/0": "", "nonsense": "",
    }  # fmt: skip
    assert {chosen: "".join(nvidia.visible(chosen, ["a", "b", "c"], by_uuid)) for chosen in shown} == shown
