"""`trainctl send` against every end that a command can come to, and one of several runs by its name."""

import json
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tests.cluster.in_process import BlockingCluster
from tests.cluster.run_files import FOREVER, on
from tests.tui.support.cli_calls import assert_one_line, call, call_json, started, wait_until
from tests.tui.support.scripted import SNAPSHOT, Answer, scripted
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.client import cluster as lead_finding
from trainctl.tui.cli import agent_call, main
from trainctl.tui.commands import command

ID = "6c1e4f0a-52d3-4b8e-9a77-0d3c5be2f914"
RUN = "sft-1b-20261120-143107-9f3c"


def reply(state: Any, **fields: Any) -> m.CommandReply:
    return m.CommandReply(rid="", id=ID, state=state, run=RUN, **fields)


def says(*replies: m.AgentReply | bytes) -> Answer:
    """Return one answer to every command; to a request for one, a snapshot of an idle agent."""
    idle = msgspec.structs.replace(SNAPSHOT, run=None)
    return lambda request: list(replies) if isinstance(request, m.Command) else [idle]


ACCEPTED = reply("accepted")
APPLIED = reply("applied", step=121, before="studio=8", after="studio=4", plan_version=3)
REJECTED = reply("rejected", reason="9 is over studio's share of 8", field="micro")
EXPIRED = reply("expired", reason="not applied within 60 s of its receipt")
FAILED = reply("failed", reason="the run ended before it")
CONFLICT = reply("conflict", reason="this id was used for another command")
BUSY = m.Refusal(rid="", code="busy", text="the disk is full")
NOT_AUTHORISED = m.Refusal(rid="", code="not-authorised", text="a viewer sends no verbs")
OTHER_VERSION = m.Refusal(rid="", code="version", text="protocol version 1 is not supported; this program uses 2")

ENDS: list[tuple[str, tuple[Any, ...], int, str, str | None, str]] = [
    ("applied", (ACCEPTED, APPLIED), 0, "", "applied", "resize-batch applied at step 121: studio=8 → studio=4"),
    ("applied", (REJECTED,), 3, "rejected", "rejected", "resize-batch rejected: micro: 9 is over studio's share"),
    ("applied", (ACCEPTED, FAILED), 3, "failed", "failed", "resize-batch failed: the run ended before it"),
    ("applied", (CONFLICT,), 3, "conflict", "conflict", "resize-batch conflict: this id was used"),
    ("applied", (ACCEPTED, EXPIRED), 4, "expired", "expired", "resize-batch expired: not applied within 60 s"),
    ("applied", (ACCEPTED,), 4, "expired", "accepted", f"not applied within 0.5 s; repeat the call with --id {ID}"),
    ("applied", (BUSY,), 3, "refused", None, "the disk is full"),
    ("applied", (OTHER_VERSION,), 5, "version", None, "protocol version 1 is not supported; this program uses 2"),
    ("applied", (NOT_AUTHORISED,), 6, "not-authorised", None, "a viewer sends no verbs"),
    ("applied", (b"\xc1garbage",), 5, "protocol", None, "not a msgpack message"),
    ("applied", (), 5, "unreachable", None, f"within 0.5 s; to get the command's outcome, send it again with ID {ID}"),
    ("accepted", (ACCEPTED, APPLIED), 0, "", "accepted", f"resize-batch accepted, id {ID}"),
    ("accepted", (APPLIED,), 0, "", "applied", "resize-batch applied at step 121"),
    ("none", (REJECTED,), 0, "", None, f"resize-batch sent without waiting; id {ID}"),
]  # fmt: skip
WORDS = ("send", "resize-batch", "micro=4", "--node", "studio", "--id", ID)


@pytest.mark.parametrize(("wait", "replies", "status", "code", "state", "text"), ENDS)
def test_each_end(wait: str, replies: tuple[Any, ...], status: int, code: str, state: str | None, text: str) -> None:
    with scripted(says(*replies)) as agent:
        timeout = "0.5" if "0.5 s" in text else "30"
        at = ("--wait", wait, "--timeout", timeout, "--connect", agent.address)
        plain, told = call(*WORDS, *at), call(*WORDS, *at, "--json")
        wait_until(lambda: len(agent.heard) >= 2, "both commands to arrive", 20)
    if status:
        assert_one_line(plain, status, text)
    else:
        assert (plain.returncode, plain.stderr, plain.stdout.count("\n")) == (0, "", 1)
        assert text in plain.stdout
    assert (told.returncode, told.stderr, told.stdout.count("\n")) == (status, "", 1)
    found = json.loads(told.stdout)
    error = found.pop("error", None)
    assert {*found} == {"ok", "verb", "node", *agent_call.FIELDS}
    assert (found["ok"], found["verb"], found["id"], found["state"]) == (status == 0, "resize-batch", ID, state)
    assert (error or {}).get("code", "") == code
    assert error is None or text.split(": ")[-1] in error["text"]
    assert {(heard.id, heard.node) for heard in agent.heard} == {(ID, "studio")}


def test_an_evaluation_tells_its_loss_and_perplexity() -> None:
    view = msgspec.structs.replace(SNAPSHOT.run, run=RUN, eval_loss=2.0, eval_step=121)
    known = msgspec.structs.replace(SNAPSHOT, run=view)
    done = reply("applied", step=121, after="loss 2.0000")
    with scripted(lambda request: [done] if isinstance(request, m.Command) else [known]) as agent:
        said = call("send", "evaluate", "--connect", agent.address)
    assert said.stdout == "evaluate applied at step 121: loss 2.0000, perplexity 7.389\n", said.stderr


def test_each_option_is_in_the_message() -> None:
    with scripted(says(APPLIED)) as agent:
        options = ("--run", RUN, "--if-plan", "7", "--ttl", "5", "--id", ID.upper())
        assert (
            call("send", "set-lr", "value=1e-4", "schedule=set", *options, "--connect", agent.address).returncode == 0
        )
        assert call("send", "rebalance", "studio=16", "mbp=30%", "--connect", agent.address).returncode == 0
    first, second = agent.heard
    assert (first.verb, first.args, first.node) == ("set-lr", {"value": 1e-4, "schedule": "set"}, None)
    assert (first.id, first.run, first.if_plan, first.ttl_seconds) == (ID, RUN, 7, 5.0)
    assert (second.args, second.if_plan) == ({"shares": {"studio": 16, "mbp": "30%"}}, None)
    assert uuid.UUID(second.id).version == 4


@pytest.mark.parametrize("wait", ["applied", "none"])
def test_what_another_agent_conducts_is_sent_to_that_one(wait: str) -> None:
    with scripted(says(APPLIED)) as lead:
        refusal = m.Refusal(rid="", code="not-lead", text="mbp leads it", lead=lead.address)
        peer = m.PeerView("mbp", lead.address, None, "connected", 0.0)
        following = msgspec.structs.replace(
            SNAPSHOT, peers=(peer,), run=msgspec.structs.replace(SNAPSHOT.run, lead="mbp")
        )
        with scripted(lambda request: [refusal if isinstance(request, m.Command) else following]) as follower:
            assert call(*WORDS, "--wait", wait, "--connect", follower.address).returncode == 0
            assert (
                call("send", "promote", "--node", "mbp", "--wait", wait, "--connect", follower.address).returncode == 0
            )
            wait_until(lambda: len(lead.heard) == 2, "both commands to arrive", 20)
    assert [heard.verb for heard in lead.heard] == ["resize-batch", "promote"]


def test_a_lead_that_cannot_be_reached_is_exit_code_5() -> None:
    nowhere = m.Refusal(rid="", code="not-lead", text="mbp leads it", lead=None)
    with scripted(says(nowhere)) as agent:
        assert_one_line(call(*WORDS, "--connect", agent.address), 3, "mbp leads it")
        lost = msgspec.structs.replace(nowhere, lead="tcp://127.0.0.1:1")
    with scripted(says(lost)) as agent:
        done = call(*WORDS, "--timeout", "1", "--connect", agent.address)
        assert_one_line(done, 5, "no agent at tcp://127.0.0.1:1")


def test_interrupted_it_is_one_object_with_the_id_to_repeat_it_by() -> None:
    with scripted(says(ACCEPTED)) as agent:
        for count, json_word in enumerate(((), ("--json",)), 1):
            with started(*WORDS, *json_word, "--connect", agent.address) as process:
                wait_until(lambda count=count: len(agent.heard) == count, "the command to arrive", 60)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=HANG_SECONDS)
            assert (process.returncode, err) == (130, "")
            if json_word:
                found = json.loads(out)
                assert (found["error"]["code"], found["id"], out.count("\n")) == ("interrupted", ID, 1)
            else:
                assert out == ""


@pytest.mark.parametrize("words", [("--json",), ()], ids=" ".join)
def test_a_fault_of_the_program_s_own_is_one_object_or_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.delenv("TRAINCTL_DEBUG", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(command, "make_order", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError) as caught:
        main.main(["send", "pause", *words])
    sys.excepthook(caught.type, caught.value, caught.tb)
    out, err = capsys.readouterr()
    if words:
        assert (json.loads(out)["error"]["code"], out.count("\n"), err) == ("internal", 1, "")
    else:
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("trainctl: internal error: ZeroDivisionError: ")


def test_no_agent_of_a_cluster_answers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead_finding, "LOOK_SECONDS", 0.2)
    file = tmp_path / "cluster.toml"
    file.write_text('[nodes.a]\naddress = "tcp://127.0.0.1:1"\n[nodes.b]\naddress = "tcp://127.0.0.1:2"\n')
    done = call("send", "pause", "--cluster", file, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["error"]["code"], found["state"]) == (5, "unreachable", None)
    assert uuid.UUID(found["id"])
    assert (done.stderr, done.stdout.count("\n")) == ("", 1)


@pytest.fixture
def two(cluster: BlockingCluster, run_config: Callable[..., dict[str, Any]], tmp_path: Path) -> dict[str, str]:
    """Runs of two nodes, by node, started by files that name the node."""
    found = {}
    for node in ("gamma", "beta"):
        file = tmp_path / f"{node}.toml"
        file.write_text(tomli_w.dumps(run_config(run__steps=FOREVER, run__name=node, nodes=on(node))), "utf-8")
        done = call("run", file, "--cluster", cluster.file)
        assert done.returncode == 0, done.stderr
        found[node] = done.stdout.strip()
    return found


def test_the_help_is_that_of_the_verb_whatever_a_node_is_called() -> None:
    assert (
        call("send", "--node", "stop", "resize-batch", "--help").stdout == call("send", "resize-batch", "--help").stdout
    )


def test_a_command_without_a_run_is_refused_with_their_names(cluster: BlockingCluster, two: dict[str, str]) -> None:
    at = ("--cluster", cluster.file)
    for words in (("send", "note", "text=x"), ("send", "stop"), ("status",), ("events",), ("logs",), ("alerts",)):
        assert_one_line(call(*words, *at), 2, "several runs are active: ", *two.values())
    for agents in (at, ("--connect", cluster["gamma"].address)):  # which knows the others
        assert {row["run"] for row in call_json("ls", *agents)["runs"]} == {*two.values()}
    assert call("keys", "audit", *at).returncode == 0, "which is of an agent, not of a run"
    assert_one_line(call("status", "other", *at), 2, "no agent knows other; active: ")


def test_each_is_steered_and_ended_by_its_name(cluster: BlockingCluster, two: dict[str, str]) -> None:
    at = ("--cluster", cluster.file)
    for node, run in two.items():
        assert call("send", "note", f"text=to {node}", "--run", run, *at).returncode == 0
        assert call_json("status", node, *at)["run"]["run"] == run, "by its name"
    for node, run in two.items():
        said = call("events", run, *at).stdout
        assert f"to {node}" in said and sum(f"to {other}" in said for other in two) == 1
        assert call_json("status", run, *at)["run"]["lead"] == node
        assert call_json("alerts", run, *at)["watched"]
    first, second = two.values()
    assert call("send", "stop", "--run", first, *at).returncode == 0

    def states() -> dict[str, str]:
        return {row["run"]: row["state"] for row in json.loads(call("ls", "--json", *at).stdout)["runs"]}

    until(lambda: states()[first] == "stopped", what="the end of the first")
    assert states()[second] == "running"
    assert call("send", "note", "text=alone now", *at).returncode == 0, "one is left, so it needs no name"
