"""An agent's readings of its machine: the limit of its memory, a closed lid, and the modes of its keys' files."""

from typing import Any

from trainctl.protocol import messages as m
from trainctl.protocol.machine import facts
from trainctl.protocol.machine.facts import lacking


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
