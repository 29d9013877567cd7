"""Who may connect and say what: the roles, a dead auth, borrowed identities, the audit's bounds, networks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from tests.waiting import HANG_SECONDS, PATIENT_MILLISECONDS
from tools.protocol_docs import examples

from trainctl.node_agent.auth.access_list import LIVE, MOST_ENTRIES, REQUESTS, AccessList, Audit, Rights, Subject
from trainctl.node_agent.auth.authenticator import Authenticator
from trainctl.node_agent.records.agent_db import MAX_REFUSALS, AgentDb
from trainctl.node_agent.runs import preflight
from trainctl.node_agent.runs.preflight import Placement
from trainctl.protocol import messages as m
from trainctl.protocol.config.cluster_file import Cluster, NodeEntry
from trainctl.protocol.config.run_file import parse
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError
from trainctl.protocol.security.keys import KeyFolder, KeyPair
from trainctl.protocol.wire import sockets

ANNA, BOB, MBP = (KeyPair.new(name) for name in ("anna", "bob", "mbp"))
IDENTITIES = {ANNA: b"\0anna", BOB: b"\0bob1", MBP: b"\0mbp1"}
SENDERS = {pair: sockets.Sender(pair.public, number) for number, pair in enumerate(IDENTITIES)}


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    made = KeyFolder(tmp_path / "keys")
    made.make("studio")
    made.authorize("anna", ANNA.public, "operator")
    made.authorize("bob", BOB.public, "viewer")
    return made


@pytest.fixture
def db(tmp_path: Path) -> Any:
    with AgentDb(tmp_path / "agent.db") as opened:
        yield opened


@pytest.fixture
def auth(folder: KeyFolder, db: AgentDb) -> Authenticator:
    nodes = {
        "studio": NodeEntry(address="tcp://127.0.0.1:1"),
        "mbp": NodeEntry(address="tcp://127.0.0.1:2", key=MBP.public),
    }
    made = Authenticator(folder, Cluster(nodes=nodes), "studio", Audit(db))
    for sender in SENDERS.values():
        made._callers[REQUESTS].opened(sender.descriptor)
    return made


SPOKEN = [*examples.EXAMPLES["client to agent"].values(), *examples.EXAMPLES["lead to follower"].values()]


def enter(auth: Authenticator, pair: KeyPair) -> tuple[bytes, Rights]:
    return auth.enter(IDENTITIES[pair], SENDERS[pair])


def allowed(auth: Authenticator, pair: KeyPair, lead: str | None = "mbp") -> set[type]:
    """The kinds of messages that a key may send."""
    found = set()
    for message in SPOKEN:
        with contextlib.suppress(NotAuthorisedError):
            spoken: Any = message
            auth.check(pair.public, enter(auth, pair)[1], spoken, lead)
            found.add(type(message))
    return found


OF_AGENTS = {m.HostWork, m.WorkFileRequest, m.SliceRequest, m.LinkRequest}
OF_NODES = {m.LogRequest, m.TraceRequest, m.WorksRequest}
OF_OPERATORS = {
    m.Command, m.AuditRequest, m.DigestsRequest, m.DiskRequest, m.AttachRun, m.RunSteps, m.EndRun, m.OpenWork,
    m.WorkRows, m.WorkResultsRequest, m.EndWork, m.CalibrateRequest, m.HookTestRequest, m.EditRun,
}  # fmt: skip


def test_each_role_says_what_is_its_own(auth: Authenticator) -> None:
    every = {type(message) for message in SPOKEN}
    peers = {type(message) for message in examples.EXAMPLES["lead to follower"].values()}
    assert allowed(auth, ANNA) == every - peers - OF_AGENTS
    assert allowed(auth, BOB) == every - peers - OF_AGENTS - OF_OPERATORS
    assert allowed(auth, MBP) == peers | OF_AGENTS - {m.HostWork} | OF_NODES  # the example is led by studio


def test_a_nodes_key_speaks_for_that_node_alone(auth: Authenticator) -> None:
    assert allowed(auth, MBP, lead="studio") == {m.WorkFileRequest, m.SliceRequest, m.LinkRequest} | OF_NODES
    assert allowed(auth, MBP, lead=None) == allowed(auth, MBP)  # of no conversation: it is refused as that


def test_a_node_asks_for_and_answers_slices_as_itself(auth: Authenticator) -> None:
    _, rights = enter(auth, MBP)
    answer = m.SliceRequest(rid="r", work="abcd", node="mbp", state="idle", answered=0, results=(b"{}",))
    auth.check(MBP.public, rights, answer, None)
    for message in (
        msgspec.structs.replace(answer, node="studio"), msgspec.structs.replace(answer, node="forge", answered=None),
        m.HostWork(rid="r", work="abcd", kind="answers", run="a", lead="studio", config={}, checkpoint=1, files={}),
    ):  # fmt: skip
        with pytest.raises(NotAuthorisedError, match="mbp's key may not act for"):
            auth.check(MBP.public, rights, message, None)
    with pytest.raises(NotAuthorisedError, match="only agents may send this"):
        auth.check(ANNA.public, enter(auth, ANNA)[1], answer, None)


def test_the_role_is_looked_up_for_every_message(auth: Authenticator, folder: KeyFolder) -> None:
    assert m.Command in allowed(auth, ANNA)
    caller, _ = enter(auth, ANNA)
    assert auth.reply_identity(caller) == IDENTITIES[ANNA]
    folder.authorize("anna", ANNA.public, "viewer")
    assert m.Command not in allowed(auth, ANNA)
    folder.revoke("anna")
    assert allowed(auth, ANNA) == set()
    assert auth.reply_identity(caller) is None
    folder.revoke("mbp", MBP.public)  # the cluster file still names it
    assert allowed(auth, MBP) == set()
    with pytest.raises(InvalidInputError, match="revoked"):
        auth.to_peer("mbp", "tcp://127.0.0.1:2")


def test_a_list_that_cannot_be_read_lets_nobody_in(auth: Authenticator, folder: KeyFolder) -> None:
    folder.authorized_path.write_text("[keys")
    assert allowed(auth, ANNA) == set()
    assert not auth.callback(REQUESTS, ANNA.public.encode())
    assert "authorized.toml" in auth.access.problem


def test_an_identity_is_one_connections_and_not_chosen(auth: Authenticator) -> None:
    enter(auth, ANNA)
    for identity in (IDENTITIES[ANNA], b"anna", b"\0long-one"):
        with pytest.raises(NotAuthorisedError, match="identity"):
            auth.enter(identity, SENDERS[BOB])
    assert auth.reply_identity(b"\0none" + bytes(8)) is None


def test_the_author_is_the_keys_name_whoever_the_sender_says_it_is(auth: Authenticator) -> None:
    _, rights = enter(auth, ANNA)
    said = examples.EXAMPLES["client to agent"]["command"]
    assert isinstance(said, m.Command)
    signed = auth.signed(rights, m.Command(rid="r", id=said.id, verb="pause", by="root"))
    assert isinstance(signed, m.Command)
    assert signed.by == "anna"


def test_a_question_that_goes_wrong_is_answered_with_no(auth: Authenticator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert auth.callback(REQUESTS, ANNA.public.encode())
    assert not auth.callback(LIVE, MBP.public.encode())  # agents don't subscribe
    assert not auth.callback(REQUESTS, b"\xff")
    monkeypatch.setattr(AccessList, "lets_in", lambda *_: 1 / 0)
    assert not auth.callback(REQUESTS, ANNA.public.encode())


def test_the_cluster_file_must_name_this_agents_own_key(folder: KeyFolder, db: AgentDb) -> None:
    other = Cluster(nodes={"studio": NodeEntry(address="tcp://127.0.0.1:1", key=MBP.public)})
    with pytest.raises(InvalidInputError, match=r"nodes\.studio\.key"):
        Authenticator(folder, other, "studio", Audit(db))


def test_the_audit_is_bounded_and_counts(db: AgentDb) -> None:
    audit = Audit(db)
    for number in range(3 * MOST_ENTRIES):
        audit.note(Subject("", str(number), "connect", "unknown"))
    for _ in range(5):
        audit.note(Subject("", "0", "connect", "unknown"))
    audit.flush(force=True)
    kept = db.refusals(500)
    assert len(kept) == MOST_ENTRIES + 1
    assert sum(one.count for one in kept) == 3 * MOST_ENTRIES + 5
    assert next(one.count for one in kept if one.key == "0") == 6
    db.keep_refusals([(number, 0, 0, 1, "", "", "", "", "") for number in range(1000, 1001 + MAX_REFUSALS)])
    assert len(db.refusals(3 * MAX_REFUSALS)) == MAX_REFUSALS
    assert Audit(db)._last_number == 1000 + MAX_REFUSALS  # numbers go on after a restart


@contextlib.asynccontextmanager
async def served(auth: Authenticator, *, alive: bool) -> AsyncIterator[tuple[Any, str]]:
    """A socket behind a auth, and its address; the auth answers, or its auth has died."""
    context = zmq.asyncio.Context()
    auth.open(context)
    task = asyncio.create_task(auth.serve())
    socket = sockets.new_socket(context, zmq.ROUTER)
    sockets.secure_server(socket, auth.pair, REQUESTS)
    auth.watch(context, socket, REQUESTS)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    if not alive:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    try:
        yield socket, f"tcp://127.0.0.1:{port}"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        auth.close()
        context.destroy(linger=0)


def new_client(context: Any, auth: Authenticator, pair: KeyPair, address: str, identity: bytes = b"") -> Any:
    client = sockets.new_socket(context, zmq.DEALER, socket_class=zmq.Socket)
    if identity:
        client.setsockopt(zmq.ROUTING_ID, identity)
    sockets.secure_client(client, pair, auth.pair.public)
    client.connect(address)
    return client


async def say(client: Any, said: bytes) -> None:
    while not client.poll(0, zmq.POLLOUT):  # bounded by the test's own deadline
        await asyncio.sleep(0.01)
    client.send(said, zmq.DONTWAIT)


async def heard(auth: Authenticator, client: Any, socket: Any, said: bytes) -> tuple[bytes, bytes]:
    """A client's message as it arrives: the caller, and the identity."""
    await say(client, said)
    while True:
        frames, sender = await sockets.receive_from(socket)
        if frames[1] == said:
            return auth.enter(frames[0], sender)[0], frames[0]


@pytest.mark.parametrize("speaks", [False, True], ids=["listens", "speaks"])
async def test_who_takes_the_identity_of_one_that_left_gets_no_reply_of_its(auth: Authenticator, speaks: bool) -> None:
    """Anna asks and hangs up; Bob, a viewer, comes under the identity that she had, and that he knows."""

    async def act() -> None:
        async with served(auth, alive=True) as (socket, address):
            context = zmq.asyncio.Context()
            try:
                anna = new_client(context, auth, ANNA, address)
                caller, identity = await heard(auth, anna, socket, b"question")
                assert auth.reply_identity(caller) == identity
                anna.close(linger=0)
                while auth.reply_identity(caller) is not None:
                    await asyncio.sleep(0.01)
                bob = await taken(context, identity, socket, address)
                if speaks:
                    assert (await heard(auth, bob, socket, b"mine"))[1] == identity
                await socket.send_multipart([identity, b"by identity alone"])
                assert bob.poll(PATIENT_MILLISECONDS) and bob.recv() == b"by identity alone", "it has what Anna had"
                assert auth.reply_identity(caller) is None
            finally:
                context.destroy(linger=0)

    async def taken(context: Any, identity: bytes, socket: Any, address: str) -> Any:
        """A client that has the identity; one that comes too soon is ignored by the socket."""
        number = 0
        while True:
            number += 1
            bob, own = new_client(context, auth, BOB, address, identity), b"taken %d" % number
            await say(bob, own)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    while (await sockets.receive_from(socket))[0][1] != own:
                        pass  # of one that came too soon, and was taken for it after all
                    return bob
            bob.close(linger=0)

    async with asyncio.timeout(HANG_SECONDS):
        await act()


async def test_an_unknown_key_is_turned_away(auth: Authenticator, db: AgentDb) -> None:
    stranger, context = KeyPair.new("stranger"), zmq.asyncio.Context()
    async with asyncio.timeout(HANG_SECONDS), served(auth, alive=True) as (socket, address):
        try:
            unknown = new_client(context, auth, stranger, address)
            await heard(auth, new_client(context, auth, BOB, address), socket, b"mine")
            while not db.refusals(5):
                await asyncio.sleep(0.01)
                auth._audit.flush(force=True)
            assert not unknown.poll(0, zmq.POLLOUT), "it is not connected"
        finally:
            context.destroy(linger=0)
    refused = [(one.key, one.what, one.address) for one in db.refusals(5)]
    assert refused == [(stranger.public, "connect requests", "127.0.0.1")]


async def test_a_dead_authenticator_lets_nobody_in(auth: Authenticator) -> None:
    async with served(auth, alive=False) as (_, address):
        with zmq.Context() as context, new_client(context, auth, ANNA, address) as anna:
            assert not anna.poll(300, zmq.POLLOUT), "it is not connected"


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a network card."""
    lo, card = (
        psutil.net_if_addrs()["lo"][0],
        psutil.net_if_addrs()["lo"][0]._replace(address="10.0.0.7", netmask="255.255.255.0"),
    )
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [lo], "eth7": [card]})


@pytest.mark.parametrize(
    ("name", "networks", "problem"),
    [
        ("eth7", (), r'eth7 \(10\.0\.0\.7\) of studio .* trusted_networks = \["10\.0\.0\.0/24"\]'),
        ("eth7", ("10.0.1.0/24",), r"is outside the trusted networks"),
        ("eth7", ("10.0.0.0/24",), ""),
        ("lo", (), ""),
        ("", ("10.0.0.0/24",), r"name the interface .* eth7 \(10\.0\.0\.7\)"),
    ],
)
def test_gradients_off_loopback_need_a_trusted_network(interface, name, networks, problem):
    config = parse(
        {
            "run": {"name": "r", "steps": 1}, "model": {"path": "/m"},
            "data": {"path": "/d", "tokenizer": "bytes", "sequence_length": 8},
            "batch": {"global": 2, "micro": 1}, "optimizer": {"learning_rate": 1e-3},
            "nodes": {"studio": {"interface": name}, "mbp": {}},
        },
        "config",
    )  # fmt: skip
    placement = Placement("tcp://10.0.0.7:7474", Cluster(trusted_networks=networks))
    if problem:
        with pytest.raises(InvalidInputError, match=r"config: nodes\.studio\.interface: .*" + problem):
            preflight.check_network(config, "studio", "config", placement)
    else:
        preflight.check_network(config, "studio", "config", placement)


def test_a_list_of_keys_lets_in_again_once_its_mode_is_right_and_nobody_once_it_is_not(folder: KeyFolder) -> None:
    access = AccessList(folder, Cluster())
    for mode, is_let_in in ((0o600, True), (0o664, False), (0o600, True)):
        folder.authorized_path.chmod(mode)
        assert (access.find(ANNA.public) is not None) is is_let_in
        assert ("chmod go-w" in access.problem) is not is_let_in
