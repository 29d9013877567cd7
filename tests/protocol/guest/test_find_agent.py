"""The agents that run here, by their files."""

import fcntl
import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from trainctl.guest.find_agent import sockets, state_folder
from trainctl.protocol.client.local_agents import registered
from trainctl.protocol.config.names import state_root


def registration(folder: Path, held: ExitStack, name: str, *, locked: bool = True, **fields: Any) -> None:
    path = folder / ".agents" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    own = {"node": name, "address": f"tcp://{name}", "host": socket.gethostname(), "socket": f"/run/{name}.sock"}
    path.write_text(json.dumps(own | fields))
    file = held.enter_context(path.open("rb"))
    if locked:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_the_preferred_agent_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    monkeypatch.delenv("TRAINCTL_CONNECT", raising=False)
    assert sockets() == []
    cluster = ["tcp://b", "tcp://a"]
    with ExitStack() as held:
        registration(tmp_path, held, "a", cluster=cluster, state="/srv")
        registration(tmp_path, held, "b", cluster=cluster)
        registration(tmp_path, held, "killed", locked=False)
        registration(tmp_path, held, "elsewhere", host="another")
        registration(tmp_path, held, "older", socket="")
        assert sockets() == [("/run/b.sock", tmp_path), ("/run/a.sock", Path("/srv"))]
        monkeypatch.setenv("TRAINCTL_CONNECT", "tcp://a")
        assert [path for path, _ in sockets()] == ["/run/a.sock", "/run/b.sock"]
        monkeypatch.setenv("TRAINCTL_GUEST_SOCKET", "/run/mine.sock")
        assert sockets() == [("/run/mine.sock", tmp_path)]


def test_the_folders_are_those_of_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TRAINCTL_STATE", ""), ("XDG_STATE_HOME", ""), ("XDG_STATE_HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
        assert state_folder() == state_root()
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    assert state_folder() == state_root() == tmp_path
    with registered("studio", "tcp://x"):  # an agent whose socket isn't there yet
        assert sockets() == []
