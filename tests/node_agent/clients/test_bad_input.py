"""Input that must not get in: garbage, strangers, mutated frames and wrong states, on either side."""

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import Iterator

import msgpack
import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from tests.asking import run_of
from tests.cluster.in_process import BlockingAgent, blocking_cluster
from tests.cluster.run_files import NODE
from tests.cluster.waits import wait_for_step
from tests.protocol.support.mutations import Mutator
from tests.tiers import scale
from tests.tui.support import run_directory
from tests.tui.support.cli_calls import call
from tests.waiting import HANG_SECONDS, PATIENT_MILLISECONDS
from tools.protocol_docs import examples

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.transport.peer_link import PeerLink
from trainctl.protocol import messages as m
from trainctl.protocol.client import client as c
from trainctl.protocol.client.live_queue import LiveQueue
from trainctl.protocol.config.names import runtime_directory
from trainctl.protocol.errors import ProtocolError, RefusedError, VersionError
from trainctl.protocol.messages.base import PROTOCOL_VERSION
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec, sockets
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md

SOME_ID = str(uuid.UUID(int=5))


def exchange(address: str, *frames: bytes) -> m.AgentReply:
    """Return the agent's answer to raw frames."""
    context = zmq.Context()
    try:
        dealer = sockets.new_socket(context, zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        dealer.connect(address)
        assert dealer.poll(PATIENT_MILLISECONDS, zmq.POLLOUT)
        dealer.send_multipart(frames)
        assert dealer.poll(PATIENT_MILLISECONDS, zmq.POLLIN), "no answer"
        return codec.decode_reply(dealer.recv())
    finally:
        context.destroy(linger=0)


def packed(**fields) -> bytes:
    return msgpack.packb({"v": PROTOCOL_VERSION, "rid": "r1", **fields})


BAD_REQUESTS = (
    ((b"garbage",), "malformed", "msgpack"),
    ((b"",), "malformed", "msgpack"),
    ((b"\xc1" * 100,), "malformed", "msgpack"),
    ((packed(type="snapshot-request"), b"more"), "malformed", "one frame"),
    ((packed(type="unheard-of"),), "malformed", "unheard-of"),
    ((packed(type="snapshot-request", columns=10**6),), "malformed", "columns"),
    ((packed(type="snapshot-request", extra=1),), "malformed", "extra"),
    ((packed(type="command", id="x", verb="pause"),), "malformed", "id"),
    ((packed(type="command", id=SOME_ID, verb="set-lr", args={"value": float("nan")}),), "malformed", "nan"),
    ((msgpack.packb({"v": 99, "rid": "r1", "type": "snapshot-request"}),), "version", "99"),
    ((msgpack.packb({"rid": "r1", "type": "snapshot-request"}),), "version", "None"),
)


def test_a_bad_request_is_refused_in_one_line(agent):
    for frames, code, words in BAD_REQUESTS:
        reply = exchange(agent.address, *frames)
        assert isinstance(reply, m.Refusal)
        assert (reply.code, words in reply.text, "\n" in reply.text) == (code, True, False), (frames, reply)
    with agent.client() as client:
        assert client.ask(m.RunsRequest).runs == ()


def test_raw_bytes_that_are_no_zeromq_leave_both_sockets_serving(agent):
    for address in (agent.address, agent.inner.live_address):
        port = int(address.rsplit(":", 1)[1])
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), timeout=HANG_SECONDS) as raw:
                raw.sendall(os.urandom(2000))
    with agent.client() as client:
        heard = 0
        for item in client.attach():
            heard += isinstance(item, m.Heartbeat)
            if heard == 2:
                break
        assert client.ask(m.RunsRequest).runs == ()


def test_a_frame_over_the_cap_ends_that_connection_and_nothing_else(agent):
    context = zmq.Context()
    try:
        dealer = sockets.new_socket(context, zmq.DEALER)
        dealer.connect(agent.address)
        assert dealer.poll(PATIENT_MILLISECONDS, zmq.POLLOUT)
        dealer.send(b"x" * (codec.CONTROL_FRAME_BYTES + 1))
        assert not dealer.poll(300, zmq.POLLIN)
    finally:
        context.destroy(linger=0)
    with agent.client() as client:
        assert client.ask(m.RunsRequest).runs == ()


def test_garbage_on_the_trainers_socket_changes_nothing(live):
    with live.client() as client:
        context = zmq.Context()
        dealer = sockets.new_socket(context, zmq.DEALER)
        dealer.connect(f"ipc://{runtime_directory(live.directory)}/trainers.sock")
        for frames in ([b"garbage"], [b"a", b"b", b"c"], [msgpack.packb({"v": PROTOCOL_VERSION, "type": "report"})]):
            dealer.send_multipart(frames)
        step = run_of(client).step
        wait_for_step(client, step + 5)
        context.destroy(linger=0)


def test_a_run_file_that_names_what_is_not_there_leaves_no_run_behind(agent, run_config, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with agent.client() as client:
        for changes, field in (
            ({"model__path": str(tmp_path / "nope")}, "model.path"),
            ({"data__path": str(tmp_path / "nope")}, "data.path"),
            ({"data__path": str(empty)}, "data.path"),
            ({"run__steps": 0}, "run.steps"),
            ({"batch__micro": 13}, "batch.micro"),
            ({"optimizer__schedule": "square"}, "optimizer.schedule"),
            ({"data__tokenizer": "model"}, "data.tokenizer"),
        ):
            reply = client.send("start-run", {"config": run_config(**changes)})
            assert (reply.state, reply.field) == ("rejected", f"config: {field}"), reply
        named = run_config()
        named["nodes"]["elsewhere"] = {"share": 3}
        assert "elsewhere" in client.send("start-run", {"config": named}).field
        assert client.send("start-run", {"resume": "no-such-run"}).field == "resume"
        assert client.send("pause", {}).field == "run"
        assert client.ask(m.RunsRequest).runs == ()
    assert not list(agent.directory.glob("runs/*"))


def test_commands_for_another_run_and_a_second_run_are_refused(live, run_config):
    with live.client() as client:
        assert client.send("pause", {}, run="other").field == "run"
        reply = client.send("start-run", {"config": run_config()})
        assert (reply.state, reply.field) == ("rejected", "run")


def test_values_no_record_can_hold_and_paths_no_system_has_are_refused_and_the_agent_lives(agent, run_config):
    reply = exchange(agent.address, packed(type="command", id=SOME_ID, verb="note", args={"text": "x"}, if_plan=2**63))
    assert isinstance(reply, m.Refusal)
    assert "if_plan" in reply.text
    reply = exchange(agent.address, packed(type="events-request", after_id=2**63))
    assert isinstance(reply, m.Refusal)
    with agent.client() as client:
        long = client.send("start-run", {"config": run_config(model__path="/" + "x" * 300)})
        assert (long.state, "Traceback" in long.reason) == ("rejected", False), long.reason
        relative = client.send("start-run", {"config": run_config(data__path="here")})
        assert (relative.state, relative.field) == ("rejected", "config: data.path")
        assert client.ask(m.RunsRequest).runs == ()


@pytest.fixture
def damaged(tmp_path) -> Iterator[BlockingAgent]:
    """An idle agent whose newest run is a finished one, with pages of its record overwritten."""
    folder = tmp_path / "state" / NODE
    run_directory.make(folder / "runs" / "old")
    record = RunPaths(folder / "runs" / "old").record
    whole = record.read_bytes()
    record.write_bytes(whole[:4096] + b"\xee" * (len(whole) - 4096))
    with AgentDb(folder / "agent.db") as ledger:
        ledger.add_run("old", "demo", 1000.0, state="finished")
    with blocking_cluster(tmp_path, (NODE,)) as cluster:
        yield cluster[NODE]


def test_a_damaged_record_of_a_finished_run_takes_no_idle_agent_out_of_service(damaged):
    record = str(damaged.run_paths("old").record)
    at = ("--connect", damaged.address)
    listed = call("ls", *at)
    assert (listed.returncode, "old" in listed.stdout) == (0, True), listed.stderr
    told = call("status", *at)
    assert told.returncode == 0, told.stderr
    assert record in told.stdout and "restore the record from a copy" in told.stdout
    asked = call("events", *at)
    assert asked.returncode == 3
    assert record in asked.stderr and "restore the record from a copy" in asked.stderr
    elsewhere = str(damaged.directory.parent / "other")
    found = call("replay", "old", TRAINCTL_CONNECT=damaged.address, TRAINCTL_STATE=elsewhere)
    assert found.returncode == 2 and "needs a terminal" in found.stderr  # the agent's folder is looked in too
    assert "no such run" in call("replay", "old", TRAINCTL_STATE=elsewhere).stderr
    assert call("status", "old", *at).returncode == 3
    with damaged.client() as client:
        state = reducer.take(md.ViewState(), "", client.ask(m.SnapshotRequest, 100), 0.0)
    assert state.node is not None and state.run is None
    assert record in state.events[-1].text


def test_a_variable_that_could_load_code_is_refused_on_the_node_unless_its_owner_allows_it(
    agent, run_config, monkeypatch
):
    config = run_config(nodes__box={"backend": "torch", "env": {"OPENSSL_CONF": "/planted", "OMP_NUM_THREADS": "1"}})
    with agent.client() as client:
        refused = client.send("start-run", {"config": config})
        assert (refused.state, refused.field) == ("rejected", "config: nodes.box.env.OPENSSL_CONF")
        assert "a run file may not set it" in refused.reason
        assert client.ask(m.RunsRequest).runs == ()
        monkeypatch.setenv("TRAINCTL_ALLOWED_VARIABLES", "OPENSSL_CONF")
        assert client.send("start-run", {"config": config}).state == "applied"


FRAMES = scale("frames")
BURST = 200
"""Fewer than a socket keeps, so that none is lost."""
ME = psutil.Process()


@pytest.fixture
def context():
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


def bound(context, kind):
    made = sockets.new_socket(context, kind)
    return made, f"tcp://127.0.0.1:{made.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.mark.timeout(3600)
async def test_a_client_outlives_mutated_replies(context):
    server, address = bound(context, zmq.ROUTER)
    mutator, held = Mutator("agent to client", 1), []
    async with c.Client(address, timeout_seconds=HANG_SECONDS) as client:
        for _ in range(0, FRAMES, BURST):
            while True:  # what comes while it asks, and is for nobody, comes before the answer
                asked = asyncio.create_task(client.ask(m.RunsRequest))
                identity, frame = await server.recv_multipart()
                rid = codec.decode_control(frame).rid
                await server.send_multipart([identity, codec.encode(m.Runs(rid=rid, runs=()))])
                with contextlib.suppress(ProtocolError, RefusedError):
                    if (await asked).runs == ():  # else a mutated reply has the same number
                        break
            for made in mutator.frames(BURST):
                await server.send_multipart([identity, made])
            held.append(ME.memory_info().rss)
    assert held[-1] - held[0] < 10e6, "beside what the first burst made Python keep"


@pytest.mark.timeout(3600)
async def test_a_subscriber_outlives_mutated_messages(context):
    server, address = bound(context, zmq.XPUB)
    mutator, held = Mutator("published by an agent", 1), []
    event = examples.EXAMPLES["published by an agent"]["event"]
    live = LiveQueue(context, address, None)
    try:
        for number in range(0, FRAMES, BURST):
            for made in mutator.frames(BURST):
                await server.send_multipart([b"event", made])
            told = codec.encode(msgspec.structs.replace(event, seq=10**9 + number))
            while True:
                await server.send_multipart([b"event", told])
                with contextlib.suppress(VersionError):
                    if any(message.seq == 10**9 + number for message in await live.get(0.2)):
                        break
            held.append(ME.memory_info().rss)
    finally:
        live.close()
    assert len(held) == len(range(0, FRAMES, BURST))
    assert held[-1] - held[0] < 10e6, "beside what the first burst made Python keep"


class Lead:
    """Who listens to the follower: it hears of what is right alone."""

    def __init__(self):
        self.welcomes = []

    def hello(self, link):
        return m.PeerHello(link=link, lead="a", address="tcp://127.0.0.1:9", generation=None)

    async def welcomed(self, node, welcome):
        self.welcomes.append(welcome)

    async def superseded(self, refusal):
        """Nobody's run is conducted here."""

    def in_touch(self, node, why):
        """It is read from the link."""

    def read(self, reading):
        """Its machine is of no interest here."""

    def late(self, event):
        """No run was conducted here."""
        return True


@pytest.mark.timeout(3600)
async def test_a_lead_begins_again_with_a_follower_that_talks_nonsense(context):
    server, address = bound(context, zmq.ROUTER)
    mutator, lead, greeted = Mutator("follower to lead", 1), Lead(), 0
    link = PeerLink(context, "b", address, lead)
    serving = asyncio.create_task(link.serve())
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not lead.welcomes:
                identity, frame = await server.recv_multipart()
                message = codec.decode_control(frame)
                if not isinstance(message, m.PeerHello):
                    continue
                greeted += 1
                with contextlib.suppress(zmq.ZMQError):  # it hangs up at the first that is none of the protocol
                    for made in mutator.frames(BURST if greeted < 3 else 0):
                        await server.send_multipart([identity, made])
                    if greeted >= 3:
                        welcome = m.PeerWelcome(
                            link=message.link, node="b", boot="x", live_address="tcp://127.0.0.1:1", version="0"
                        )
                        await server.send_multipart([identity, codec.encode(welcome)])
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert (link.line.welcome.node, greeted) == ("b", 3)
