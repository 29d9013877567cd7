"""The command line against an agent with a run: what each command prints, does and exits with.

The agent is in this process and its trainer is simulated; tests/integration/test_cli_agent.py has real ones.
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.cluster.in_process import BlockingAgent
from tests.cluster.run_files import FOREVER, NODE
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.tui.support.cli_calls import COMMAND, ENVIRONMENT, assert_one_line, call, call_json, interrupt, started
from tests.waiting import HANG_SECONDS, until


class Trained:
    """An agent with a run that goes on and on, and how a command line finds it."""

    def __init__(self, agent: BlockingAgent, config: dict[str, Any], file: Path) -> None:
        self.agent, self.at, self.file = agent, ("--connect", agent.address), file
        file.write_text(tomli_w.dumps(config), "utf-8")

    @property
    def log(self) -> Path:
        return next(self.agent.directory.rglob("rank-0.log"))


@pytest.fixture
def idle(agent: BlockingAgent, run_config: Any, tmp_path: Path) -> Trained:
    """An agent that has no run yet; the run file is of 30 steps."""
    config = run_config(run__name="tiny", checkpoint={"every_steps": 10, "at_end": False, "background": False})
    return Trained(agent, config, tmp_path / "run.toml")


@pytest.fixture
def training(agent: BlockingAgent, run_config: Any, tmp_path: Path) -> Trained:
    made = Trained(agent, run_config(run__name="tiny", run__steps=FOREVER), tmp_path / "run.toml")
    done = call("run", made.file, *made.at)
    assert (done.returncode, re.fullmatch(r"tiny-\d{8}-\d{6}-[0-9a-f]{4}\n", done.stdout) is not None) == (0, True)
    with agent.client() as client:
        wait_for_step(client, 3)
    return made


def lines_of(process: "subprocess.Popen[str]") -> Iterator[str]:
    assert process.stdout is not None
    return iter(process.stdout.readline, "")


# ---------------------------------------------------------------- looking


def test_an_agent_without_alert_hooks_says_so(training: Trained) -> None:
    tested = call("alerts", "--test", *training.at)
    assert (tested.returncode, tested.stdout) == (3, "")
    assert "the agent has no alert hooks" in tested.stderr


def test_ls_and_status_show_the_run(training: Trained) -> None:
    done = call("ls", *training.at)
    header, row = done.stdout.splitlines()
    assert header.split() == [
        "RUN", "STATE", "STEP", "BATCH", "LAST", "LOSS", "COST", "SPACE", "LEAD", "STARTED", "DIRECTORY",
    ]  # fmt: skip
    assert (done.returncode, row.startswith("tiny-")) == (0, True)
    (listed,) = call_json("ls", *training.at)["runs"]
    assert (listed["state"], listed["steps"]) == ("running", FOREVER)
    done = call("status", *training.at)
    for text in ("run        tiny-", "/100,000", "global batch 12", "RANK", NODE, "torch"):
        assert text in done.stdout
    verbose = call("status", "-v", *training.at).stdout
    *_, head, rank = verbose.splitlines()
    assert head.split("  ")[0] == "NODE" and "GPU USED" in head and "PRECISION" in head
    assert rank.startswith(NODE) and verbose.startswith(done.stdout.split("\n")[0])
    found = call_json("status", listed["run"], *training.at)
    assert (found["run"]["run"], found["run"]["ranks"][0]["node"]) == (listed["run"], NODE)
    assert (found["node"]["address"], found["run"]["loss_unit"]) == (training.agent.address, "nats per token")
    rates, last = found["rates"], found["last_step"]
    assert rates["unit"] == "tokens/s"
    assert rates["average_per_second"] == pytest.approx(last["tokens_total"] / last["seconds_total"])
    names = ("steps_per_second", "samples_per_second", "seconds_per_epoch", "epochs_left")
    assert all(rates[name] > 0 for name in names)
    assert_one_line(call("status", "nobody", *training.at), 3, "no run 'nobody'")
    assert call_json("status", "nobody", *training.at, status=3)["error"]["code"] == "refused"


def test_a_run_is_named_to_an_agent_by_the_beginning_of_its_id_its_name_or_as_the_last(
    training: Trained, tmp_path: Path
) -> None:
    run = call_json("ls", *training.at)["runs"][0]["run"]
    for given in (run, run[:9], "tiny", "last"):
        assert call_json("status", given, *training.at)["run"]["run"] == run
        assert call_json("send", "note", "text=x", "--run", given, *training.at)["run"] == run
        assert call_json("events", given, "-n", "1", *training.at)["run"] == run
        assert call_json("logs", given, "-n", "1", *training.at)["run"] == run
        for words in (("policies", given), ("alerts", given), ("diagnose", given), ("report", given, "--json")):
            done = call(*words, *training.at)
            assert done.returncode == 0, done.stderr
        done = call("export", given, "--output", tmp_path / "steps.csv", *training.at)
        assert done.returncode == 0, done.stderr


def test_the_story_of_a_command_is_its_outcome_and_its_step(training: Trained) -> None:
    sent = call_json("send", "set-lr", "3e-4", *training.at)
    call("send", "note", "text=another", *training.at)
    told = call_json("events", "--story", sent["id"][:12], *training.at)
    assert {event["command"] for event in told["events"]} == {sent["id"]}
    assert [step["step"] for step in told["steps"]] == [sent["step"]]
    (carrier,) = told["plans"]
    assert (carrier["step"], carrier["kind"], carrier["commands"]) == (sent["step"], "train", [sent["id"]])
    assert carrier["plan_version"] == (version := sent["plan_version"])
    printed = call("events", "--story", sent["id"], *training.at).stdout.splitlines()
    assert len(printed) == len(told["events"]) + 2
    assert any(line.endswith(f"plan v{version - 1}→v{version}") for line in printed), printed
    of_step = call_json("events", "--story", f"step:{sent['step']}", *training.at)
    assert of_step["steps"] == told["steps"]
    assert any(event["command"] == sent["id"] for event in of_step["events"])
    assert "formed" in call("events", "--story", "rank:0", *training.at).stdout
    assert_one_line(call("events", "--story", "zzz", *training.at), 2, "nothing is recorded about a command zzz")


def test_events_and_logs_give_as_many_lines_as_were_asked_for(training: Trained) -> None:
    text = f"note {uuid.uuid4()}"
    assert call("send", "note", f"text={text}", *training.at).returncode == 0
    assert text in call("events", *training.at).stdout
    assert len(call("events", "-n", "1", *training.at).stdout.splitlines()) == 1
    assert text in [event["text"] for event in call_json("events", *training.at)["events"]][-5:]
    assert call_json("events", "-n", "0", *training.at)["events"] == []
    with training.log.open("a", encoding="utf-8") as file:
        file.write("first of two\n\x1b[31mlast of two\x1b[0m\n")
    done = call("logs", *training.at)
    assert (done.returncode, done.stdout.endswith("first of two\n\x1b[31mlast of two\x1b[0m\n")) == (0, True)
    assert call("logs", "-n", "1", *training.at).stdout == "\x1b[31mlast of two\x1b[0m\n"
    assert call("logs", "-n", "0", *training.at).stdout == ""
    found = call_json("logs", "-n", "2", *training.at)
    assert found["text"].startswith("first of two\n")
    assert found["offset_bytes"] + len(found["text"]) == found["size_bytes"]
    assert_one_line(call("logs", "--rank", "7", *training.at), 3, "no rank 7 in this run; the ranks are 0")


def test_watch_and_events_followed_show_what_happens_until_ctrl_c(training: Trained) -> None:
    first, second = f"note {uuid.uuid4()}", f"note {uuid.uuid4()}"
    call("send", "note", f"text={first}", *training.at)
    with (
        started("watch", "--json", *training.at) as items,
        started("watch", *training.at) as watch,
        started("events", "-f", *training.at) as events,
    ):
        read = (json.loads(line) for line in lines_of(items))
        steps = [*itertools.islice((item["step"] for item in read if item["type"] == "step-committed"), 5)]
        assert re.match(r"\d\d:\d\d:\d\d  ", next(lines_of(watch)))
        assert next(line for line in lines_of(events) if first in line)
        call("send", "note", f"text={second}", *training.at)
        assert next(line for line in lines_of(watch) if second in line)
        assert next(line for line in lines_of(watch) if re.search(r"step [\d,]+  loss \d", line))
        assert next(line for line in lines_of(events) if second in line)
        for process in (items, watch, events):
            out, err = interrupt(process)
            assert (process.returncode, err) == (130, "")
    assert first not in out
    assert steps == list(range(steps[0], steps[0] + 5))


def test_logs_followed(training: Trained) -> None:
    with started("logs", "-f", "-n", "0", *training.at) as process:
        assert process.stdout is not None
        # Following has begun once it has asked for the end of the file, which nothing shows: write till it is seen.
        seen = threading.Event()

        def write() -> None:
            for number in range(int(HANG_SECONDS / 0.05)):
                with training.log.open("a", encoding="utf-8") as file:
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


def test_a_command_is_applied_at_a_step_it_names_and_once_by_its_id(training: Trained) -> None:
    for micro in (1, 4):
        done = call("send", "resize-batch", f"micro={micro}", "--node", NODE, *training.at)
        assert done.returncode == 0, done.stderr
        assert f" → {micro}" in done.stderr, "what will follow"
        assert ("policy micro-batch will only advise" in done.stderr) == (micro == 1), "from the first command on"
        assert re.fullmatch(rf"resize-batch applied at step [\d,]+: {NODE} \d → {micro}\n", done.stdout)
    found = call_json("send", "resize-batch", "micro=2", *training.at)
    assert (found["state"], found["before"], found["after"]) == ("applied", "4", "2")
    same = str(uuid.uuid4())
    first = call_json("send", "set-lr", "value=1e-3", "--id", same, *training.at)
    again = call_json("send", "set-lr", "value=1e-3", "--id", same, *training.at)
    assert (again["id"], again["step"]) == (same, first["step"])
    other = call_json("send", "set-lr", "value=2e-3", "--id", same, *training.at, status=3)
    assert (other["state"], other["error"]["code"]) == ("conflict", "conflict")


def test_a_dry_run_says_what_would_happen_and_is_in_no_record(training: Trained) -> None:
    before = call_json("events", *training.at)["events"]
    found = call_json("send", "set-lr", "7e-4", "--dry-run", *training.at)
    assert (found["refused"], found["verb"]) == ("", "set-lr")
    assert found["after"].startswith("7e-4") and found["step"] > 0
    sizes = call_json("send", "resize-batch", "micro=1", "--node", NODE, "--dry-run", *training.at)["ranks"]
    assert [(one["node"], one["micro"]) for one in sizes] == [(NODE, 1)]
    refused = call("send", "resize-batch", "micro=100000", "--node", NODE, "--dry-run", *training.at)
    assert refused.returncode == 3 and refused.stdout.startswith(
        "resize-batch: would be refused: micro: 100000 is over"
    )
    ended = [event for event in call_json("events", *training.at)["events"] if event["id"] > before[-1]["id"]]
    assert not any(event["verb"] in ("set-lr", "resize-batch") for event in ended)


def test_undo_sends_what_undoes_the_newest_change(training: Trained) -> None:
    nothing = call("send", "undo", *training.at)
    assert_one_line(nothing, 3, "undo: no change of this run can be undone now")
    for value in ("3e-4", "1e-3"):
        assert call("send", "set-lr", value, "schedule=set", *training.at).returncode == 0
    done = call("send", "undo", *training.at)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("set-lr applied at step ") and "→ 3e-4 constant" in done.stdout
    assert done.stderr.startswith("undoes "), done.stderr
    undone = next(event for event in reversed(call_json("events", *training.at)["events"]) if event["verb"] == "set-lr")
    assert undone["undoes"]


def test_what_the_agent_refuses_is_exit_code_3_with_its_reason(training: Trained) -> None:
    for words, says in (
        (["resize-batch", "micro=64"], f"micro: 64 is over {NODE}'s share of 12"),
        (["resize-batch", "micro=2", "--node", "studio"], "node: no node 'studio'"),
        (["pause", "--run", "nobody"], "run: 'nobody' is not active"),
        (["set-lr", "value=1e-3", "--if-plan", "99999"], "plan"),
        (["start-run", "resume=nobody"], "run"),
    ):
        assert_one_line(call("send", *words, *training.at), 3, f"{words[0]} rejected: ", says)
        found = call_json("send", *words, *training.at, status=3)
        assert (found["error"]["code"], found["state"]) == ("rejected", "rejected")
    for follow in ((), ("--follow",)):
        second = call("run", training.file, *follow, *training.at)
        assert_one_line(second, 3, "start-run rejected: run: tiny-", "one run at a time")
    assert call_json("status", *training.at)["run"]["state"] == "running"


# ---------------------------------------------------------------- runs


def test_a_field_that_the_agent_refuses_is_named_by_the_file_that_has_it(idle: Trained, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(idle.file.read_text().replace(f"[nodes.{NODE}]", "[nodes.mbp]"))
    done = call("run", other, *idle.at)
    assert_one_line(done, 3, f"start-run rejected: {other}: nodes.mbp: no such node in this cluster")


def test_a_run_followed_to_its_end_and_taken_up_again(idle: Trained) -> None:
    done = call("run", idle.file, "--follow", "--json", *idle.at)
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
    assert (nowhere.returncode, nowhere.stderr) == (
        3,
        f"trainctl: note rejected: run: no run 'tiny-nowhere' on {NODE}\n",
    )
    # Its newest checkpoint is of step 20: what came after is done again.
    again = call("run", "--resume", "tiny", "--follow", "--json", *idle.at)
    assert again.returncode == 0, again.stderr
    head_again, *lines = map(json.loads, again.stdout.splitlines())
    assert head_again["run"] == head["run"]
    steps = [line["step"] for line in lines if line["type"] == "step-committed"]
    assert steps[0] > 20 and steps == list(range(steps[0], 31)), "the first ones may be over before it looks"
    assert "resumed from step 20" in call("events", *idle.at).stdout
    assert call_json("ls", *idle.at)["runs"][0]["state"] == "finished"
    assert call("events", *idle.at).stdout.count("the learning rate was too low") == 1


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_run_is_extended_only_if_no_earlier_step_would_have_been_different(idle: Trained, schedule: str) -> None:
    words = ("--set", f"optimizer.schedule={schedule}", "--set", "checkpoint.at_end=true", "--follow")
    done = call("run", idle.file, *words, *idle.at)
    assert done.returncode == 0, done.stderr
    run = done.stdout.split()[0]
    before = {step["step"]: step["loss"] for step in _steps(idle, run)}
    extended = call("run", "--resume", "tiny", "--steps", "40", "--follow", *idle.at)
    if schedule == "constant":
        assert extended.returncode == 0, extended.stderr
        after = {step["step"]: step["loss"] for step in _steps(idle, run)}
        assert [*after] == [*range(1, 41)] and {step: after[step] for step in before} == before
        assert call_json("ls", *idle.at)["runs"][0]["steps"] == 40
    else:
        line = f"trainctl run --branch {run}@30 --set run.steps=40"
        assert_one_line(extended, 3, "start-run rejected: steps: the cosine schedule of 30 steps", line)
        assert {step["step"]: step["loss"] for step in _steps(idle, run)} == before
        branched = call("run", *shlex.split(line)[2:], "--follow", *idle.at)
        assert branched.returncode == 0, branched.stderr
    assert_one_line(call("run", idle.file, "--steps", "40", *idle.at), 2, "--steps: only extends a run that is resumed")


def _steps(trained: Trained, run: str) -> list[dict[str, Any]]:
    file = trained.file.with_suffix(".jsonl")
    assert call("export", run, "--format", "jsonl", "--output", file, *trained.at).returncode == 0
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_is_renamed_and_removed_once_it_has_ended(training: Trained, tmp_path: Path) -> None:
    run = call_json("ls", *training.at)["runs"][0]["run"]
    assert call_json("runs", "rename", "tiny", "best", *training.at)["run"] == run
    assert call_json("status", "best", *training.at)["run"]["run"] == run
    assert f"{run} (best)" in call("ls", *training.at).stdout
    assert_one_line(call("runs", "rename", "best", "not a name", *training.at), 2, "not a name: a name has")
    assert_one_line(call("runs", "remove", "best", "--yes", *training.at), 3, f"{run} is running: stop it first")
    assert call("send", "stop", *training.at).returncode == 0
    with training.agent.client() as client:
        wait_for_end(client)
    until(lambda: call_json("ls", *training.at)["runs"][0]["state"] == "stopped", what="the run's end")
    (row,) = call_json("ls", *training.at)["runs"]
    directory = Path(row["directory"])
    held = sum(file.stat().st_blocks * 512 for file in directory.rglob("*"))
    assert row["size_bytes"] == pytest.approx(held, rel=0.05) and row["name"] == "best"
    assert_one_line(call("runs", "remove", "best", *training.at), 2, "--yes: removing", "can't be undone")
    assert directory.is_dir()
    removed = call_json("runs", "remove", "best", "--yes", *training.at)
    assert removed["freed_bytes"] == pytest.approx(held, rel=0.05)
    assert not directory.exists() and not list(directory.parent.glob(f".*{run}"))
    assert call_json("ls", *training.at)["runs"] == []
    assert_one_line(call("runs", "remove", "best", "--yes", *training.at), 2, "no agent knows a run of that name")


def test_ctrl_c_detaches_from_a_run_that_goes_on(idle: Trained) -> None:
    with started("run", idle.file, "--set", f"run.steps={FOREVER}", "--follow", *idle.at) as process:
        run = next(lines_of(process)).strip()
        assert next(line for line in lines_of(process) if "step 3 " in line)
        _, err = interrupt(process)
    assert process.returncode == 130
    assert err.startswith(f"detached; {run} continues. ")
    assert err.count("\n") == 1
    assert call_json("status", *idle.at)["run"]["state"] == "running"
    assert "applied at step" in call("send", "stop", "checkpoint=false", *idle.at).stdout
    with idle.agent.client() as client:
        assert wait_for_end(client).state == "stopped"


SLOW = pytest.mark.tier("all")
SLOWER = (">&-", "2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>/dev/full", "| true")


@pytest.mark.parametrize("streams", [">&- 2>&-", *(pytest.param(each, marks=SLOW) for each in SLOWER)])
def test_streams_that_take_nothing_change_no_outcome_and_show_no_traceback(training: Trained, streams: str) -> None:
    """Read-only commands fail where their answer is lost; what was carried out or refused has its own exit code."""
    lost = ">/dev/full" in streams.replace("2>", "")
    for words, status in (
        ("send note text='it prints nowhere'", (0,)),
        ("send note text='it prints nowhere' --json", (0,)),
        ("send rebalance box=7", (3,)),
        ("send rebalance box=7 --json", (3,)),
        ("ls --json", (1,) if lost else (0, 141)),
        ("status", (1,) if lost else (0, 141)),
        ("send note", (2,)),
    ):
        line = f"{shlex.join(COMMAND)} {words} {' '.join(map(str, training.at))} {streams}"
        line = f"set -o pipefail; {line}" if streams == "| true" else line
        done = subprocess.run(
            ["bash", "-c", line], env={**ENVIRONMENT, "TRAINCTL_STATE": os.environ["TRAINCTL_STATE"]},
            capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode in status, (words, done.returncode, done.stdout + done.stderr)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    notes = call("events", *training.at).stdout.count("it prints nowhere")
    assert notes == 2
