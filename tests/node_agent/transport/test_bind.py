"""An agent's Unix sockets: found without an address, closed to other users, and bound again when their files go."""

import asyncio
import contextlib
import functools
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.lacking import link_local_address
from tests.waiting import HANG_SECONDS, Patience

from trainctl.node_agent.agent import Agent
from trainctl.node_agent.transport import bind
from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.client.local_agents import registered
from trainctl.protocol.config.names import agent_address, node_directory
from trainctl.protocol.errors import InvalidInputError, TrainctlError, UnreachableError
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import KeyFolder

NOBODY = 65534
PROBE = (
    f"import os, socket, sys; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); "
    "socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
)


@contextlib.asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[Agent]:
    async with agent:
        serving = asyncio.create_task(agent.serve())
        yield agent
        agent.stop()
        await serving


def sockets_of(agent: Agent) -> list[Path]:
    return [Path(address.removeprefix("ipc://")) for address in (agent.address, agent.live_address)]


async def test_without_an_address_it_serves_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)  # of a careless shell
    try:
        agent = Agent("box", state_root=tmp_path)
        async with running(agent):
            assert agent.address == agent_address(node_directory("box", tmp_path))
            files = sockets_of(agent)
            assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
            assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700
            with registered("box", agent.address):
                async with Client() as client:
                    assert (await client.ask(m.FactsRequest)).node == "box"
                    heard = (item async for item in client.attach() if isinstance(item, m.Heartbeat))
                    assert (await anext(heard)).node == "box"
    finally:
        os.umask(before)
    assert not files[0].parent.exists(), "it leaves nothing behind"


@pytest.mark.needs("root")  # to be another user
async def test_another_user_cannot_connect_even_in_an_open_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    agent = Agent("box", f"ipc://{tmp_path}/box.sock", state_root=tmp_path)
    async with running(agent):
        for file in sockets_of(agent):
            done = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-S", "-c", PROBE, file], capture_output=True, text=True, check=False
            )
            assert "PermissionError" in done.stderr


async def test_sockets_whose_folder_goes_are_bound_again(tmp_path: Path) -> None:
    async with running(Agent("box", state_root=tmp_path)) as agent:
        folder = sockets_of(agent)[0].parent
        files = {"agent.sock", "agent.sock.live", "guests.sock", "trainers.sock"}
        for is_again in (False, True):
            if is_again:
                shutil.rmtree(folder)
            patience = Patience(30)
            while not folder.exists() or {file.name for file in folder.iterdir()} != files:
                assert not patience.is_over()
                await asyncio.sleep(0.05)
        assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
        async with Client(agent.address) as client:
            assert (await client.ask(m.FactsRequest)).node == "box"
            heard = (item async for item in client.attach() if isinstance(item, m.Heartbeat))
            assert (await anext(heard)).node == "box"


def test_a_node_s_folder_is_one_agent_s_and_names_it_even_after_its_lock_was_deleted(tmp_path: Path) -> None:
    with contextlib.closing(bind.FolderLock(tmp_path)) as lock:
        (tmp_path / "agent.lock").unlink()
        lock.look()
        with pytest.raises(InvalidInputError, match=f"another agent of this node is running \\(pid {os.getpid()} on "):
            bind.FolderLock(tmp_path)
    bind.FolderLock(tmp_path).close()


async def test_an_agent_whose_folder_another_one_took_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock file is deleted and a second agent starts before it looks again."""
    monkeypatch.setattr(bind, "LOST_SECONDS", 0.5)
    agent = Agent("box", state_root=tmp_path)
    async with agent:
        heard: list[str] = []
        agent.publisher.listeners.append(
            lambda said: heard.extend(alert.text for alert in said.alerts) if isinstance(said, m.Alerts) else None
        )
        (agent.directory / "agent.lock").unlink()
        with (
            contextlib.closing(bind.FolderLock(agent.directory)),
            pytest.raises(bind.TakenError, match="another agent of this node is running"),
        ):
            await asyncio.wait_for(agent.serve(), HANG_SECONDS)
        assert any("another agent of this node is running" in text for text in heard)


def test_a_folder_whose_second_agent_ends_is_the_first_one_s_again(tmp_path: Path) -> None:
    with contextlib.closing(bind.FolderLock(tmp_path)) as lock:
        (tmp_path / "agent.lock").unlink()
        with contextlib.closing(bind.FolderLock(tmp_path)):
            lock.look()
            assert lock.problem is not None
        lock.look()
        assert lock.problem is None
        with pytest.raises(bind.TakenError):
            bind.FolderLock(tmp_path)


async def test_what_is_there_is_never_taken_away(tmp_path: Path) -> None:
    note = tmp_path / "thesis.txt"
    note.write_text("mine")
    with pytest.raises(InvalidInputError, match=r"thesis\.txt is a file"):
        await Agent("box", f"ipc://{note}", state_root=tmp_path).__aenter__()
    assert note.read_text() == "mine"
    async with running(Agent("box", f"ipc://{tmp_path}/box.sock", state_root=tmp_path)) as agent:
        with pytest.raises(InvalidInputError, match="in use, perhaps by another agent"):
            await Agent("other", agent.address, state_root=tmp_path).__aenter__()
        async with Client(agent.address) as client:
            assert (await client.ask(m.FactsRequest)).node == "box"


async def test_a_socket_left_by_a_killed_agent_is_no_obstacle(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "box.sock"))
    agent = Agent("box", f"ipc://{tmp_path}/box.sock", state_root=tmp_path)
    async with running(agent), Client(f"ipc://{tmp_path}/box.sock") as client:
        assert (await client.ask(m.FactsRequest)).node == "box"


async def test_a_forwarded_socket_brings_live_messages_from_beside_it(tmp_path: Path) -> None:
    came: list[Path] = []

    async def relay(to: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on between both ends, as `ssh -L` does."""
        came.append(to)
        there, back = await asyncio.open_unix_connection(to)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))

    async with running(Agent("box", state_root=tmp_path)) as agent, contextlib.AsyncExitStack() as servers:
        for path, to in zip(("near.sock", "near.sock.live"), sockets_of(agent), strict=True):
            server = await asyncio.start_unix_server(functools.partial(relay, to), str(tmp_path / path))
            await servers.enter_async_context(server)
        async with Client(f"ipc://{tmp_path}/near.sock") as client:
            heard = (item async for item in client.attach() if isinstance(item, m.Heartbeat))
            assert (await anext(heard)).node == "box"
            assert came == sockets_of(agent)


@pytest.mark.needs("root")  # to give a file away
async def test_a_socket_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    os.chown(path, NOBODY, NOBODY)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(TrainctlError, match="another user's agent listens there"):
        await Client(f"ipc://{path}").__aenter__()


@pytest.mark.parametrize(
    "host", ["::1", pytest.param(link_local_address(), id="link-local", marks=pytest.mark.needs("link-local"))]
)
async def test_an_ipv6_address_is_one_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("TRAINCTL_KEYS", str(tmp_path / "keys"))
    KeyFolder().make("box")
    async with running(Agent("box", f"tcp://[{host}]:0", state_root=tmp_path)) as agent:
        assert agent.address.startswith(f"tcp://[{host}]:")
        keys = Keyring(server_key=agent.public_key)
        async with Client(agent.address, keys=keys) as client:
            assert (await client.ask(m.FactsRequest)).node == "box"
            heard = (item async for item in client.attach() if isinstance(item, m.Heartbeat))
            assert (await anext(heard)).node == "box"


@pytest.mark.parametrize(
    ("greeting", "says"),
    [(b"", "says nothing"), (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program answers")],
    ids=["silent", "http"],
)
async def test_what_is_there_instead_of_an_agent_is_named(greeting: bytes, says: str) -> None:
    """A program that says nothing is kept open; the other one closes the connection."""
    held = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        if greeting:
            writer.write(greeting)
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Client(address, keys=Keyring(), timeout_seconds=1.0) as client:
            with pytest.raises(TrainctlError, match=says):
                await client.ask(m.FactsRequest)
        for writer in held:
            writer.close()


async def test_an_agent_of_this_machine_that_hangs_is_named_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener, registered("box", f"ipc://{path}"):
        listener.bind(str(path))
        listener.listen()
        async with Client(f"ipc://{path}", timeout_seconds=0.5) as client:
            with pytest.raises(UnreachableError, match=rf"process {os.getpid()}, doesn't answer"):
                await client.ask(m.FactsRequest)
