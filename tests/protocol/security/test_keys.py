"""A machine's keys: files that nobody else can read at any moment, names and roles, and which keys a client uses."""

import functools
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from trainctl.protocol.config import cluster_file
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError
from trainctl.protocol.security import keyring, keys
from trainctl.protocol.security.keyring import Credentials, Keyring
from trainctl.protocol.security.keys import KeyFolder, KeyPair
from trainctl.protocol.wire import handshake

STUDIO, MBP = KeyPair.new("studio"), KeyPair.new("mbp")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KeyFolder:
    monkeypatch.delenv("TRAINCTL_SERVER_KEY", raising=False)
    monkeypatch.setenv("TRAINCTL_CLUSTER", str(tmp_path / "no-cluster.toml"))
    return KeyFolder(tmp_path / "keys")


def test_files_are_their_owners_alone_from_the_first_byte(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(functools.partial(os.umask, os.umask(0)))
    seen: set[int] = set()
    dump = keys.tomli_w.dump

    def watched(tables: dict[str, Any], file: Any) -> None:
        seen.add(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        dump(tables, file)

    monkeypatch.setattr(keys.tomli_w, "dump", watched)
    assert folder.make("studio") == ("agent", "user")
    assert seen == {0o600}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()}
    assert made == dict.fromkeys(("agent.toml", "user.toml", "authorized.toml", ".lock"), 0o600)
    assert folder.make("studio") == ()  # what is there stays


def test_the_own_user_is_let_in_and_a_secret_that_others_can_read_is_refused(folder: KeyFolder) -> None:
    folder.make("studio")
    entry = folder.authorized().find(folder.user().public)
    assert entry is not None and (entry[0], entry[1].role) == (folder.user().name, "operator")
    assert folder.user().secret not in repr(folder.user())
    (folder.path / "agent.toml").chmod(0o644)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        folder.agent()


def test_a_revoked_key_is_no_ones_until_it_is_let_in_again(folder: KeyFolder) -> None:
    folder.authorize("anna", STUDIO.public, "viewer")
    folder.authorize("anna", STUDIO.public, "operator")
    assert folder.revoke("anna") == STUDIO.public
    table = folder.authorized()
    assert table.find(STUDIO.public) is None
    assert table.is_revoked(STUDIO.public)
    folder.revoke("mbp", MBP.public)  # one that only the cluster file names
    assert folder.authorized().is_revoked(MBP.public)
    folder.authorize("anna", STUDIO.public, "viewer")
    assert folder.authorized().find(STUDIO.public) is not None
    assert not folder.authorized().is_revoked(STUDIO.public)


def test_what_is_no_name_key_or_role_changes_nothing_and_one_key_has_one_name(folder: KeyFolder) -> None:
    refused: tuple[tuple[str, str, Any, str], ...] = (
        ("", STUDIO.public, "viewer", "not a name"),
        ("anna\n", STUDIO.public, "viewer", "not a name"),
        ("anna", "short", "viewer", "not a key"),
        ("anna", f"{STUDIO.public}\n", "viewer", "not a key"),
        ("anna", STUDIO.public, "root", "viewer, operator, node"),
    )
    for name, public, role, words in refused:
        with pytest.raises(InvalidInputError, match=words):
            folder.authorize(name, public, role)
    assert not folder.authorized_path.exists()
    folder.authorize("anna", STUDIO.public, "viewer")
    with pytest.raises(InvalidInputError, match="anna"):
        folder.authorize("bob", STUDIO.public, "operator")
    with pytest.raises(InvalidInputError, match="known keys: anna"):
        folder.revoke("bob")


def test_writers_at_once_lose_nothing(folder: KeyFolder) -> None:
    pairs = [KeyPair.new(f"k{number}") for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda pair: folder.authorize(pair.name, pair.public, "viewer"), pairs))
    assert set(folder.authorized().keys) == {pair.name for pair in pairs}


def test_a_client_knows_agents_by_the_cluster_file_then_by_what_it_is_given(folder: KeyFolder) -> None:
    folder.make("here")
    entry = cluster_file.NodeEntry(address="tcp://127.0.0.1:7001", key=STUDIO.public)
    nodes = cluster_file.Cluster(nodes={"studio": entry})
    plain, given = Keyring(folder, nodes), Keyring(folder, nodes, MBP.public)
    assert plain.credentials("tcp://127.0.0.1:7001") == Credentials(folder.user(), STUDIO.public)
    assert plain.credentials("tcp://127.0.0.1:7002") is None
    assert given.credentials("tcp://10.9.8.7:7001") == Credentials(folder.user(), MBP.public)
    given.learn("tcp://10.9.8.8:7001", STUDIO.public)
    assert given.credentials("tcp://10.9.8.8:7001") == Credentials(folder.user(), STUDIO.public)
    with pytest.raises(InvalidInputError, match="--server-key"):
        plain.credentials("tcp://10.9.8.7:7001")


def test_this_machines_own_agent_is_known_and_one_without_a_key_refused(
    folder: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ("127.0.0.1", "localhost", "192.0.2.1", "no-such-host.invalid")
    assert [keyring.is_own(host) for host in hosts] == [True, True, False, False], "if a socket can be bound there"
    folder.make("here")
    monkeypatch.setattr(keyring, "is_own", lambda host: host == "10.9.8.7")
    own = Keyring(folder, cluster_file.Cluster()).credentials("tcp://10.9.8.7:7474")
    assert own == Credentials(folder.user(), folder.agent().public)
    ring = Keyring(folder, cluster_file.Cluster(), MBP.public)
    ring.learn("tcp://10.9.8.6:1", None)
    with pytest.raises(InvalidInputError):
        ring.credentials("tcp://10.9.8.6:1")


def test_nodes_of_cluster_d_are_in_the_cluster_and_trust_is_by_network(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        f"trusted_networks = ['10.0.0.0/24']\n[nodes.a]\naddress = 'tcp://10.0.0.1:1'\nkey = '{STUDIO.public}'\n"
    )
    (tmp_path / "cluster.d").mkdir()
    added = tmp_path / "cluster.d" / "b.toml"
    added.write_text(f"[nodes.b]\naddress = 'tcp://10.0.0.2:1'\nkey = '{MBP.public}'\n")
    found = cluster_file.read(path)
    assert list(found.nodes) == ["a", "b"]
    assert found.nodes_of(MBP.public) == {"b"}
    assert [found.trusts(at) for at in ("10.0.0.9", "10.0.1.9", "127.0.0.1")] == [True, False, True]
    added.write_text("[nodes.a]\naddress = 'tcp://10.0.0.2:1'\n")
    with pytest.raises(InvalidInputError, match=r"b\.toml: nodes\.a"):
        cluster_file.read(path)
    path.write_text("trusted_networks = ['10.0.0.1/24']\n")
    added.unlink()
    with pytest.raises(InvalidInputError, match="trusted_networks"):
        cluster_file.read(path)


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_handshake_is_judged_once_it_is_certain(with_keys: bool) -> None:
    own = Credentials(STUDIO, MBP.public) if with_keys else None
    judged = handshake.Handshakes("tcp://h:1", own)
    assert judged.take(zmq.EVENT_CONNECTED, 0, 1.0) is None
    assert judged.take(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32, 1.1) is None
    broken_off = judged.take(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32, 1.4)
    assert isinstance(broken_off, NotAuthorisedError) == with_keys  # a forwarded port to nowhere does that too
    mismatch = judged.take(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, handshake.MECHANISM_MISMATCH, 1.5)
    assert isinstance(mismatch, NotAuthorisedError)
    assert ("uses no keys" if with_keys else "requires keys") in str(mismatch)
    hangs = handshake.Handshakes("tcp://h:1", own)
    for at in (0.0, 3.0, 6.0):
        hangs.take(zmq.EVENT_CONNECTED, 0, at)
        assert hangs.take(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 11, at + 2.0) is None


def test_a_handshake_that_succeeds_forgives_an_agent_that_broke_off_before() -> None:
    """Each of two agents that end breaks off once; neither has another key than the one expected."""
    judged = handshake.Handshakes("tcp://h:1", Credentials(STUDIO, MBP.public))
    for event in (
        zmq.EVENT_CONNECTED,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_CONNECTED,
        zmq.EVENT_HANDSHAKE_SUCCEEDED,
        zmq.EVENT_CONNECTED,
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    ):
        assert judged.take(event, 32, 1.0) is None
    assert isinstance(judged.take(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 32, 1.1), NotAuthorisedError)


def test_a_list_of_keys_that_others_could_have_written_is_refused(folder: KeyFolder, tmp_path: Path) -> None:
    folder.make("studio")
    path = folder.authorized_path
    path.chmod(0o666)
    with pytest.raises(InvalidInputError, match=r"other users can write it \(mode 0666\)"):
        folder.authorized()
    path.chmod(0o600)
    assert folder.authorized().keys
    path.rename(tmp_path / "elsewhere.toml")
    path.symlink_to(tmp_path / "elsewhere.toml")
    with pytest.raises(InvalidInputError, match="is a link"):
        folder.authorized()
