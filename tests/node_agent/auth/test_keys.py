"""An agent that uses keys: strangers and viewers get nothing, a revoked key is out at once, and it is all audited."""

import contextlib
import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.cluster.in_process import BlockingCluster
from tests.cluster.run_files import NODE
from tests.waiting import HANG_SECONDS, PATIENT_MILLISECONDS, until
from tools.protocol_docs import examples

from trainctl.node_agent.agent import Agent
from trainctl.node_agent.auth.authenticator import MOST_ARRIVALS, MOST_CONNECTIONS
from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.client import make_command
from trainctl.protocol.config import cluster_file
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError, RefusedError
from trainctl.protocol.messages import verbs
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import KeyFolder, KeyPair
from trainctl.protocol.wire import codec, sockets
from trainctl.tui.cli import main

NO_NODES = Cluster()


class Guarded:
    """An agent with keys, and the folders of those who come to it."""

    def __init__(self, root: Path) -> None:
        self.root, self.keys = root, KeyFolder(root / "agent-keys")
        self.keys.make("box")
        self.cluster = BlockingCluster(root, (NODE,), keys=lambda node: self.keys)
        self.agent = self.cluster[NODE]
        self.people: dict[str, KeyFolder] = {}

    def person(self, name: str, role: Any = None) -> KeyFolder:
        if name not in self.people:
            self.people[name] = KeyFolder(self.root / name)
            self.people[name].make(name)
        if role is not None:
            self.keys.authorize(name, self.people[name].user().public, role)
        return self.people[name]

    def ring(self, name: str, server: str | None = None) -> Keyring:
        return Keyring(self.person(name), NO_NODES, server or self.keys.agent().public)

    def client(self, name: str, **options: Any) -> BlockingClient:
        return BlockingClient(self.agent.address, keys=self.ring(name), **{"timeout_seconds": HANG_SECONDS, **options})

    def state(self) -> tuple[Any, ...]:
        """Return the state that a refused message must leave as it is."""
        record = open_for_reading(self.agent.directory / "agent.db")
        try:
            return tuple(record.execute(f"SELECT count(*) FROM {table}").fetchone() for table in ("commands", "runs"))
        finally:
            record.close()

    def audited(self, **wanted: Any) -> m.Refused:
        def look() -> m.Refused | None:
            with self.client("anna") as client:
                found = client.ask(m.AuditRequest, 500).refused
            return next((one for one in found if all(getattr(one, k) in v for k, v in sought.items())), None)

        sought = {name: value if isinstance(value, set) else {value} for name, value in wanted.items()}

        return until(look, 10, f"an audit of {wanted}")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    made.person("anna", "operator")
    yield made
    made.cluster.close()


@contextlib.contextmanager
def refused(words: str) -> Iterator[None]:
    """Without a wait: clients here wait for an answer longer than a test may last."""
    with pytest.raises(NotAuthorisedError, match=words):
        yield


def ask(guarded: Guarded, name: str, message: m.Message) -> m.AgentReply:
    """Return the answer to any message of the protocol."""
    with guarded.client(name) as client:
        inner: Any = client._client

        async def talk() -> m.AgentReply:
            with inner._conversation(message) as replies:
                await inner._transmit(message)
                return await inner._next(replies, HANG_SECONDS)

        return client._run(talk())


def test_the_operator_is_let_in_under_its_keys_name(guarded: Guarded) -> None:
    with guarded.client("anna", by="somebody else") as client:
        assert client.ask(m.SnapshotRequest, 0).node.node == "box"
        reply = client.send("note", {"text": "hello"})
        assert reply.state == "rejected"  # no run; but it was heard
    record = open_for_reading(guarded.agent.directory / "agent.db")
    try:
        assert record.execute("SELECT by FROM commands WHERE id = ?", (reply.id,)).fetchall() == [("anna",)]
    finally:
        record.close()


WHYS = {
    "keyless": {"it has no key", "it presented no key"},  # it may hang up before it has said so
    "unknown": {"its key is not authorised"},
    "wrong server": {"it expects another agent's key"},
}


def ring_of(guarded: Guarded, who: str) -> Keyring:
    if who == "keyless":
        return Keyring(guarded.person("mallory"), NO_NODES)
    return guarded.ring("mallory") if who == "unknown" else guarded.ring("anna", KeyPair.new("other").public)


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("keyless", "requires keys"),
        ("unknown", "trainctl keys authorize"),
        ("wrong server", "differs from the one"),
    ],
)
def test_strangers_get_nothing(guarded: Guarded, who: str, words: str) -> None:
    """With the product's client, which says why, and by a socket that sends every verb whatever the answer is."""
    before = guarded.state()
    with BlockingClient(guarded.agent.address, keys=ring_of(guarded, who), timeout_seconds=HANG_SECONDS) as client:
        for verb in verbs.VERBS:
            with refused(words):
                client.send(verb, {})
    with raw_socket(guarded, ring_of(guarded, who)) as dealer:
        dealer.immediate = 0
        dealer.connect(guarded.agent.address)
        for verb in verbs.VERBS:
            dealer.send(codec.encode(make_command(verb, {}, by="mallory")), zmq.DONTWAIT)
        assert guarded.audited(what="connect requests", why=WHYS[who])
        assert not dealer.poll(100), "an answer"
    assert guarded.state() == before


@contextlib.contextmanager
def raw_socket(guarded: Guarded, ring: Keyring, identity: bytes = b"") -> Iterator[Any]:
    """A DEALER that shows a ring's key, not connected yet."""
    context = zmq.Context()
    try:
        dealer = sockets.new_socket(context, zmq.DEALER)
        if identity:
            dealer.setsockopt(zmq.ROUTING_ID, identity)
        credentials = ring.credentials(guarded.agent.address)
        if credentials is not None:
            sockets.secure_client(dealer, credentials.own, credentials.server)
        yield dealer
    finally:
        context.destroy(linger=0)


def test_a_viewer_reads_and_sends_no_verb(guarded: Guarded) -> None:
    guarded.person("vera", "viewer")
    before = guarded.state()
    with guarded.client("vera") as client:
        assert client.ask(m.RunsRequest).runs == ()
        for verb in verbs.VERBS:
            with refused("viewer"):
                client.send(verb, {}, id=str(uuid.uuid4()))
        with refused("viewer"):
            client.ask(m.AuditRequest)
        with pytest.raises(RefusedError, match="no run yet"):  # it may ask what a command would do
            client.ask(m.DryRunRequest, "pause")
    assert guarded.state() == before
    for verb in verbs.VERBS:
        assert guarded.audited(name="vera", what=f"command {verb}")


def test_a_viewer_hears_what_it_asked_itself_and_nothing_else(guarded: Guarded) -> None:
    """Over raw sockets beside an operator's: under identities that it chose, and by the operator's own request id."""
    guarded.person("vera", "viewer")
    ring, asked = guarded.ring("vera"), m.RunsRequest(rid="of-both")
    with (
        raw_socket(guarded, guarded.ring("anna")) as anna,
        raw_socket(guarded, ring) as vera,
        raw_socket(guarded, ring, b"anna") as named,
        raw_socket(guarded, ring, b"\0anna") as numbered,
    ):
        for one in (anna, vera, named, numbered):
            one.connect(guarded.agent.address)
            one.send(codec.encode(asked))
        assert isinstance(codec.decode_reply(received(anna)), m.Runs)
        assert isinstance(codec.decode_reply(received(vera)), m.Runs)
        reply = codec.decode_reply(received(named))
        assert isinstance(reply, m.Refusal) and reply.code == "not-authorised"
        assert isinstance(codec.decode_reply(received(numbered)), m.Runs), "a number that nobody else has"
        command = make_command("note", {"text": "hers"}, by="anna")
        for one in (vera, numbered):
            one.send(codec.encode(command))
            assert isinstance(codec.decode_reply(received(one)), m.Refusal)
        anna.send(codec.encode(command))
        assert isinstance(codec.decode_reply(received(anna)), m.CommandReply)
        for _ in range(50):
            anna.send(codec.encode(asked))
            received(anna)
        assert not any(one.poll(200) for one in (vera, named, numbered)), "it heard what another one asked"
    assert guarded.audited(name="vera", what="any request", why="its socket set its own identity")


def received(dealer: Any) -> bytes:
    assert dealer.poll(PATIENT_MILLISECONDS), "no answer"
    frame: bytes = dealer.recv()
    return frame


@pytest.mark.parametrize("who", ["anna", "vera"])
def test_only_agents_say_what_agents_say(guarded: Guarded, who: str) -> None:
    guarded.person(who, {"anna": "operator", "vera": "viewer"}[who])
    for message in examples.EXAMPLES["lead to follower"].values():
        with pytest.raises((NotAuthorisedError, TimeoutError)):
            reply = ask_peer(guarded, who, message)
            assert isinstance(reply, m.PeerRefusal)
            assert reply.code == "not-authorised"
            raise NotAuthorisedError(reply.text)


def ask_peer(guarded: Guarded, who: str, message: m.Message) -> m.FromPeer:
    """Return the answer to an agent's message, over a socket of its own."""
    with raw_socket(guarded, guarded.ring(who)) as dealer:
        dealer.connect(guarded.agent.address)
        dealer.send(codec.encode(message))
        return codec.decode_peer(received(dealer))


OF_NODES = (m.LogRequest, m.TraceRequest, m.WorksRequest, m.HostWork, m.WorkFileRequest, m.SliceRequest, m.LinkRequest)
"""Requests that agents send each other with their nodes' keys."""


def test_a_nodes_key_reads_no_runs_and_sends_no_verbs(guarded: Guarded) -> None:
    guarded.person("mbp", "node")
    before = guarded.state()
    for message in examples.EXAMPLES["client to agent"].values():
        if not isinstance(message, OF_NODES):
            reply = ask(guarded, "mbp", message)
            assert isinstance(reply, m.Refusal)
            assert reply.code == "not-authorised", message
    hello = examples.EXAMPLES["lead to follower"]["peer-hello"]
    reply = ask_peer(guarded, "mbp", hello)  # it says that it is studio
    assert isinstance(reply, m.PeerRefusal)
    assert "may not act for studio" in reply.text
    assert guarded.state() == before


def test_a_revoked_key_is_out_while_it_is_connected(guarded: Guarded) -> None:
    guarded.person("rita", "operator")
    with guarded.client("rita") as rita, guarded.client("anna") as anna:
        items, others = rita.attach(0), anna.attach(0)
        next(item for item in items if isinstance(item, m.Heartbeat))
        first = next(item.seq for item in others if isinstance(item, m.HostReading))
        guarded.keys.revoke("rita")
        with refused("no longer"):
            rita.ask(m.SnapshotRequest, 0)
        with pytest.raises(NotAuthorisedError):
            while True:  # a test that goes on hearing takes too long
                next(items)
        before = guarded.state()
        for verb in verbs.VERBS:
            with refused("no longer"):
                rita.send(verb, {})
        assert guarded.state() == before
        kept = (item.seq for item in others if isinstance(item, m.HostReading))
        assert [number - first for number in itertools.islice(kept, 5)] == [1, 2, 3, 4, 5]  # what was missed is fetched
        items.close()  # type: ignore[attr-defined]
        others.close()  # type: ignore[attr-defined]
    with refused("trainctl keys authorize"), guarded.client("rita") as again:
        again.ask(m.RunsRequest)
    assert guarded.audited(what="any request", key=guarded.person("rita").user().public).count > len(verbs.VERBS)


def test_the_command_line_says_it_in_one_line_with_exit_code_6(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINCTL_CLUSTER", str(tmp_path / "none.toml"))
    monkeypatch.setenv("TRAINCTL_KEYS", str(guarded.person("vera", "viewer").path))
    key, at = guarded.keys.agent().public, guarded.agent.address
    assert main.main(["--server-key", key, "ls", "--connect", at]) == 0
    assert main.main(["send", "pause", "--connect", at, "--server-key", key]) == 6
    assert main.main(["ls", "--connect", at]) == 6
    said = capsys.readouterr().err.strip().splitlines()
    assert [line.startswith("trainctl: ") for line in said if "viewer" in line or "requires keys" in line] == [
        True,
        True,
    ]
    monkeypatch.setenv("TRAINCTL_SERVER_KEY", key)
    monkeypatch.setenv("TRAINCTL_KEYS", str(guarded.person("anna").path))
    assert main.main(["keys", "audit", "--connect", at]) == 0
    assert "command pause" in capsys.readouterr().out


def test_agents_speak_by_keys(guarded: Guarded, tmp_path: Path) -> None:
    """Two agents of one cluster: in touch by keys, out of touch when one's key is revoked, and back."""
    folders = {node: KeyFolder(tmp_path / node) for node in ("one", "two")}
    for node, folder in folders.items():
        folder.make(node)
        folder.authorize("anna", guarded.person("anna").user().public, "operator")
    with contextlib.closing(BlockingCluster(tmp_path, ("one", "two"), keys=folders.__getitem__)) as cluster:
        ring = Keyring(guarded.person("anna"), cluster_file.read(cluster.file))
        with cluster.client("one", keys=ring) as client:

            def peer() -> m.PeerView:
                return client.ask(m.SnapshotRequest, 0).peers[0]

            until(lambda: peer().state == "connected", 20, "the other agent")
            assert peer().key == folders["two"].agent().public
            folders["two"].revoke("one", folders["one"].agent().public)
            until(lambda: "trainctl keys authorize one" in peer().why, 10, "the refusal")
            folders["two"].authorize("one", folders["one"].agent().public, "node")
            until(lambda: peer().state == "connected", 20, "the other agent again")


def test_one_key_has_only_its_share_of_connections_and_others_come_in_once_some_go(guarded: Guarded) -> None:
    context: Any = zmq.Context()
    pair = guarded.person("eve", "viewer").user()
    waiting = []
    for number in range(2 * MOST_CONNECTIONS):
        socket = sockets.new_socket(context, zmq.DEALER)
        sockets.secure_client(socket, pair, guarded.keys.agent().public)
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.connect(guarded.agent.address)
        socket.send(codec.encode(m.RunsRequest(rid=str(number))))
        waiting.append(socket)

    def answered() -> list[Any]:
        return [socket for socket in waiting if socket.poll(0)]

    try:
        until(
            lambda: len(answered()) >= MOST_CONNECTIONS,
            30,
            "the connections of its share",
            progress=lambda: len(answered()),
        )
        with guarded.client("anna") as operator:
            for _ in range(20):
                operator.ask(m.RunsRequest)
        first = answered()
        assert len(first) <= MOST_CONNECTIONS + MOST_ARRIVALS
        for socket in first:
            waiting.remove(socket)
            socket.close(linger=0)
        until(lambda: len(answered()) == len(waiting), 30, "the others", progress=lambda: len(answered()))
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("address", ["tcp://10.0.0.5:7474", "tcp://127.0.0.1:7474"])
def test_tcp_needs_keys_on_loopback_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("TRAINCTL_KEYS", str(tmp_path / "none"))
    with pytest.raises(InvalidInputError, match=r"TCP needs keys: .*trainctl keys new"):
        Agent("box", address, state_root=tmp_path)
    with pytest.raises(InvalidInputError, match="TCP needs keys"):
        Agent("box", live=address, state_root=tmp_path)
    assert list(tmp_path.iterdir()) == []
