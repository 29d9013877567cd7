"""The command line against a real agent that trains a tiny model: what each command prints, does and exits with."""

import itertools
import json
import math
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.conftest import SHARED_PIDS
from tests.tui.support.cli_calls import (
    ENVIRONMENT,
    assert_none_left,
    assert_one_line,
    call,
    call_json,
    end_all,
    interrupt,
    processes_of,
    started,
    wait_until,
)
from tests.waiting import HANG_SECONDS, slowness

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.trainer.demo_assets import llama_config, make_model

RUN_FILE = """
[run]
name = "tiny"
steps = {steps}
orphan_seconds = 5
[model]
path = "model"
[data]
path = "data.txt"
tokenizer = "bytes"
sequence_length = 16
[batch]
global = 4
micro = 2
[optimizer]
learning_rate = 1e-3
[checkpoint]
at_end = false
background = false
[nodes.here]
backend = "{backend}"
threads = 1
"""
FOREVER = 1_000_000


class Agent:
    """An agent of its own in `folder`, with a tiny model and text beside it, and a run file for a backend."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder = folder
        make_model(folder / "model", llama_config(hidden=16, layers=1, heads=2, intermediate=32))
        (folder / "data.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
        self.run_file = folder / "run.toml"
        self.run_file.write_text(RUN_FILE.format(steps=FOREVER, backend=backend))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", "here", "--listen", "tcp://127.0.0.1:0",
             "--state", str(folder / "state"), "--metrics", "127.0.0.1:0"],
            env=ENVIRONMENT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline())
        self.address: str = said["listen"]
        self.metrics_url: str = said["metrics"]
        self.at = ("--connect", self.address)

    def keep(self) -> None:
        """Its processes outlive the test that asked for it first."""
        SHARED_PIDS.update(process.pid for process in processes_of(self.folder))

    def stop(self) -> None:
        call("send", "stop", "checkpoint=false", *self.at)
        self._process.send_signal(signal.SIGTERM)
        try:
            assert self._process.wait(HANG_SECONDS) == 0
            assert_none_left(self.folder)
        finally:
            end_all(self.folder)
            self._process.communicate()


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent without an active run; who starts one ends it. MLX starts in less than half the CPU time of torch."""
    agent = Agent(tmp_path_factory.mktemp("idle"), "mlx")
    agent.keep()
    yield agent
    agent.stop()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent whose run goes on and on, but for most of the time is paused: its steps would take all of a core."""
    agent = Agent(tmp_path_factory.mktemp("agent"), "torch")
    done = call("run", agent.run_file, *agent.at)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}\n", done.stdout)
    with BlockingClient(agent.address, timeout_seconds=HANG_SECONDS) as client:
        assert client.send("pause", {}).state == "applied"
    agent.keep()
    yield agent
    agent.stop()


@pytest.fixture
def agent(lasting: Agent) -> Iterator[Agent]:
    """An agent whose run is paused before and after; a test resumes it."""
    with BlockingClient(lasting.address, timeout_seconds=HANG_SECONDS) as client:
        yield lasting
        assert client.send("pause", {}).state in ("applied", "rejected")


@pytest.fixture
def training(agent: Agent) -> Agent:
    """The same, its run making steps."""
    with BlockingClient(agent.address, timeout_seconds=HANG_SECONDS) as client:
        assert client.send("resume", {}).state == "applied"
    return agent


# ---------------------------------------------------------------- looking


def test_prometheus_counts_what_is_trained(agent: Agent) -> None:
    """Of a real run: steps, its trainer's phases, the agent's own loop and its processes' memory."""

    def scraped() -> str:
        with urllib.request.urlopen(agent.metrics_url, timeout=HANG_SECONDS) as reply:
            return str(reply.read().decode())

    wait_until(lambda: re.search(r'^trainctl_steps_total\{run="tiny-.*"\} [1-9]', scraped(), re.MULTILINE), "steps")
    wait_until(lambda: 'role="trainer"' in scraped(), "the trainer's memory")
    text = scraped()
    for line in (
        r'trainctl_rank_phase_seconds_total\{node="here",phase="backward",rank="0",run="tiny-.*"\} [0-9.e+-]+',
        r'trainctl_agent_event_loop_lag_seconds\{node="here"\} [0-9.e+-]+',
        r'trainctl_run_state\{run="tiny-.*",state="(running|pausing|paused)"\} 1.0',
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line


@pytest.mark.tier("test")
def test_ls(agent: Agent) -> None:
    done = call("ls", *agent.at)
    assert done.returncode == 0
    header, row = done.stdout.splitlines()
    assert header.split() == ["RUN", "STATE", "STEP", "LOSS", "LEAD", "STARTED", "DIRECTORY"]
    assert row.startswith("tiny-")
    (run,) = call_json("ls", *agent.at)["runs"]
    assert run["state"] in ("running", "paused")
    assert run["steps"] == FOREVER


@pytest.mark.tier("test")
def test_status(agent: Agent) -> None:
    done = call("status", *agent.at)
    assert done.returncode == 0
    for text in ("run        tiny-", "/1,000,000", "global batch 4", "RANK", "here", "torch"):
        assert text in done.stdout
    found = call_json("status", *agent.at)
    assert found["run"]["ranks"][0]["node"] == "here"
    assert found["last_step"]["step"] >= 1
    assert found["node"]["address"] == agent.address
    rates, last = found["rates"], found["last_step"]
    assert rates["unit"] == "tokens/s" and found["run"]["loss_unit"] == "nats per token"
    assert rates["average_per_second"] == pytest.approx(last["tokens_total"] / last["seconds_total"])
    assert all(
        rates[name] > 0 for name in ("steps_per_second", "samples_per_second", "seconds_per_epoch", "epochs_left")
    )
    compute = found["run"]["ranks"][0]["compute"]
    assert {"python", "torch", "numpy"} <= {name for name, _ in compute.pop("versions")}
    assert compute == {
        "dtype": "float32", "tf32": None, "compile": "off", "attention": "sdpa", "weights": "float32",
        "deterministic": None, "cudnn_benchmark": None, "update": "",
    }  # fmt: skip


def test_status_of_a_run_by_name_and_of_none(agent: Agent) -> None:
    run = call_json("ls", *agent.at)["runs"][0]["run"]
    assert call_json("status", "--run", run, *agent.at)["run"]["run"] == run
    assert_one_line(call("status", "--run", "nobody", *agent.at), 3, "no run 'nobody'")
    assert call_json("status", "--run", "nobody", *agent.at, status=3)["error"]["code"] == "refused"


@pytest.mark.tier("test")
def test_watch_shows_steps_in_order_and_ends_at_ctrl_c(training: Agent) -> None:
    with started("watch", "--json", *training.at) as process:
        assert process.stdout is not None
        items = (json.loads(line) for line in iter(process.stdout.readline, ""))
        steps = [*itertools.islice((item["step"] for item in items if item["type"] == "step-committed"), 5)]
        _, err = interrupt(process)
    assert (process.returncode, err) == (130, "")
    assert len(steps) == 5
    assert steps == list(range(steps[0], steps[0] + len(steps)))


def test_watch_for_a_person_names_what_was_done(agent: Agent) -> None:
    call("send", "resume", *agent.at)
    text = f"note {uuid.uuid4()}"
    with started("watch", *agent.at) as process:
        assert process.stdout is not None
        assert re.match(r"\d\d:\d\d:\d\d  ", process.stdout.readline())
        call("send", "note", f"text={text}", *agent.at)
        lines = iter(process.stdout.readline, "")
        assert next(line for line in lines if text in line)
        assert next(line for line in lines if re.search(r"step [\d,]+  loss \d", line))
        interrupt(process)


def test_a_pipe_that_closes_ends_watch_quietly(training: Agent) -> None:
    with started("watch", *training.at) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(HANG_SECONDS) == 141


@pytest.mark.tier("test")
def test_events(agent: Agent) -> None:
    text = f"note {uuid.uuid4()}"
    assert call("send", "note", f"text={text}", *agent.at).returncode == 0
    assert text in call("events", *agent.at).stdout
    assert len(call("events", "-n", "1", *agent.at).stdout.splitlines()) == 1
    assert text in [event["text"] for event in call_json("events", *agent.at)["events"]][-5:]
    assert call_json("events", "-n", "0", *agent.at)["events"] == []


def test_events_followed(agent: Agent) -> None:
    first, second = f"note {uuid.uuid4()}", f"note {uuid.uuid4()}"
    call("send", "note", f"text={first}", *agent.at)
    with started("events", "-f", *agent.at) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert next(line for line in lines if first in line)
        call("send", "note", f"text={second}", *agent.at)
        assert next(line for line in lines if second in line)
        out, err = interrupt(process)
    assert (process.returncode, err) == (130, "")
    assert first not in out


@pytest.mark.tier("test")
def test_logs(agent: Agent) -> None:
    log = next((agent.folder / "state").rglob("rank-0.log"))
    with log.open("a", encoding="utf-8") as file:
        file.write("first of two\n\x1b[31mlast of two\x1b[0m\n")
    done = call("logs", *agent.at)
    assert done.returncode == 0
    assert done.stdout.endswith("first of two\n\x1b[31mlast of two\x1b[0m\n")
    assert call("logs", "-n", "1", *agent.at).stdout == "\x1b[31mlast of two\x1b[0m\n"
    assert call("logs", "-n", "0", *agent.at).stdout == ""
    found = call_json("logs", "-n", "2", *agent.at)
    assert found["text"].startswith("first of two\n")
    assert found["offset_bytes"] + len(found["text"]) == found["size_bytes"]
    assert_one_line(call("logs", "--rank", "7", *agent.at), 3, "no rank 7 in this run; the ranks are 0")


def test_logs_followed(agent: Agent) -> None:
    log = next((agent.folder / "state").rglob("rank-0.log"))
    with started("logs", "-f", "-n", "0", *agent.at) as process:
        assert process.stdout is not None
        # Following has begun once it has asked for the end of the file, which nothing shows: write till it is seen.
        seen = threading.Event()

        def write() -> None:
            for number in range(int(HANG_SECONDS / 0.05)):
                with log.open("a", encoding="utf-8") as file:
                    file.write(f"line {number}\n")
                if seen.wait(0.05):
                    return

        writer = threading.Thread(target=write)
        writer.start()
        try:
            first = process.stdout.readline()
            second = process.stdout.readline()
        finally:
            seen.set()
            writer.join(HANG_SECONDS)
        interrupt(process)
    assert process.returncode == 130
    assert int(second.split()[1]) == int(first.split()[1]) + 1


# ---------------------------------------------------------------- commands


@pytest.mark.tier("test")
def test_a_command_is_applied_at_a_step_it_names(agent: Agent) -> None:
    call("send", "resume", *agent.at)
    for micro in (1, 4):
        done = call("send", "resize-batch", f"micro={micro}", "--node", "here", *agent.at)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(rf"resize-batch applied at step [\d,]+: here \d -> {micro}\n", done.stdout)
    found = call_json("send", "resize-batch", "micro=2", *agent.at)
    assert (found["state"], found["before"], found["after"]) == ("applied", "4", "2")
    assert found["step"] >= 1


def test_the_same_id_again_is_the_same_outcome_and_another_body_a_conflict(agent: Agent) -> None:
    call("send", "resume", *agent.at)
    same = str(uuid.uuid4())
    first = call_json("send", "set-lr", "value=1e-3", "--id", same, *agent.at)
    again = call_json("send", "set-lr", "value=1e-3", "--id", same, *agent.at)
    assert (again["id"], again["step"]) == (same, first["step"])
    other = call_json("send", "set-lr", "value=2e-3", "--id", same, *agent.at, status=3)
    assert (other["state"], other["error"]["code"]) == ("conflict", "conflict")


@pytest.mark.tier("test")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["resize-batch", "micro=64"], "micro: 64 is over here's share of 4"),
        (["resize-batch", "micro=2", "--node", "studio"], "node: no node 'studio'"),
        (["pause", "--run", "nobody"], "run: 'nobody' is not active"),
        (["set-lr", "value=1e-3", "--if-plan", "99999"], "plan"),
        (["start-run", "resume=nobody"], "run"),
    ],
)
def test_what_the_agent_refuses_is_exit_code_3_with_its_reason(agent: Agent, words: list[str], says: str) -> None:
    assert_one_line(call("send", *words, *agent.at), 3, f"{words[0]} rejected: ", says)
    found = call_json("send", *words, *agent.at, status=3)
    assert found["error"]["code"] == "rejected"
    assert found["state"] == "rejected"


def test_what_is_not_applied_in_time_is_exit_code_4(agent: Agent) -> None:
    """Stop the trainer's world for a moment: an accepted command can't take effect."""
    call("send", "resume", *agent.at)
    (pid,) = {rank["pid"] for rank in call_json("status", *agent.at)["run"]["ranks"]}
    same, limit = str(uuid.uuid4()), str(math.ceil(5 * slowness()))  # it has to be accepted in that time
    trainer = psutil.Process(pid)
    trainer.suspend()
    try:
        slow = call("send", "set-lr", "value=1e-3", "--timeout", limit, "--id", same, *agent.at)
        accepted = call_json("send", "set-lr", "value=1e-3", "--wait", "accepted", "--id", same, *agent.at)
    finally:
        trainer.resume()
    assert_one_line(slow, 4, f"accepted, but not applied within {limit} s; repeat the call with --id {same}")
    assert accepted["state"] == "accepted"
    assert call_json("send", "set-lr", "value=1e-3", "--id", same, *agent.at)["state"] == "applied"


def test_sent_without_waiting_it_still_arrives(agent: Agent) -> None:
    text = f"note {uuid.uuid4()}"
    done = call("send", "note", f"text={text}", "--wait", "none", *agent.at)
    assert done.returncode == 0
    assert re.fullmatch(r"note sent without waiting; id [0-9a-f-]{36}\n", done.stdout)
    assert call_json("send", "resume", "--wait", "none", *agent.at)["state"] is None
    wait_until(lambda: text in call("events", "-n", "20", *agent.at).stdout, "the note to arrive", 20)


def test_a_second_run_is_refused_and_the_first_goes_on(agent: Agent) -> None:
    assert_one_line(call("run", agent.run_file, *agent.at), 3, "start-run rejected: run: tiny-", "one run at a time")
    assert_one_line(call("run", agent.run_file, "--follow", *agent.at), 3, "one run at a time")


# ---------------------------------------------------------------- runs of one's own


def test_a_field_that_the_agent_refuses_is_named_by_the_file_that_has_it(idle: Agent) -> None:
    other = idle.folder / "other.toml"
    other.write_text(idle.run_file.read_text().replace("[nodes.here]", "[nodes.mbp]"))
    done = call("run", other, *idle.at)
    assert_one_line(done, 3, f"start-run rejected: {other}: nodes.mbp: no such node in this cluster")


@pytest.mark.tier("test")
def test_a_run_followed_to_its_end_and_taken_up_again(idle: Agent) -> None:
    short = ("--set", "run.steps=30", "--set", "checkpoint.every_steps=10")
    done = call("run", idle.run_file, *short, "--follow", "--json", *idle.at)
    assert done.returncode == 0, done.stderr
    head, *lines = map(json.loads, done.stdout.splitlines())
    assert head["ok"] is True
    assert [line["step"] for line in lines if line["type"] == "step-committed"] == list(range(1, 31))
    assert [line["state"] for line in lines if line["type"] == "run-view"][-1] == "finished"
    assert any("finished" in line["text"] for line in lines if line["type"] == "event")
    words = ("note", "text=the learning rate was too low", "--id", str(uuid.uuid4()), *idle.at)
    for _ in range(2):
        noted = call_json("send", *words)
        assert (noted["state"], noted["step"], noted["run"]) == ("applied", 30, head["run"])
    nowhere = call("send", "note", "text=x", "--run", "tiny-nowhere", *idle.at)
    assert (nowhere.returncode, nowhere.stderr) == (3, "trainctl: note rejected: run: no run 'tiny-nowhere' on here\n")
    # Its newest checkpoint is of step 20: what came after is done again.
    again = call("run", "--resume", head["run"], "--follow", "--json", *idle.at)
    assert again.returncode == 0, again.stderr
    head_again, *lines = map(json.loads, again.stdout.splitlines())
    assert head_again["run"] == head["run"]
    assert [line["step"] for line in lines if line["type"] == "step-committed"] == list(range(21, 31))
    assert call_json("ls", *idle.at)["runs"][0]["state"] == "finished"
    assert call("events", *idle.at).stdout.count("the learning rate was too low") == 1


def test_ctrl_c_detaches_from_a_run_that_goes_on(idle: Agent) -> None:
    with started("run", idle.run_file, "--follow", *idle.at) as process:
        assert process.stdout is not None
        run = process.stdout.readline().strip()
        assert next(line for line in iter(process.stdout.readline, "") if "step 3 " in line)
        _, err = interrupt(process)
    assert process.returncode == 130
    assert err.startswith(f"detached; {run} continues. ")
    assert err.count("\n") == 1
    assert call_json("status", *idle.at)["run"]["state"] == "running"
    assert "applied at step" in call("send", "stop", "checkpoint=false", *idle.at).stdout
    wait_until(lambda: call_json("status", *idle.at)["run"]["state"] == "stopped", "the run to stop")


@pytest.mark.tier("test")
def test_a_run_that_fails_while_it_loads_says_why(idle: Agent) -> None:
    """The model's weights are not of the shapes that its configuration says: only loading it shows that."""
    described = idle.folder / "model" / "config.json"
    whole = described.read_bytes()
    described.write_bytes(whole.replace(b'"hidden_size": 16', b'"hidden_size": 32'))
    assert described.read_bytes() != whole
    try:
        followed = call("run", idle.run_file, "--follow", *idle.at)
    finally:
        described.write_bytes(whole)
    wait_until(lambda: "failed at step 0" in call("events", *idle.at).stdout, "the failed run to be over", 20)
    assert followed.returncode == 3
    assert re.search(rf"^trainctl: tiny-\S+ failed: .*{described.parent}", followed.stderr, re.M)
    assert (followed.stdout + followed.stderr).count(str(described.parent)) == 1, "the reason is told once"
    assert "Traceback" not in followed.stderr
