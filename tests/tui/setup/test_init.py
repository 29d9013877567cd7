"""`trainctl init`: what it writes passes `check`, fits model and machine, and never takes the place of a file."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow
import pyarrow.parquet
import pytest
from tests.conftest import ROOT
from tests.protocol.support.run_files import good, with_value
from tests.trainer.support.chat_model import write_rows
from tests.trainer.support.seq2seq_model import make_seq2seq_model, sentences
from tests.tui.support.cli_calls import assert_one_line, call, call_json

from trainctl.protocol.batch import device_table
from trainctl.protocol.client import local_agents
from trainctl.protocol.config import run_file
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer import demo_assets
from trainctl.tui.setup import init_files, init_probe, init_work
from trainctl.tui.setup.init_files import Answers
from trainctl.tui.setup.init_probe import Interface, Model, ThisMachine

LOOPBACK = Interface("lo", "127.0.0.1", "127.0.0.0/8", True)
ADAPTERS: tuple[init_files.AdapterKind, ...] = ("full", "lora")
CABLE = Interface("en5", "10.0.7.1", "10.0.7.0/24", False)
MAC = ThisMachine("studio", ("mlx",), 192 * 10**9, (LOOPBACK, CABLE))


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of 400 parameters (bfloat16) and text, where the cluster file shall be too."""
    monkeypatch.setenv("TRAINCTL_CLUSTER", str(tmp_path / "cluster.toml"))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [400], "data_offsets": [0, 800]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(800)
    config = {"torch_dtype": "bfloat16", "max_position_embeddings": 128}
    for name, raw in (
        ("My Model/config.json", json.dumps(config).encode()), ("My Model/model.safetensors", weights),
        ("data/a.txt", b"text" * 200),
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    return tmp_path


def words(folder: Path) -> list[str]:
    return ["init", "--model", f"{folder}/My Model", "--data", f"{folder}/data", "--run-file", f"{folder}/run.toml"]


def written(folder: Path, *more: str | Path) -> dict[str, Any]:
    """Return the tables of the run file that `init` writes, which passes `check`."""
    call_json(*words(folder), *more)
    done = call("check", folder / "run.toml")
    assert done.returncode == 0, done.stderr
    tables = tomllib.loads((folder / "run.toml").read_text())
    (folder / "run.toml").unlink()
    return tables


def test_what_it_writes_passes_check(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_CLUSTER", str(inputs / "etc" / "cluster.toml"))
    found = call_json(*words(inputs), "--steps", "40", "--address", "tcp://127.0.0.1:7474")
    assert found["written"] == [str(inputs / "run.toml"), str(inputs / "etc" / "cluster.toml")]
    assert call("check", inputs / "run.toml").returncode == 0
    run = tomllib.loads((inputs / "run.toml").read_text())
    assert (run["run"]["name"], run["run"]["steps"]) == ("my-model", 40)
    assert (run["data"]["tokenizer"], run["data"]["sequence_length"]) == ("bytes", 128)
    assert "examples/run.toml" in (inputs / "run.toml").read_text()
    assert "examples/cluster.toml" in (inputs / "etc" / "cluster.toml").read_text()
    for name, file in (("run", inputs / "run.toml"), ("cluster", inputs / "etc" / "cluster.toml")):
        at = urlsplit(file.read_text().splitlines()[0].removeprefix("#:schema "))
        assert (at.scheme, call("schema", name).stdout) == ("file", Path(unquote(at.path)).read_text()), (
            "editors find it"
        )
    assert {file.name for file in inputs.iterdir()} == {"My Model", "data", "run.toml", "etc"}, "drafts were left"


def test_parts_of_a_data_set_are_known_by_their_files_names(inputs: Path) -> None:
    folder = inputs / "set"
    folder.mkdir()
    for name, text in (("train.txt", "text"), ("valid.txt", "held"), ("test.txt", "test")):
        (folder / name).write_text(text * 200)
    assert "all of it is trained on" in call("check", _over(inputs, folder)).stdout
    (inputs / "run.toml").unlink()
    data = written(inputs, "--data", folder)["data"]
    assert (data["path"], data["held_out_path"]) == (str(folder / "train.txt"), str(folder / "valid.txt"))
    assert "held_out" not in data
    (folder / "train.txt").rename(folder / "train-00000-of-00002.txt")
    (folder / "train-00001-of-00002.txt").write_text("more" * 200)
    assert written(inputs, "--data", folder)["data"]["path"] == str(folder / "train*.txt")


def _over(inputs: Path, data: Path) -> Path:
    """Write a run file, and let it read a whole folder."""
    call_json(*words(inputs))
    file = inputs / "run.toml"
    file.write_text(file.read_text().replace(str(inputs / "data"), str(data)))
    return file


def test_an_agent_on_a_unix_socket_needs_no_cluster_file(inputs: Path) -> None:
    assert call_json(*words(inputs))["written"] == [str(inputs / "run.toml")]
    assert not (inputs / "cluster.toml").exists()
    assert call("check", inputs / "run.toml").returncode == 0


def test_a_file_that_is_there_is_named_and_left(inputs: Path) -> None:
    cluster, run = inputs / "cluster.toml", inputs / "run.toml"
    run.write_text("mine")
    assert_one_line(call(*words(inputs)), 2, str(run), "already exists and is never overwritten")
    assert (run.read_text(), cluster.exists()) == ("mine", False)
    run.unlink()
    cluster.write_text('[nodes.box]\naddress = "tcp://127.0.0.1:7474"\n')
    assert_one_line(call(*words(inputs), "--cluster-file", cluster), 2, str(cluster), "already exists")
    assert not run.exists()
    assert call_json(*words(inputs))["kept"] == str(cluster), "the default cluster file serves any number of runs"
    assert call("check", run).returncode == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--model", "nowhere"], "--model: no such file or folder"),
        (["--data", "empty.txt"], "is empty"),
        (["--address", "tcp://203.0.113.9:7474"], "--address: 203.0.113.9 is not an address of this machine"),
        (["--objective", "sft"], "--objective: sft needs rows with answers"),
    ],
)
def test_what_is_wrong_is_one_line_and_leaves_nothing(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, change: list[str], says: str
) -> None:
    (inputs / "empty.txt").touch()
    monkeypatch.chdir(inputs)
    assert_one_line(call(*words(inputs), *change), 2, says)
    assert_one_line(call("init"), 2, "--model: is required without a terminal to ask on")
    assert not any(file.suffix == ".toml" for file in inputs.iterdir())


def test_on_a_terminal_only_what_is_missing_is_asked(inputs: Path) -> None:
    asked: list[str] = []
    answers = {"Data": str(inputs / "data"), "Steps": "500", "Samples": "48", "Address": "tcp://10.0.7.1:7474"}

    def ask(question: str, default: str) -> str:
        asked.append(question)
        line = question.splitlines()[-1]  # below what was wrong
        return next((answer for begin, answer in answers.items() if line.startswith(begin)), default)

    given = init_work.InitOptions(model=inputs / "My Model", name="first")
    found = init_work.answered(given, MAC, ask, has_cluster=False)
    wanted = Answers(inputs / "My Model", inputs / "data", "first", "tcp://10.0.7.1:7474", 500, 48)
    assert found == wanted
    assert [question.split()[0] for question in asked] == ["Data:", "Train", "Steps,", "Samples", "Address"]
    assert "10.0.7.1 (en5)" in asked[-1]
    answers["Steps"] = "many"
    with pytest.raises(InvalidInputError, match="'many' is not a whole number"):
        init_work.answered(given, MAC, ask, has_cluster=False)


def test_off_loopback_the_interface_and_its_network_are_named(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "m", tmp_path / "d.jsonl", "sft", "tcp://10.0.7.1:7474", kind="samples")
    model = Model(tmp_path / "m", 1_000_000_000, None, True)
    run = init_files.run_tables(answers, model, replace(MAC, has_gpu=True))
    assert run["model"]["dtype"] == "auto"
    assert run["nodes"] == {"studio": {"interface": "en5"}}
    assert (run["data"]["kind"], run["data"]["tokenizer"]) == ("samples", "model")
    assert run["batch"] == {"global": 32, "micro": 2, "micro_tokens": 512}, "of a model without known sizes one fits"
    cluster = init_files.cluster_tables(answers, MAC, "k" * 40)
    assert cluster["trusted_networks"] == ["10.0.7.0/24"]
    assert cluster["nodes"] == {"studio": {"address": "tcp://10.0.7.1:7474", "key": "k" * 40}}


@pytest.mark.parametrize(
    ("capability", "name", "base", "batch", "length"),
    [
        ((8, 9), "NVIDIA GeForce RTX 4090", "nf4", (4, 8), 1024),
        ((6, 1), "NVIDIA GeForce GTX 1080", "nf4", (1, 8), 512),
        ((9, 0), "NVIDIA H100", "stored", ("auto", 16), 1024),
    ],
)
def test_adapters_on_a_card_start_from_its_preset(
    tmp_path: Path, capability: tuple[int, int], name: str, base: str, batch: tuple[int | str, int], length: int
) -> None:
    card = ThisMachine(
        "box", ("torch",), 64 * 10**9, (LOOPBACK,), True, 24 * 10**9, preset=device_table.preset_of(capability, name)
    )
    answers = Answers(tmp_path / "m", tmp_path / "d", "a", "tcp://127.0.0.1:7474", adapter="lora", sequence_length=1024)
    run = init_files.run_tables(answers, Model(tmp_path / "m", 10**9, None, True), card)
    assert (run["model"]["dtype"], run["model"].get("base", "stored")) == ("auto", base)
    assert (run["batch"]["micro"], run["batch"]["global"], run["data"]["sequence_length"]) == (*batch, length)
    run_file.parse(run)
    whole = init_files.run_tables(replace(answers, adapter="full"), Model(tmp_path / "m", 10**9, None, True), card)
    assert "base" not in whole["model"] and whole["data"]["sequence_length"] == 1024
    translator = Model(tmp_path / "m", 10**9, None, True, encodes_prompts=True)
    translating = init_files.run_tables(replace(answers, objective="seq2seq", kind="rows"), translator, card)
    assert "base" not in translating["model"], "seq2seq trains on no quantized base"
    run_file.parse(translating)


def test_remarks_say_what_is_missing_and_adapters_need_no_optimizer_of_the_whole_model(tmp_path: Path) -> None:
    found = init_files.remarks(Model(tmp_path, 70 * 10**9, None, True), replace(MAC, backends=()))
    assert "neither torch nor mlx" in found[0]
    assert "70 B parameters need 1,400 GB" in found[1] and "192 GB" in found[1]
    large = Model(tmp_path, 20 * 10**9, None, True)
    assert "need 400 GB" in init_files.remarks(large, MAC)[0]
    assert init_files.remarks(large, MAC, "lora") == init_files.remarks(Model(tmp_path, 10**9, None, True), MAC) == []


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"a.txt": "text"}, "text"),
        ({"a.jsonl": '\n{"tokens": [1, 2]}\n'}, "samples"),
        ({"a.jsonl": '{"messages": []}\n'}, "rows"),
        ({"d/a.jsonl": "{}", "d/b.parquet": ""}, "rows"),
        ({"d/a.txt": "text", "d/notes.jsonl": "{}"}, "text"),
    ],
)
def test_the_kind_of_data_shows_in_its_files(tmp_path: Path, files: dict[str, str], kind: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    first = next(iter(files)).partition("/")[0]
    assert init_probe.data_kind(tmp_path / first) == kind
    if kind != "samples":
        assert init_probe.data_kind(tmp_path / ("d/*" if first == "d" else "a.*")) == kind
    with pytest.raises(InvalidInputError, match=r"\*\.md matches no \*\.txt, "):
        init_probe.data_kind(tmp_path / "*.md")


def test_a_wrong_answer_is_asked_for_again_and_paths_go_nowhere_up(inputs: Path) -> None:
    asked: list[str] = []
    answers = iter(["nowhere", str(inputs / ".." / inputs.name / "data"), "many", "30"])

    def ask(question: str, default: str) -> str:
        asked.append(question)
        return next(answers) if question.splitlines()[-1].startswith(("Data", "Steps")) else default

    given = init_work.InitOptions(model=inputs / "My Model", name="x", address="tcp://10.0.7.1:7474")
    found = init_work.answered(given, MAC, ask, has_cluster=False)
    assert (found.data, found.steps) == (inputs / "data", 30)
    assert sum("no such file or folder" in question for question in asked) == 1


def test_rows_are_trained_with_adapters_unless_all_weights_are_asked_for(inputs: Path) -> None:
    (inputs / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', "utf-8")
    for option, rate, adapter in (
        ([], 2e-3, {"kind": "lora", "rank": 8, "alpha": 16.0}),
        (["--adapter", "rslora"], 2e-3, {"kind": "rslora", "rank": 8, "alpha": 5.7}),
        (["--objective", "pretrain"], 1e-3, None),
    ):
        run = written(inputs, "--data", inputs / "rows.jsonl", *option)
        assert (run["data"]["kind"], run["data"]["sequence_length"]) == ("rows", 64), "of 95 % of the rows"
        assert (run["optimizer"]["learning_rate"], run.get("adapter")) == (rate, adapter)


@pytest.mark.parametrize(("objective", "rate"), [("dpo", 5e-6), ("orpo", 5e-5), ("simpo", 5e-6)])
def test_pairs_are_trained_as_preferences(inputs: Path, objective: str, rate: float) -> None:
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(80)]
    if objective == "dpo":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), inputs / "pairs.parquet")
        run = written(inputs, "--data", inputs / "pairs.parquet")
    else:
        (inputs / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        run = written(inputs, "--data", inputs / "pairs.jsonl", "--objective", objective)
    assert (run["objective"]["kind"], run["adapter"]["kind"]) == (objective, "lora")
    assert (run["optimizer"]["learning_rate"], run["batch"]["global"]) == (rate, 8), "an eighth of the pairs"
    assert run["batch"]["micro_tokens"] % (2 * run["data"]["sequence_length"]) == 0


def test_pairs_show_in_the_first_file(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"chosen": ["a"], "rejected": ["b"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    (tmp_path / "d.jsonl").write_text('{"chosen": "a", "rejected": null}\n')
    found = [init_probe.has_pairs(path) for path in (tmp_path, *sorted(tmp_path.iterdir()))]
    assert found == [True, True, False, False, False]


@pytest.mark.parametrize(("mean", "samples", "batch"), [(512, None, 32), (100, 80, 8), (100, 5, 4), (32_768, None, 4)])
def test_a_step_has_as_many_samples_as_its_tokens_take(mean: float, samples: int | None, batch: int) -> None:
    assert init_files.global_batch(mean, samples) == batch


def test_values_follow_from_the_model_s_size_and_family() -> None:
    assert [init_files.step_interval(steps) for steps in (1, 12, 1000)] == [2, 2, 100], "ten times, not at every step"
    assert [init_files.adapter_rank(size) for size in (10**7, 10**9, 7 * 10**10)] == [8, 16, 32]
    rate = init_files.learning_rate
    small = [rate("pretrain", "full", random=random, parameters=10**6) for random in (True, False)]
    assert small == [3e-3, 1e-3]
    assert [init_files.held_out(samples) for samples in (165, 6_400, 1_000_000)] == [0.1, 0.01, 6.4e-5]
    assert [rate("pretrain", "full", random=True), rate("sft", "full", random=False)] == [3e-4, 2e-5]
    found = [rate("seq2seq", adapter, random=False, family=family) for family in ("t5", "bart") for adapter in ADAPTERS]
    assert found == [1e-4, 1e-3, 2e-5, 2e-4]


def test_passes_fit_the_memory() -> None:
    facts = ModelFacts("llama", {"w": (1000, 1000)}, 256, 1024, 4, 4, 32_000)
    config = run_file.parse(with_value(good(), "batch", {"global": 32}))
    found = [init_files.micro_batch(config, facts, "torch", gb * 10**9) for gb in (1, 2, 4, 200)]
    assert found == sorted(found) and found[0] < found[-1] == 32


def test_a_model_without_weights_is_trained_from_scratch(inputs: Path) -> None:
    (inputs / "My Model" / "model.safetensors").unlink()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    (inputs / "My Model" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    run = written(inputs, "--steps", "12")
    assert (run["model"]["init"], run["optimizer"]["learning_rate"]) == ("random", 3e-3)
    assert (run["evaluate"]["every_steps"], run["checkpoint"]["every_steps"]) == (2, 2)


def test_a_quantized_model_is_trained_with_adapters_also_on_text(inputs: Path) -> None:
    """Its parameters are counted by their shapes, and need the memory of what is packed."""
    parts = {"weight": ("U32", [64, 8], 4), "scales": ("BF16", [64, 1], 2), "biases": ("BF16", [64, 1], 2)}
    header, end = {}, 0
    for name, (dtype, shape, size) in parts.items():
        begin, end = end, end + size * math.prod(shape)
        header[f"model.layers.0.mlp.up_proj.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    (inputs / "My Model" / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    quantized = {"quantization": {"bits": 4, "group_size": 64}, "model_type": "llama", **sizes}
    (inputs / "My Model" / "config.json").write_text(json.dumps(quantized))
    found = init_probe.model(inputs / "My Model")
    assert (found.parameters, found.quantized_bytes) == (64 * 64, 64 * 64 // 2 + 2 * 4 * 64)
    run = written(inputs, "--steps", "12")
    assert (run["objective"]["kind"], run["adapter"]["kind"]) == ("pretrain", "lora")


def test_an_encoder_decoder_model_learns_completions(inputs: Path) -> None:
    make_seq2seq_model(inputs / "t5")
    write_rows(inputs / "rows.jsonl", sentences(90))
    chosen = ["--model", inputs / "t5", "--data"]
    run = written(inputs, *chosen, inputs / "rows.jsonl")
    assert (run["objective"]["kind"], run["adapter"]["kind"], run["data"]["sequence_length"]) == ("seq2seq", "lora", 64)
    example = tomllib.loads((ROOT / "examples" / "seq2seq.toml").read_text())
    assert run["optimizer"]["learning_rate"] == example["optimizer"]["learning_rate"]
    refused = "--data: an encoder-decoder model needs rows of prompts and completions; the data is text"
    assert_one_line(call(*words(inputs), *chosen, inputs / "data"), 2, refused)
    (inputs / "t5" / "tokenizer.json").unlink()
    refused = "t5 has no tokenizer.json, which an encoder-decoder model needs: save its tokenizer there"
    assert_one_line(call(*words(inputs), *chosen, inputs / "rows.jsonl"), 2, f"--model: {inputs}", refused)


def test_the_node_has_the_name_of_the_agent_that_runs_here(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(inputs / "state"))  # without the agents of other tests
    with local_agents.registered("studio-x", "tcp://127.0.0.1:7999"):
        call_json(*words(inputs))
    nodes = tomllib.loads((inputs / "cluster.toml").read_text())["nodes"]
    assert nodes == {"studio-x": {"address": "tcp://127.0.0.1:7999"}}


def test_a_file_that_comes_meanwhile_is_left_and_the_others_are_taken_back(tmp_path: Path) -> None:
    one, other = tmp_path / "a.toml", tmp_path / "b.toml"
    with pytest.raises(InvalidInputError, match=r"b\.toml"), init_files.drafts({one: "1", other: "2"}):
        other.write_text("theirs")
    assert other.read_text() == "theirs"
    assert [file.name for file in tmp_path.iterdir()] == ["b.toml"]


def test_an_ipv6_address_is_one_of_this_machine_s_and_its_networks_are_trusted() -> None:
    loopback = next(one for one in init_probe.interfaces() if one.address == "::1")
    assert (loopback.network, loopback.is_loopback) == ("::1/128", True)
    there = (
        Interface("en5", "fd00::5", "fd00::/64", False),
        Interface("en5", "fe80::1%en5", "fe80::/64", False),
        CABLE,
    )
    answers = Answers(Path("m"), Path("d"), "a", "tcp://[fe80::1%en5]:7474")
    tables = init_files.cluster_tables(answers, replace(MAC, interfaces=there), None)
    assert tables["trusted_networks"] == ["fd00::/64", CABLE.network]


def test_without_steps_it_writes_epochs_what_to_compare_with_and_a_prompt_of_the_data(inputs: Path) -> None:
    run = written(inputs)
    assert run["run"] == {"name": "my-model", "epochs": 1.0}
    assert (run["evaluate"]["at_start"], run["samples"]["at_start"]) == (True, True)
    assert run["samples"]["prompts"] == ["text" * 8] and run["samples"]["every_steps"] == run["evaluate"]["every_steps"]
    (inputs / "rows.jsonl").write_text(json.dumps({"prompt": "Why?", "completion": " So."}) + "\n")
    assert init_probe.prompt(inputs / "rows.jsonl", "rows") == "Why?"


def test_minutes_become_the_steps_that_fit_by_the_model_s_own_speed(tmp_path: Path) -> None:
    demo_assets.make_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 20_000)
    words = ["init", "--model", tmp_path / "model", "--data", tmp_path / "text.txt", "--batch", "8"]
    steps = []
    for minutes in ("1", "100"):
        file = tmp_path / f"{minutes}.toml"
        done = call(*words, "--run-file", file, "--minutes", minutes)
        assert done.returncode == 0 and f" take about {minutes} min: " in done.stderr, done.stderr
        steps.append(tomllib.loads(file.read_text())["run"]["steps"])
    assert steps[0] * 20 < steps[1], "a hundred times as long, but for other work on the machine"
    refused = call(*words, "--run-file", tmp_path / "both.toml", "--minutes", "1", "--steps", "9")
    assert_one_line(refused, 2, "--minutes: --steps says how long the run is")
