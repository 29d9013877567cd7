"""A line server that loops in this process find, or none."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.protocol.support.line_server import LineServer


@pytest.fixture
def no_agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tg-") as folder:
        monkeypatch.setenv("TRAINCTL_GUEST_SOCKET", f"{folder}/guests.sock")
        monkeypatch.setenv("TRAINCTL_GUEST_STATE", folder)
        yield Path(folder)


@pytest.fixture
def server(no_agent: Path) -> Iterator[LineServer]:
    server = LineServer(no_agent / "guests.sock").start()
    yield server
    server.stop()
