"""`trainctl advise` without any agent: profiles in the nodes' folders, what is unknown, and the text."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tests.protocol.support.profiles import profile_of
from tests.tui.support.cli_calls import assert_one_line, call, call_json

from trainctl.protocol.calibration.profile import LinkRate, MatmulRate, Pass, settings_digest, write_profile
from trainctl.protocol.config import run_file
from trainctl.protocol.config.names import node_directory
from trainctl.protocol.machine.devices import resolve_alone
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.trainer import demo_assets

NODES = ("studio", "mbp")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "model"
    demo_assets.make_model(folder, demo_assets.llama_config(hidden=32, layers=1, heads=2, intermediate=64))
    return folder


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file of two nodes whose agents don't run, its model and data, and a cluster file."""
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a text of some length " * 200)
    config: dict[str, Any] = {
        "run": {"name": "small", "steps": 500}, "model": {"path": "model"},
        "data": {"path": "data", "tokenizer": "bytes", "sequence_length": 64}, "batch": {"global": 48, "micro": 8},
        "optimizer": {"learning_rate": 1e-3}, "nodes": {node: {"backend": "torch"} for node in NODES},
    }  # fmt: skip
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(config).encode())
    nodes = {node: {"address": f"tcp://127.0.0.1:{at}", "price_per_hour": 2.0} for at, node in enumerate(NODES, 1)}
    (tmp_path / "cluster.toml").write_bytes(tomli_w.dumps({"nodes": nodes, "currency": "EUR"}).encode())
    return tmp_path


def calibrate(folder: Path, node: str, rate: float, dtype: str = "float32", **fields: Any) -> None:
    """Put a profile of this run into a node's folder."""
    config = run_file.read(folder / "run.toml")
    key = msgspec.structs.replace(
        profile_of().key, model_digest=model_digests(folder / "model").whole, sequence_length=64, dtype=dtype,
        settings=settings_digest(config, node),
    )  # fmt: skip
    others = tuple(other for other in NODES if other != node)
    passes = tuple(Pass(micro, micro / rate, 10**8 + 10**6 * micro) for micro in (1, 2, 4, 8, 16))
    made = profile_of(**{"key": key, "passes": passes, "beside": others, "memory_cap_bytes": 10**9, **fields})
    write_profile(node_directory(node) / "profiles", made)


def words(folder: Path) -> list[str | Path]:
    return ["advise", folder / "run.toml", "--cluster", folder / "cluster.toml"]


def test_profiles_in_the_nodes_folders_are_enough(folder: Path) -> None:
    calibrate(folder, "studio", 20.0)
    calibrate(folder, "mbp", 10.0, links=(LinkRate("studio", 1e9, 1e9),))
    found = call_json(*words(folder))
    together = next(plan for plan in found["plans"] if plan["mode"] == "sync")
    assert together["samples_per_second"] == pytest.approx(30.0, rel=0.02)
    assert together["link_measured"]
    assert together["shares"] == {"studio": 32, "mbp": 16}
    assert together["cost"] == pytest.approx(4.0 * together["expected_seconds"] / 3600)
    assert found["answer"]["nodes"] == [*NODES]
    assert found["run"]["gradient_bytes"] == 4 * found["run"]["trained"]
    assert all(node["calibrated_at"] for node in found["nodes"].values())


def test_a_profile_in_the_type_that_auto_resolves_to_is_of_this_run(folder: Path) -> None:
    """`init` writes such a file, without nodes, and `calibrate` measures it."""
    text = (folder / "run.toml").read_text().split("[nodes.")[0]
    (folder / "run.toml").write_text(text.replace("[data]", 'dtype = "auto"\n\n[data]', 1))
    config = run_file.read(folder / "run.toml")
    assert config.model.dtype == "auto"
    for node in NODES:
        calibrate(folder, node, 20.0, dtype=resolve_alone(config, node, "run.toml").model.dtype)
    plans = call_json(*words(folder))["plans"]
    assert {plan["source"] for plan in plans if plan["mode"] == "separate"} == {"measured"}


def test_a_node_without_a_profile_is_unknown(folder: Path) -> None:
    calibrate(folder, "studio", 20.0, beside=())
    done = call(*words(folder))
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first.startswith("Train on studio alone: 20.00 samples/s")
    assert any(line.startswith("mbp is unknown: ") for line in lines)
    assert call_json(*words(folder))["unknown"].keys() == {"mbp"}


def test_a_profile_of_another_model_is_an_estimate(folder: Path) -> None:
    calibrate(folder, "studio", 20.0, beside=(), matmul=(MatmulRate("float32", 50.0),))
    (folder / "model" / "config.json").write_text((folder / "model" / "config.json").read_text() + " ")
    found = call_json(*words(folder))
    (alone,) = [plan for plan in found["plans"] if plan["nodes"] == ["studio"]]
    assert alone["source"] == "estimated"
    assert found["nodes"]["studio"]["calibrated_at"] is None


def test_the_memory_limit_of_another_run_s_profile_is_not_this_run_s(folder: Path) -> None:
    key = msgspec.structs.replace(profile_of().key, settings="with memory_limit_gb")
    calibrate(folder, "studio", 20.0, beside=(), key=key, memory_cap_bytes=1, matmul=(MatmulRate("float32", 50.0),))
    (alone,) = [plan for plan in call_json(*words(folder))["plans"] if plan["nodes"] == ["studio"]]
    assert alone["fits"] and alone["can_run"]


def test_a_micro_batch_that_does_not_fit_is_answered_with_one_that_does(folder: Path) -> None:
    """108 MB with passes of 8, 104 with 4."""
    calibrate(folder, "studio", 20.0, beside=(), memory_cap_bytes=106 * 10**6)
    lines = call(*words(folder)).stdout.splitlines()
    assert lines[0].startswith("Train on studio alone: 20.00 samples/s")
    assert lines[2] == f"  trainctl run {folder / 'run.toml'} --set nodes=studio --set nodes.studio.micro=4"


def test_commands_name_all_nodes_of_their_plan(folder: Path) -> None:
    """The run file leaves its nodes open: a setting of one would drop the other."""
    (folder / "run.toml").write_text((folder / "run.toml").read_text().split("[nodes.")[0])
    for node in NODES:
        links = (LinkRate("studio", 1e6, 1e6),) if node == "mbp" else ()
        calibrate(folder, node, 20.0, links=links, memory_cap_bytes=106 * 10**6)
    lines = call(*words(folder), "--set", "run.steps=7").stdout.splitlines()
    started = [shlex.split(line)[3:] for line in lines if line.startswith("  trainctl run ")]
    read = [run_file.read(folder / "run.toml", dict(word.split("=", 1) for word in one[1::2])) for one in started]
    answer, *apart = [[*config.nodes] for config in read]
    assert {config.run.steps for config in read} == {7}
    assert (answer, apart) == ([*NODES], [["studio"], ["mbp"]])
    assert {table.micro for config in read for table in config.nodes.values()} == {4}


def test_nothing_is_known_and_the_first_line_says_what_to_do(folder: Path) -> None:
    done = call(*words(folder))
    assert done.returncode == 0, done.stderr
    assert "Run trainctl calibrate" in done.stdout.splitlines()[0]


def test_a_node_that_the_cluster_lacks_is_refused(folder: Path) -> None:
    assert_one_line(call(*words(folder), "--set", "nodes.box.micro=2"), 2, "nodes.box", "not in the cluster file")


def test_rows_are_read_for_their_lengths(folder: Path) -> None:
    (folder / "rows.jsonl").write_text("".join(f'{{"text": "row {"x" * (at % 20)}"}}\n' for at in range(40)))
    more = ["--set", "data.kind=rows", "--set", f"data.path={folder / 'rows.jsonl'}"]
    found = call_json(*words(folder), *more)
    assert 10 < found["run"]["tokens_per_sample"] < 30
    unread = call_json(*words(folder), *more, "--no-data")
    assert unread["run"]["tokens_per_sample"] == 64
    assert "not read" in unread["notes"][0]


def test_a_cluster_that_is_only_described_needs_neither_agents_nor_the_model(folder: Path) -> None:
    """A billion parameters over 1 Gbit/s: alone. Over 10: in step."""
    what_if = folder / "what-if.toml"
    for gigabits, mode in ((1.0, "alone"), (10.0, "sync")):
        rates = {"studio": 1.95, "second": 1.03}
        nodes = {
            name: {"price_per_hour": 1.0, "simulated": {"samples_per_second": rate, "link_gbit": gigabits}}
            for name, rate in rates.items()
        }
        what_if.write_bytes(tomli_w.dumps({"nodes": nodes}).encode())
        run = tomli_w.dumps({
            "run": {"name": "x", "steps": 100}, "model": {"path": "elsewhere"}, "data": {"path": "data"},
            "batch": {"global": 48, "micro": 4}, "optimizer": {"learning_rate": 1e-3},
        })  # fmt: skip
        (folder / "described.toml").write_text(run)
        line = ["advise", folder / "described.toml", "--cluster", what_if, "--parameters", "1000000000"]
        found = call_json(*line)
        assert found["answer"]["mode"] == mode
        assert found["answer"]["source"] == "estimated"
        assert found["answer"]["cost"] is not None
        assert not found["unknown"]


def test_a_described_profile_that_is_missing_is_refused(folder: Path) -> None:
    nodes = {"studio": {"simulated": {"profile": "none.json"}}}
    (folder / "what-if.toml").write_bytes(tomli_w.dumps({"nodes": nodes}).encode())
    run = (folder / "run.toml").read_text().split("[nodes.")[0]
    (folder / "described.toml").write_text(run)
    line = ["advise", folder / "described.toml", "--cluster", folder / "what-if.toml"]
    assert_one_line(call(*line), 2, "simulated.profile", "no such file")
