"""`trainctl data preview` and `data bench` as a person and a script call it."""

import json
import tempfile
from pathlib import Path

import pytest
from tests.tui.support.cli_calls import assert_one_line, call, call_json

from trainctl.protocol.config.names import node_name
from trainctl.protocol.config.run_file import read
from trainctl.protocol.machine.cgroups import usable_cores
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.trainer import demo_assets
from trainctl.trainer.common.reference_cache import write_notes
from trainctl.trainer.data.dataset import open_dataset
from trainctl.tui.setup import data_check

ROWS = [{"prompt": "2+2?\n", "completion": "4"}, {"prompt": "3+3?\n", "completion": "6\x1b[31m"}]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    demo_assets.make_model(tmp_path / "model", demo_assets.llama_config(hidden=32, layers=1, heads=2, intermediate=64))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "a"\nsteps = 9\n[model]\npath = "model"\n[data]\npath = "rows.jsonl"\nkind = "rows"\n'
        'tokenizer = "bytes"\nheld_out = 0\n[batch]\nglobal = 2\nmicro = 2\n[optimizer]\nlearning_rate = 1e-3\n',
        "utf-8",
    )
    return path


def test_a_person_reads_samples_without_their_control_characters_and_a_script_gets_one_object(run_file: Path) -> None:
    done = call("data", "preview", run_file)
    assert done.returncode == 0, done.stderr
    assert "2+2?\n»4<end>«" in done.stdout and "\x1b" not in done.stdout
    found = call_json("data", "preview", run_file, "-n", "1", "--set", "data.held_out=0.5")
    assert (found["samples"], found["held_out"], len(found["shown"])) == (2, 1, 1)
    assert found["shown"][0]["tokens"][0] == ["2", False]


def test_epochs_are_counted_in_steps_by_the_data(run_file: Path) -> None:
    """Two rows in batches of two: each epoch is a step."""
    done = call("check", run_file, "--set", "run.epochs=3")
    assert "no problems found; 3 steps of 2 samples, 3 epochs of 2\n" in done.stdout, done.stderr
    assert "9 steps of 2 samples, 9 epochs of 2\n" in call("check", run_file).stdout
    found = call_json("check", run_file, "--set", "run.epochs=2.5")
    assert (found["config"]["run"]["steps"], found["epoch_samples"]) == (3, 2)
    assert_one_line(call("check", run_file, "--set", "run.epochs=1", "--set", "data.path=/none"), 2, "data.path")


def test_a_growing_file_is_read_as_far_as_it_is_written(run_file: Path) -> None:
    with run_file.with_name("rows.jsonl").open("a") as file:
        file.write('{"text": "half a li')
    growing = ("--set", "data.growing=true")
    done = call("data", "preview", run_file, *growing)
    assert "samples     2 so far; the file still grows" in done.stdout, done.stderr
    assert call_json("data", "preview", run_file, *growing)["growing"] is True
    checked = call("check", run_file, *growing)
    assert checked.returncode == 0
    assert f"{run_file.with_name('rows.jsonl')} still grows: what is written to it later is checked" in checked.stderr


def test_a_growing_file_is_read_on_one_machine(run_file: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    far, near = 'address = "tcp://192.0.2.7:7474"', 'address = "tcp://127.0.0.1:7484"'
    cluster.write_text(f"[nodes.far]\n{far}\n[nodes.near]\n{near}\n", "utf-8")
    done = call("check", run_file, "--set", "data.growing=true", "--cluster", cluster)
    assert_one_line(done, 2, "data.growing: a growing file is read on one machine, but far is at tcp://192.0.2.7:7474")


def test_check_says_how_ranks_on_this_machine_share_its_cores(run_file: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    nodes = "".join(f'[nodes.{node}]\naddress = "ipc://{tmp_path}/{node}.sock"\n' for node in ("one", "two"))
    cluster.write_text(nodes, "utf-8")
    done = call("check", run_file, "--cluster", cluster)
    assert f"one, two share {usable_cores():g} cores: " in done.stdout, done.stderr


def test_data_of_a_glob_are_read_in_order(run_file: Path) -> None:
    rows = run_file.with_name("rows.jsonl")
    rows.with_name("also.jsonl").write_text(json.dumps({"prompt": "1+1?\n", "completion": "2"}) + "\n", "utf-8")
    found = call_json("data", "preview", run_file, "-n", "1", "--set", "data.path=*.jsonl")
    assert (found["samples"], found["shown"][0]["place"]) == (3, f"{rows.with_name('also.jsonl')}: line 1")
    done = call("data", "preview", run_file, "--set", "data.path=no*.jsonl")
    assert_one_line(done, 2, "matches no *.jsonl or *.ndjson or *.parquet file")


def test_what_is_wrong_is_one_line(run_file: Path) -> None:
    assert_one_line(call("data", "preview", run_file.with_name("none.toml")), 2, "no such run file")
    run_file.with_name("rows.jsonl").write_text('{"prompt": "a", "completion": ""}\n', "utf-8")
    assert_one_line(call("data", "preview", run_file), 2, "line 1: completion: is empty")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (f"{json.dumps(ROWS[0])}\n" * 9 + '{"prompt": "a", "completion": ""}\n', "line 10: completion: is empty"),
        (json.dumps({"prompt": "a" * 600, "completion": "b"}), "nothing to learn within its first 513 tokens"),
        ("\n\n", "run.toml: data.path: none of 0 samples has a token to learn"),
    ],
    ids=["late", "long", "blank"],
)
def test_check_reads_all_data_as_a_trainer_does(run_file: Path, rows: str, says: str) -> None:
    run_file.with_name("rows.jsonl").write_text(rows, "utf-8")
    assert_one_line(call("check", run_file), 2, says)


def test_check_says_that_it_has_not_read_large_data(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_check, "MOST_BYTES", 1)
    done = call("check", run_file)
    assert (done.returncode, done.stderr) == (0, f"{data_check.NOT_READ}\n")
    assert call_json("check", run_file)["data_read"] is False


def test_check_says_whether_the_reference_is_cached(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    pairs = [{"prompt": "2+2?", "chosen": "4", "rejected": answer} for answer in ("5", "22")]
    run_file.with_name("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), "utf-8")
    dpo = ["--set", "objective.kind=dpo"]
    kept, size = tmp_path / "state" / node_name() / "data", 4 * (2 + 2 + 2 + 3)
    says = f"computed before step 1 and kept in {kept}"
    assert f"reference: not cached: {says} (0.0 MB)" in call("check", run_file, *dpo).stdout
    assert call_json("check", run_file, *dpo)["references"] == {
        "": {"folder": str(kept), "size_bytes": size, "cached": False}
    }
    adapter_off = call_json("check", run_file, *dpo, "--set", "adapter.kind=lora")
    assert adapter_off["references"] == {}

    config = read(run_file, {"objective.kind": "dpo"})
    dataset = open_dataset(config, tmp_path / "tokens", "run.toml")
    folder = kept / dataset.reference_key(model_digests(tmp_path / "model").whole, "float32").name
    folder.mkdir(parents=True)
    (folder / "values.bin").write_bytes(bytes(size))
    assert_one_line(call("check", run_file, *dpo), 2, "delete the folder to have")
    write_notes(folder, dataset.reference_key(model_digests(tmp_path / "model").whole, "float32"))
    assert f"reference: cached in {kept} (0.0 MB)" in call("check", run_file, *dpo).stdout


def test_a_bench_measures_the_data_and_compares_them_with_a_need(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = call_json("data", "bench", run_file, "--need", "5")
    assert found["source_bytes"] == run_file.with_name("rows.jsonl").stat().st_size
    assert found["tokens"] == len("2+2?\n43+3?\n6\x1b[31m") + 2
    assert found["warm"]["tokens"] % (found["tokens"] - 2) == 0 < found["warm"]["seconds"]
    assert found["need"] == {"tokens_per_second": 5, "source": "given", "detail": ""}
    done = call("data", "bench", run_file, "--need", "5")
    *_, needed, concluded = done.stdout.splitlines()
    assert needed.startswith("training            5  as given by --need")
    assert concluded.startswith("data: ") and "; a step needs 5 tokens/s: data takes 0." in concluded
    assert not list(tmp_path.glob("trainctl-bench-*"))
