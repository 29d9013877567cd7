"""The doctor's judgement over facts: each trap has a line, a level, and what to do; and what is well is said so."""

import dataclasses
from ipaddress import IPv4Network
from typing import Any

import msgspec
import pytest
from tests.protocol.support.run_files import good, with_value
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file, run_tables
from trainctl.protocol.config.variables import MEANINGS, VARIABLES
from trainctl.tui.cli import doctor
from trainctl.tui.doctor.check_cluster import of_disks, of_files
from trainctl.tui.doctor.findings import ClusterFacts, Finding, Hashed, Look, Measured, Trouble
from trainctl.tui.doctor.probe import Round

GB = 10**9
WARNED_BY_VALUE = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO"}
WELL: Any = msgspec.structs.replace(
    examples.EXAMPLES["agent to client"]["facts"], environment={}, libraries={"torch": "2.13.0", "mlx": "0.32.0"}
)
ADDRESS = "tcp://10.0.7.1:7474"


def look(name: str = "studio", address: str = ADDRESS, **changes: Any) -> Look:
    """A node that is well but for `changes` of its facts."""
    return Look(name, address, msgspec.structs.replace(WELL, **changes), live_address="tcp://10.0.7.1:7475",
                round_trip_seconds=0.001, is_here=True)  # fmt: skip


def judged(*looks: Look, **more: Any) -> list[Finding]:
    return list(doctor.findings(ClusterFacts(WELL, looks, **more)))


def told(level: str, *looks: Look, **more: Any) -> str:
    """The one line of that level."""
    (finding,) = [finding for finding in judged(*looks, **more) if finding.level == level]
    return doctor.line(finding)


def test_a_node_that_is_well_has_no_word_said_against_it() -> None:
    found = judged(look())
    assert {finding.level for finding in found} == {"ok"}
    assert [finding.subject for finding in found] == [
        "reach", "port", "version", "keys", "disk", "memory", "files", "compiler", "power",
    ]  # fmt: skip


def test_a_switch_that_is_0_is_off() -> None:
    for value, says in (("0", "leaves InfiniBand on in NCCL"), ("1", "turns off InfiniBand in NCCL")):
        (found,) = [one for one in judged(look(environment={"NCCL_IB_DISABLE": value})) if one.subject == "environment"]
        assert f"NCCL_IB_DISABLE={value}: {says}" in found.text


CUDA_LACKS: dict[str, tuple[str, ...]] = {"cuda": ("triton", "C compiler"), "cpu": ()}


def test_what_compiling_lacks_is_said_by_device() -> None:
    (found,) = [one for one in judged(look(compile_lacks=CUDA_LACKS)) if one.subject == "compiler"]
    assert found.level == "ok"
    assert "can't be used on cuda: no triton and no C compiler" in found.text and "can be used on cpu" in found.text


@pytest.mark.parametrize(
    ("model", "node", "fails"),
    [
        ({}, {"compile": "max-autotune"}, True),
        ({"compile": "default"}, {"compile": "off"}, False),
        ({"compile": "default"}, {"device": "cpu"}, False),
        ({"compile": "default"}, {"device": "cuda:1"}, True),
        ({"compile": "default"}, {"backend": "mlx"}, False),
    ],
)
def test_a_run_that_compiles_needs_what_the_nodes_device_needs(
    model: dict[str, str], node: dict[str, str], fails: bool
) -> None:
    run = run_file.parse(with_value(with_value(good(), "nodes.studio", node), "model", good()["model"] | model))
    linux = judged(look(compile_lacks=CUDA_LACKS, system="Linux"), run=run)
    found = [one.level for one in linux if "there is no triton and no C compiler" in one.text]
    assert found == ["fail"] * fails
    unknown = judged(look(compile_lacks=None), run=run)
    assert not any(one.level == "fail" and one.subject == "compiler" for one in unknown)


KEYS = WELL.keys_folder
OTHERS_FILE = m.FileFacts(path=f"{KEYS}/agent.toml", mode=0o644, is_own=True)
FOREIGN_FILE = m.FileFacts(path=f"{KEYS}/agent.toml", mode=0o600, is_own=False)


@pytest.mark.parametrize(
    ("level", "change", "says"),
    [
        ("fail", {"python": "3.10.4"}, ("Python 3.10.4", "too old")),
        ("warn", {"libraries": {}}, ("neither torch nor mlx", "pip install")),
        ("warn", {"lost_sockets": ("/run/user/7/trainctl-7-ab/agent.sock",)}, ("/run/user/7", "enable-linger")),
        ("fail", {"namesakes": ("trainctl 99.0",)}, ("trainctl 99.0", "another project's", "pip uninstall trainctl ")),
        ("fail", {"namesakes": ("trainctl-client 0.2.0",)}, ("pip uninstall trainctl-client there",)),
        ("fail", {"key_files": ()}, ("which TCP needs", "trainctl keys new")),
        ("fail", {"key_files": (OTHERS_FILE,)}, ("other users can access", "(mode 0644)", "chmod 600")),
        ("fail", {"key_files": (FOREIGN_FILE,)}, ("belongs to another user", "chown")),
        ("fail", {"disk_free_bytes": 3 * GB}, ("3 GB of 2,000 GB free", "remove old run directories")),
        ("warn", {"memory_limit_bytes": 64 * GB}, ("limits it to 64.0 GB of 192.0 GB", "memory_limit_gb")),
        ("fail", {"open_files": 250}, ("at most 250 open files", "ulimit -n")),
        ("warn", {"on_battery": True, "battery_percent": 71.0}, ("on battery (71 %)", "plug it in")),
        ("warn", {"lid_closed": True}, ("the lid is closed", "open the lid")),
        ("warn", {"environment": {"MLX_METAL_PREALLOCATE": "1"}}, ("no MLX release reads it", "unset it")),
        ("warn", {"environment": {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.0"}}, ("without limit",)),
    ],
)  # fmt: skip
def test_each_fault_of_a_machine_has_its_line(level: str, change: dict[str, Any], says: tuple[str, ...]) -> None:
    line = told(level, look(**change))
    assert line.startswith("studio: ")
    assert all(text in line for text in says), line


def test_each_variable_that_advise_warns_of_is_reported_with_the_same_text() -> None:
    warned = {one.name: one.text for one in VARIABLES if one.use != "set" and one.name not in WARNED_BY_VALUE}
    assert {name: MEANINGS[name].text for name in warned} == warned
    assert {MEANINGS[name].level for name in warned} == {"warn"}


@pytest.mark.parametrize(
    ("kind", "system", "says"),
    [
        ("refused", "Linux", ("nothing listens at that address", "trainctl-agent run --name mbp")),
        ("no-route", "Darwin", ("EHOSTUNREACH", "Local Network Privacy", "LaunchDaemon")),
        ("timeout", "Linux", ("a firewall drops the connection",)),
        ("not-authorised", "Linux", ("refuses this machine's key", "trainctl keys authorize")),
    ],
)
def test_what_keeps_a_node_out_of_reach_is_named(kind: Any, system: str, says: tuple[str, ...]) -> None:
    here = msgspec.structs.replace(WELL, system=system)
    away = Look("mbp", "tcp://10.0.7.2:7474", trouble=Trouble(kind, "so it is"))
    lines = [doctor.line(one) for one in doctor.findings(ClusterFacts(here, (look(), away))) if one.level == "fail"]
    assert len(lines) == 1 and lines[0].startswith("mbp: reach: tcp://10.0.7.2:7474: ")
    assert all(text in lines[0] for text in says), lines


def test_a_port_that_publishes_and_cannot_be_reached_fails() -> None:
    away = Look("mbp", ADDRESS, WELL, live_trouble=Trouble("timeout", ""), live_address="tcp://10.0.7.1:7475",
                round_trip_seconds=0.08)  # fmt: skip
    found = [finding for finding in judged(look(), away) if finding.level != "ok"]
    assert [(one.level, one.subject) for one in found] == [("warn", "reach"), ("fail", "port")]
    assert "80.0 ms: too slow for efficient training" in found[0].text and "tcp://10.0.7.1:7475" in found[1].text


def test_versions_that_differ_are_named_with_their_nodes() -> None:
    other = look("mbp", libraries={"torch": "2.9.1", "mlx": "0.32.0"}, version="0.2.0")
    found = [doctor.line(one) for one in judged(look(), other) if one.level in ("warn", "fail")]
    assert [line.split(":")[1].split()[0] for line in found] == ["trainctl", "torch"]
    assert "0.1.0 on studio; 0.2.0 on mbp" in found[0] and "pip install" not in found[0], "no index has it"
    assert "pip install 'torch==2.13.0'" in found[1], "2.13 is newer than 2.9"


@pytest.mark.parametrize(
    ("offset", "trip", "level"), [(0.2, 0.01, "ok"), (-4.0, 0.01, "warn"), (90.0, 0.01, "fail"), (0.9, 1.0, "ok")]
)
def test_a_clock_is_judged_by_what_is_sure_of_its_offset(offset: float, trip: float, level: str) -> None:
    away = Look("mbp", ADDRESS, WELL, round_trip_seconds=trip, clock_offset_seconds=offset)
    (clock,) = [one for one in judged(look(), away) if one.subject == "clock"]
    assert clock.level == level


def test_the_offset_is_that_of_the_round_trip_s_middle() -> None:
    found = Round(sent_at=100.0, received_at=107.01, answered_at=107.06, got_at=100.07)
    assert found.offset_seconds == pytest.approx(7.0)
    assert found.trip_seconds == pytest.approx(0.02)


def run_with(**nodes: dict[str, Any]) -> run_tables.RunFile:
    return run_file.parse(with_value(good(), "nodes", nodes))


@pytest.mark.parametrize(
    ("interface", "trusted", "level", "says"),
    [
        ("en5", ("10.0.7.0/24",), "ok", "en5 has 10.0.7.1/24"),
        ("en5", ("10.0.8.0/24",), "fail", "outside trusted_networks"),
        ("en5", (), "fail", 'trusted_networks = ["10.0.7.0/24"]'),
        ("en9", ("10.0.7.0/24",), "fail", "there is no interface en9"),
        ("", ("10.0.7.0/24",), "fail", '[nodes.studio] interface = "en5"'),
        ("utun0", (), "fail", "utun0 is down"),
    ],
)
def test_the_interface_of_the_sums(interface: str, trusted: tuple[str, ...], level: str, says: str) -> None:
    down, bare = m.InterfaceFacts("utun0", False, ("10.9.0.1/24",)), m.InterfaceFacts("awdl0", True, ())
    config = run_with(studio={"interface": interface}, mbp={})
    networks = tuple(IPv4Network(one) for one in trusted)
    here = look(interfaces=(*WELL.interfaces, down, bare))
    (found,) = [one for one in judged(here, run=config, trusted_networks=networks) if one.subject == "interface"]
    assert found.level == level
    assert says in doctor.line(found)


def hashed(node: str, path: str, digest: str, what: Any = "model", problem: str = "", **files: str) -> Hashed:
    listed = tuple(m.FileDigest(name.replace("_", "."), own) for name, own in files.items())
    return Hashed(node, what, path, m.Digests(rid="", digest=digest, files=listed, problem=problem))


def test_files_that_differ_are_named_with_the_line_that_fixes_it() -> None:
    looks = tuple(Look(name, f"tcp://{name}.local:7474", WELL) for name in ("studio", "mbp", "mini"))
    found = list(of_files(ClusterFacts(WELL, looks, hashed=(
        hashed("studio", "/models/mine", "a" * 64, config_json="1", model_safetensors="2"),
        hashed("mbp", "/Users/anna/my model", "b" * 64, config_json="1", model_safetensors="3"),
        hashed("mini", "/models/mine", "a" * 64, config_json="1", model_safetensors="2"),
        hashed("studio", "/data/x.jsonl", "c" * 64, "data", x_jsonl="7"),
        hashed("mbp", "/data/x.jsonl", "", "data", problem="/data/x.jsonl: No such file or directory"),
    ))))  # fmt: skip
    lines = [doctor.line(one) for one in found if one.level == "fail"]
    assert len(lines) == 2
    assert "mbp: model: /Users/anna/my model differs from studio's in model.safetensors" in lines[0]
    assert lines[0].endswith("on mbp: rsync -av --checksum studio.local:/models/mine/ '/Users/anna/my model/'")
    assert "No such file or directory" in lines[1]
    assert lines[1].endswith("on mbp: rsync -av --checksum studio.local:/data/x.jsonl /data/x.jsonl")
    assert next(one.text for one in found if one.level == "ok").startswith("identical on studio, mini")


def test_what_no_run_on_a_node_names_yet_is_a_warning_and_no_difference() -> None:
    unread = m.Digests(rid="", digest="", problem="no run on mbp has this model", named=False)
    looks = tuple(Look(name, f"tcp://{name}.local:7474", WELL) for name in ("studio", "mbp"))
    found = [*of_files(ClusterFacts(WELL, looks, hashed=(
        hashed("studio", "/models/mine", "a" * 64, config_json="1"), Hashed("mbp", "model", "/models/mine", unread),
    )))]  # fmt: skip
    assert [(one.level, one.node) for one in found] == [("warn", "mbp"), ("ok", "")]
    assert "cluster sync" in found[0].do
    disk = m.Disk(rid="", folder="/d", problem="no run on mbp has this cache_path", named=False)
    (measured,) = of_disks(ClusterFacts(WELL, (), measured=(Measured("mbp", "/d", disk),)))
    assert (measured.level, measured.text) == ("ok", "/d isn't measured: no run on mbp has this cache_path")


@pytest.mark.parametrize(("write", "read", "level", "says"), [
    (400e6, 2e9, "ok", "token caches in /d: writes 400 MB/s, reads 2,000 MB/s"),
    (12e6, 300e6, "warn", "writes 12 MB/s, reads 300 MB/s: tokenizing and training may wait for it"),
])  # fmt: skip
def test_a_slow_disk_of_token_caches_is_named(write: float, read: float | None, level: str, says: str) -> None:
    disk = m.Disk(rid="", folder="/d", write_bytes_per_second=write, read_bytes_per_second=read)
    (found,) = of_disks(ClusterFacts(WELL, (), measured=(Measured("mbp", "", disk),)))
    assert (found.level, found.subject) == (level, "disk")
    assert says in doctor.line(found)


def test_a_disk_that_cannot_be_measured_fails_only_if_the_run_names_it() -> None:
    disk = m.Disk(rid="", folder="/d", problem="/d: Permission denied")
    own, named = of_disks(ClusterFacts(WELL, (), measured=(Measured("a", "", disk), Measured("b", "/d", disk))))
    assert (own.level, own.do, named.level) == ("warn", "", "fail")
    assert "can't be measured: /d: Permission denied" in own.text
    assert named.do == "set [nodes.b] cache_path to a folder where the agent can write"


def test_a_growing_file_is_not_compared() -> None:
    config = run_with(studio={})
    data = msgspec.structs.replace(config.data, path="/d.jsonl", kind="rows", growing=True)
    (found,) = of_files(ClusterFacts(WELL, (), run=msgspec.structs.replace(config, data=data)))
    assert (found.level, found.text) == ("ok", "/d.jsonl may still grow, so it isn't compared")


def test_a_model_by_its_hugging_face_id_is_downloaded_not_copied() -> None:
    looks = tuple(Look(name, f"tcp://{name}.local:7474", WELL) for name in ("studio", "mbp"))
    scene = ClusterFacts(WELL, looks, hashed=(
        hashed("studio", "org/name", "a" * 64, config_json="1"),
        hashed("mbp", "org/name", "", problem="not in the Hugging Face cache"),
    ))  # fmt: skip
    (found,) = (doctor.line(one) for one in of_files(scene) if one.level == "fail")
    assert "mbp: model: org/name can't be read: not in the Hugging Face cache" in found
    assert found.endswith("on that machine, run: hf download org/name")


def test_a_failing_alert_hook_is_named() -> None:
    broken = dataclasses.replace(look(), hook_problem="alert command failed: no route")
    found = [finding for finding in judged(broken) if finding.subject == "alerts"]
    assert [(finding.level, finding.node) for finding in found] == [("warn", "studio")]
    assert found[0].text.startswith("alert command failed: no route")
