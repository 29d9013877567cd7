"""Conversations of agents: over a line that loses and repeats, through the lead, and ended by a parent."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.node_agent.support.processes import ENVIRONMENT
from tests.node_agent.support.simulation import config
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.transport.conversations import SILENT_AFTER_SECONDS, STALE_SECONDS, Line, Numbers
from trainctl.node_agent.transport.peer_link import PeerLink
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import ModelTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.wire import sockets

LINK = "a" * 16


def leave(link: str, seq: int) -> m.PeerRelay:
    return m.PeerRelay(link=link, seq=seq, rank=1, order=m.Leave(run="r", reason=str(seq)))


def exited(link: str, seq: int) -> m.PeerExit:
    return m.PeerExit(link=link, seq=seq, run="r", rank=1, clean=True, why="")


def welcome(link: str) -> m.PeerWelcome:
    return m.PeerWelcome(link=link, node="b", boot="x", live_address="tcp://127.0.0.1:1", version="0")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 0.3))
def test_over_any_line_what_is_taken_is_a_beginning_of_what_was_sent(seed: int, loss: float) -> None:
    chance, here, there = random.Random(seed), Numbers(LINK), Numbers(LINK)
    taken, lost = [], False
    for _ in range(50):
        message = here.stamped(leave(LINK, 0))
        if chance.random() < loss:
            lost = True
            continue
        for _ in range(chance.choice([1, 1, 2])):
            judgement = there.judge(message)
            if judgement == "take":
                assert not lost
                taken.append(message.seq)
            else:
                assert judgement == ("gap" if lost else "drop")
        assert there.judge(leave("other", 4)) == "stranger"
        if lost:
            assert there.judge(m.PeerPing(link=LINK, seq=here.sent)) == "gap"
            break
    assert taken == list(range(1, len(taken) + 1))


def test_a_line_is_in_touch_from_the_welcome_on_and_begins_again_when_a_message_is_lost() -> None:
    line = Line()
    assert line.state == "unknown"
    line.begin("one", 0.0)
    assert line.take(exited("one", 1), 0.1) == "drop"  # before the welcome
    assert line.take(welcome("one"), 0.1) == "welcome"
    assert (line.state, line.open) == ("connected", True)
    assert line.take(welcome("one"), 0.2) == "drop"
    assert line.take(exited("one", 1), 0.2) == "take"
    assert line.take(m.PeerBeat(link="one", seq=3), 0.3) == "begin-again"
    assert (line.state, line.open) == ("connected", False)  # its agent is there: only the conversation is over
    line.begin("two", 0.4)
    assert line.take(exited("one", 2), 0.5) == "drop"
    assert line.take(welcome("two"), 0.5) == "welcome"
    assert line.take(exited("two", 1), 0.5) == "take"


def test_a_line_is_stale_and_then_overdue_after_silence() -> None:
    line = Line()
    line.begin("one", 9.0)
    line.lose("no agent answers")
    assert (line.state, line.why) == ("unknown", "no agent answers"), "it was never welcomed"
    line.begin("one", 10.0)
    assert not line.is_overdue(10.0 + SILENT_AFTER_SECONDS)
    assert line.is_overdue(10.1 + SILENT_AFTER_SECONDS)
    line.take(welcome("one"), 13.0)
    line.take(m.PeerBeat(link="one", seq=0), 14.0)
    assert not line.is_overdue(14.0 + SILENT_AFTER_SECONDS)
    assert not line.is_stale(14.0 + STALE_SECONDS)
    assert line.is_stale(14.1 + STALE_SECONDS), "an order would be read when it is no longer meant"
    line.lose("cut")
    assert line.is_stale(14.0)
    assert (line.state, line.why, line.open) == ("silent", "cut", False)


@pytest.mark.parametrize(
    ("code", "state"), [("unknown-link", "connected"), ("busy", "silent"), ("older-term", "silent")]
)
def test_a_refusal_ends_the_conversation_and_says_why(code: str, state: str) -> None:
    line = Line()
    line.begin("one", 0.0)
    line.take(welcome("one"), 0.0)
    assert line.take(m.PeerRefusal(link="one", code=code, text="no"), 0.1) == "begin-again"  # type: ignore[arg-type]
    assert (line.state, line.open) == (state, False)
    assert line.why == ("no" if state == "silent" else "")


class EarlierAgent:
    """A link to an agent whose run files have no `model.attention`."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def host(self, order: m.PeerHost, seconds: float) -> m.PeerHosted:
        problem = "unknown field" if "attention" in order.config["model"] else ""
        field = "config: model.attention" if problem else ""
        return m.PeerHosted("l", 1, order.run, order.rank, field, problem)

    async def end_rank(self, run: str, rank: int, state: m.RunState, reason: str) -> None:
        self.ended.append(reason)


async def host(link: EarlierAgent, model: ModelTable) -> None:
    made = msgspec.structs.replace(config(nodes={"a": {}, "b": {}}), model=model)
    peers = Peers(None, {}, None, None)  # type: ignore[arg-type]  # it has no links of its own
    links: dict[str, PeerLink] = {"b": link}  # type: ignore[dict-item]
    peers.links = links
    await peers.host("run-1", {1: "b"}, made, m.Generation(1, 0), lambda node: None, call_off="failed")


async def test_an_earlier_version_hosts_a_run_without_newer_settings_and_refuses_others_by_name() -> None:
    link, model = EarlierAgent(), run_file.parse(RAW).model
    await host(link, model)
    with pytest.raises(InvalidInputError) as refused:
        await host(link, msgspec.structs.replace(model, attention="varlen"))
    assert str(refused.value) == (
        "config: model.attention: b: unknown to b's version of trainctl: upgrade b, or leave out model.attention"
    )
    assert link.ended == [str(refused.value)]


class Lead:
    """Says hello, and hears of nothing else."""

    def hello(self, link: str) -> m.PeerHello:
        return m.PeerHello(link=link, lead="a", address="tcp://127.0.0.1:9", generation=None)

    def in_touch(self, node: str, why: str) -> None:
        """It is read from the link."""


async def test_an_agent_of_another_protocol_is_refused_in_one_line_with_both_versions() -> None:
    context: Any = zmq.asyncio.Context()
    server = sockets.new_socket(context, zmq.ROUTER)
    lead: Any = Lead()
    link = PeerLink(context, "b", f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}", lead)
    serving = asyncio.create_task(link.serve())
    try:
        async with asyncio.timeout(HANG_SECONDS):
            identity, _ = await server.recv_multipart()
            refusal = {"v": 99, "type": "refusal", "rid": "", "code": "version", "text": "protocol version 2"}
            await server.send_multipart([identity, msgpack.packb(refusal)])
            while "not reached" in link.line.why:
                await asyncio.sleep(0.01)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        context.destroy(linger=0)
    assert link.line.why == "protocol version 99 is not supported; this program uses 2: upgrade the older one"


RAW = {
    "run": {"name": "r", "steps": 9}, "model": {"path": "/model"}, "data": {"path": "/data"}, "batch": {"global": 8},
    "optimizer": {"learning_rate": 0.1},
}  # fmt: skip


COMMAND = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", "here"]


def test_without_a_run_it_leaves_when_it_is_let_go(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "--leash", "--state", str(tmp_path)], env=ENVIRONMENT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as agent:  # fmt: skip
        assert agent.stdout is not None
        assert json.loads(agent.stdout.readline())["name"] == "here"
        assert agent.poll() is None
        _, err = agent.communicate("what comes before the end is thrown away", timeout=HANG_SECONDS)
    assert (agent.returncode, err) == (0, "")


def test_a_standard_input_that_nobody_holds_is_refused_in_a_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--leash", "--state", str(tmp_path)], env=ENVIRONMENT, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "trainctl-agent: --leash: standard input is not a pipe\n"
    assert not any(tmp_path.iterdir())
