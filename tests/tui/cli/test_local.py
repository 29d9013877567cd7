"""Tests of what the command line decides by itself: no agent is asked, the exit code is 2 and one line says what is
wrong."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tui.support.cli_calls import COMMAND, ENVIRONMENT, assert_one_line, call_process
from tests.waiting import HANG_SECONDS

from trainctl.protocol.config import names
from trainctl.tui.cli import agent_call
from trainctl.tui.cli import main as cli

NOBODY = "tcp://127.0.0.1:1"
"""Privileged, and nothing listens at that address."""
Main = Callable[..., tuple[int, str, str]]

RUN_FILE = """
[run]
name = "small"
steps = 10
[model]
path = "model"
[data]
path = "data"
tokenizer = "bytes"
[batch]
global = 4
micro = 2
[optimizer]
learning_rate = 1e-3
"""


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Main:
    """`main` in this process: its exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("TRAINCTL_CONNECT", raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(list(words))
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    for name, raw in (
        ("model/config.json", b"{}"), ("model/model.safetensors", b"\2\0\0\0\0\0\0\0{}"), ("data/a.txt", b"text" * 200)
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


BAD = [
    (["frobnicate"], "No such command 'frobnicate'"),
    (["send"], "Missing argument 'VERB'"),
    (["send", "frobnicate"], "unknown verb 'frobnicate'; the verbs are start-run, resize-batch"),
    (["send", "resize-batch", "micro=0"], "micro: must be a whole number of at least 1"),
    (["send", "set-l", "1"], "unknown verb 'set-l'; did you mean set-lr?"),
    (["send", "resize-batch", "micro=8", "macro=1"], "resize-batch has no argument 'macro'; did you mean micro?"),
    (["send", "resize-batch", "micro=8", "x=1"], "x: resize-batch has no argument 'x'; it takes micro"),
    (["send", "profile", "setps=1"], "setps: profile has no argument 'setps'; did you mean steps?"),
    (["send", "undo", "set-lr"], "undo: takes no arguments"),
    (["send", "resize-batch", "micro=8", "8"], "'8' must be written as key=value"),
    (["send", "pause", "--node", "studio"], "node: pause applies to the whole run"),
    (["send", "set-lr", "value=nan"], "value"),
    (["send", "pause", "--id", "7"], "--id: '7' is not a UUID"),
    (["send", "pause", "--if-plan", str(2**64)], "--if-plan: is larger than any plan version"),
    (["send", "pause", "--timeout", "0"], "--timeout"),
    (["send", "start-run", "config=run.toml"], "must be written as config=@run.toml"),
    (["send", "start-run", "config=@none.toml"], "none.toml: no such run file"),
    (["run"], "give RUN.toml to start a run, --branch RUN@STEP to branch off one, or --resume RUN to resume one"),
    (["run", "--branch", "a@0", "--connect", "tcp://127.0.0.1:9"], "branch: 'a@0' must be RUN@STEP, with the step of"),
    (["run", "--resume", "b", "--set", "run.steps=1"], "a resumed run keeps its own run file: leave out --set"),
    (["run", "none.toml"], "none.toml: no such run file"),
    (["ls", "--connect", "studio"], "studio: an address must be tcp://host:port"),
    (["events", "-n", "501"], "--last"),
    (["demo", "--steps", "0"], "--steps"),
    ([], "the full screen needs a terminal"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "says"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_wrong_usage_is_exit_code_2_and_one_line_or_one_object(main: Main, words: list[str], says: str) -> None:
    code, out, err = main(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("trainctl: ") and says in err
    code, out, err = main(*words, "--json")
    assert (code, err, out.count("\n")) == (2, "", 1)
    found = json.loads(out)
    assert found["ok"] is False and found["error"]["code"] in ("usage", "invalid-input")
    assert says in found["error"]["text"] or not words  # without a command, --json itself is the unknown option


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("batch.micro", "5", "run.toml: batch.micro: 5 is above batch.global = 4"),
        ("run.stepz", "5", "stepz"),
        ("steps", "5", "--set: 'steps' must have the form table.key=value"),
        ("model.path", "nowhere", "model.path: no such folder: "),
        ("data.tokenizer", "model", "data.tokenizer"),
    ],
)
def test_a_run_that_cannot_be_is_refused_here(main: Main, run_file: Path, key: str, value: str, says: str) -> None:
    for command in ("run", "check"):
        code, out, err = main(command, str(run_file), "--set", f"{key}={value}")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert says in err


def test_without_a_cluster_several_nodes_are_not_taken_for_this_machine(main: Main, run_file: Path) -> None:
    tables = "\n".join(f'[nodes.{node}]\nmodel_path = "/nowhere/{node}"' for node in ("studio-of-mine", "mbp-of-mine"))
    run_file.write_text(run_file.read_text() + "\n" + tables + "\n")
    code, out, err = main("check", str(run_file))
    assert code == 0, err
    assert "on 2 nodes" in out
    assert err.startswith("the run has several nodes: give --cluster FILE")


@pytest.fixture
def loopback(run_file: Path) -> Callable[..., Path]:
    """A cluster file with these nodes on loopback, and their tables in the run file."""

    def write(**tables: str) -> Path:
        own = "".join(f"[nodes.{node}]\n{table}\n" for node, table in tables.items())
        run_file.write_text(RUN_FILE + own)
        entries = (f'[nodes.{node}]\naddress = "tcp://127.0.0.1:{1 + 2 * i}"\n' for i, node in enumerate(tables))
        file = run_file.parent / "cluster.toml"
        file.write_text("".join(entries))
        return file

    return write


def test_paths_of_a_node_behind_a_forwarded_port_are_left_to_its_agent(
    main: Main, run_file: Path, loopback: Callable[..., Path]
) -> None:
    cluster = str(loopback(near="share = 2", far='model_path = "/nowhere/model"\ndata_path = "/nowhere/data"'))
    code, out, err = main("check", str(run_file), "--cluster", cluster)
    assert (code, err.count("\n")) == (0, 3), err
    assert "no problems found" in out
    assert "nodes.far.model_path: /nowhere/model isn't on this machine; that node's agent checks for it" in err
    code, out, err = main("check", str(run_file), "--cluster", cluster, "--json")
    unseen = {"nodes.far.model_path": "/nowhere/model", "nodes.far.data_path": "/nowhere/data"}
    assert (code, json.loads(out)["unseen"], err) == (0, unseen, "")
    code, _, err = main("run", str(run_file), "--cluster", cluster)
    assert code == 5, err  # not this machine's to refuse: it goes on to the agents


def test_common_paths_and_those_of_this_machine_s_node_must_be_here(
    main: Main, run_file: Path, loopback: Callable[..., Path]
) -> None:
    far, here = 'model_path = "/nowhere/far"', 'data_path = "/nowhere/here"'
    for command in ("check", "run"):
        cluster = str(loopback(**{"far": far, names.node_name(): here}))
        code, out, err = main(command, str(run_file), "--cluster", cluster)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"run.toml: nodes.{names.node_name()}.data_path: no such file or folder: /nowhere/here" in err
        cluster = str(loopback(only='model_path = "/nowhere/only"'))
        _, _, err = main(command, str(run_file), "--cluster", cluster)
        assert "run.toml: nodes.only.model_path: no such folder: /nowhere/only" in err
        cluster = str(loopback(far=far, near="share = 2"))
        words = (command, str(run_file), "--cluster", cluster, "--set", "data.path=nowhere")
        assert "run.toml: data.path: no such file" in main(*words)[2]


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("data/a.txt", b"", "data.path"),
        ("data/a.txt", b"x" * 511, "data.path: the text has 512 tokens; one block needs 513"),
        ("model/model.safetensors", b"\2\0\0\0\0\0\0\0{", "model.safetensors is not a safetensors file"),
    ],
)
def test_what_can_be_seen_without_loading_is_refused_here(
    main: Main, run_file: Path, name: str, raw: bytes, says: str
) -> None:
    (run_file.parent / name).write_bytes(raw)
    for words in (["run", str(run_file)], ["check", str(run_file)], ["send", "start-run", f"config=@{run_file}"]):
        code, out, err = main(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert says in err


def test_check_estimates_what_is_trained_and_its_memory(main: Main, run_file: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    (run_file.parent / "model" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    shapes = {"model.embed_tokens.weight": [300, 8], "model.layers.0.self_attn.q_proj.weight": [8, 8]}
    entries = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps(entries).encode()
    weights = run_file.parent / "model" / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    _, out, _ = main("check", str(run_file))
    assert "\ntrains 2,464 parameters (all of 2,464); 0.00 GB of gradients per step\nestimated memory: 0.06 GB (" in out
    adapters = ("--set", "adapter.kind=lora", "--set", "adapter.rank=2")
    code, out, err = main("check", str(run_file), "--json", *adapters)
    model = json.loads(out)["model"]
    assert (code, model["trained"], model["family"], model["gradient_bytes"]) == (0, 32, "llama", 128)
    assert sum(model["memory"][""].values()) == 2 * model["memory"][""]["total"]
    code, out, err = main("check", str(run_file), *adapters, "--set", 'adapter.targets=["qkv"]')
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "adapter.targets: the model has no layer 'qkv'; it has q_proj" in err


def test_check_tells_everything_that_is_wrong_a_line_each(main: Main, run_file: Path) -> None:
    words = ["check", str(run_file), "--set", "model.path=none", "--set", "data.path=none"]
    code, out, err = main(*words)
    assert (code, out) == (2, "")
    assert [line.split(": ")[2] for line in err.splitlines()] == ["model.path", "data.path"]
    code, out, err = main(*words, "--json")
    told = json.loads(out)["error"]
    assert (code, err, told["code"], len(told["problems"])) == (2, "", "invalid-input", 2)
    assert [f"trainctl: {line}" for line in told["problems"]] == main(*words)[2].splitlines()


def test_check_says_that_a_run_file_is_in_order_and_warns_of_probable_mistakes(main: Main, run_file: Path) -> None:
    code, out, err = main("check", str(run_file))
    first, *warnings = out.splitlines()
    assert (code, err) == (0, "")
    assert first == f"{run_file}: no problems found; 10 steps of 4 samples, 40 epochs of 1"
    assert [line.split()[:2] for line in warnings] == [["warning:", "batch.global"], ["warning:", "run.steps"]]
    code, out, _ = main("check", str(run_file), "--set", "run.steps=20", "--json")
    assert code == 0
    assert json.loads(out)["config"]["run"]["steps"] == 20
    assert [one["setting"] for one in json.loads(out)["unusual"]] == ["batch.global", "run.steps"]


def test_bytes_that_are_no_text_are_refused_and_what_the_locale_cannot_show_is_replaced() -> None:
    assert_one_line(call_process("send", "note", os.fsdecode(b"text=\xff")), 2, "text: is not UTF-8 text")
    assert_one_line(call_process("send", "notë", PYTHONIOENCODING="ascii"), 2, "unknown verb 'not?'")


def test_escape_sequences_of_an_argument_are_not_repeated_to_the_terminal(main: Main) -> None:
    assert "\x1b" not in main("send", "resize-batch", "\x1b[2Jmicro")[2]


@pytest.mark.parametrize(
    "words",
    [["ls"], ["watch"], ["events", "-f"], ["logs"], ["send", "pause", "--wait", "none"], ["run", "--resume", "a"]],
    ids=" ".join,
)  # fmt: skip
def test_an_agent_that_is_not_there_is_exit_code_5(
    main: Main, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(agent_call, "ANSWER_SECONDS", 0.2)
    code, out, err = main(*words, "--connect", NOBODY)
    assert (code, out) == (5, "")
    assert NOBODY in err
    assert err.count("\n") == 1
    code, out, err = main(*words, "--connect", NOBODY, "--json")
    assert (code, err) == (5, "")
    assert json.loads(out)["error"]["code"] == "unreachable"


def test_a_short_timeout_does_not_make_an_absent_agent_a_slow_one() -> None:
    assert_one_line(call_process("send", "pause", "--timeout", "0.3", "--connect", NOBODY), 5, "no agent at")


def test_a_demo_s_folder_that_cannot_be_is_named(main: Main, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        code, out, err = main("demo", "--headless", "--folder", str(folder))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"trainctl: --folder: can't write the demo's files to {folder}: ")


@pytest.mark.parametrize("piped", ["stdin", "stderr"])
def test_the_full_screen_needs_all_three_streams_on_a_terminal(piped: str) -> None:
    here, there = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), there) | {piped: subprocess.PIPE}
    with subprocess.Popen([*COMMAND, "attach", "--connect", NOBODY], env=ENVIRONMENT, **streams) as process:
        os.close(there)
        _, err = process.communicate(timeout=HANG_SECONDS)
        said = err if piped == "stderr" else os.read(here, 4096)
    os.close(here)
    assert process.returncode == 2
    assert b"the full screen needs a terminal on standard input, output and error" in said
    assert said.count(b"\n") == 1


@pytest.mark.parametrize("words", [["send", "--help"], ["check", "FILE", "--json"]], ids=" ".join)
def test_a_reader_that_has_gone_ends_it_quietly(run_file: Path, words: list[str]) -> None:
    named = [str(run_file) if word == "FILE" else word for word in words]
    with subprocess.Popen(
        [*COMMAND, *named], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        _, err = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, err) == (cli.BROKEN_PIPE, b"")
