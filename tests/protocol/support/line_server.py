"""A line server in place of an agent's socket for guests: it keeps what it is sent, and answers or stays silent."""

import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

from tests.waiting import until


class LineServer:
    """Records what guests send; `step` and `event` are what it says it has."""

    def __init__(self, path: Path) -> None:
        self.path, self.received = path, list[dict[str, Any]]()
        self.is_silent = self.refuses = False
        self.rows: dict[int, dict[str, Any]] = {}
        self.repeated = 0
        self.step = self.event = 0
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def start(self) -> "LineServer":
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._begin(self._accept, self._listener)
        return self

    def stop(self) -> None:
        """End as a killed agent: all connections are closed."""
        for one in (self._listener, *self._connections):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        self.path.unlink(missing_ok=True)
        for thread in self._threads:
            thread.join()
        self._listener, self._connections, self._threads = None, [], []

    def forget(self) -> None:
        """Begin anew, as for another run."""
        self.received.clear()
        self.rows.clear()
        self.step = self.event = 0

    def order(self, verb: str, id: str | None = None, **args: Any) -> str:
        id = id or f"order-{verb}-{len(self.received)}"
        self._send(self._connections[-1], type="order", id=id, verb=verb, args=args)
        return id

    def outcome(self, id: str) -> dict[str, Any]:
        """Wait for the outcome of an order."""
        return until(lambda: next((one for one in self.outcomes() if one["id"] == id), None), what=f"outcome of {id}")

    def outcomes(self) -> list[dict[str, Any]]:
        return [one for message in self.of("steps") for one in message["outcomes"]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in list(self.received) if message["type"] == kind]

    def _begin(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._begin(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as file:
            try:
                for text in file:
                    message = json.loads(text)
                    self._hear(message)
                    if not self.is_silent:
                        self._send(connection, type="kept", step=self.step, event=self.event)
            except (OSError, ValueError):
                return

    def _hear(self, message: dict[str, Any]) -> None:
        self.received.append(message)
        match message["type"]:
            case "hello" if (after := message["attach"].get("after_step")) is not None and after < self.step:
                self.step = after
            case "steps":
                for row in message["steps"]:
                    if row["step"] > self.step:
                        self.rows[row["step"]] = row
                        self.step = row["step"]
                    else:
                        self.repeated += 1
            case "event":
                self.event = max(self.event, message["number"])
            case _:
                pass

    def _send(self, connection: socket.socket, **message: Any) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(message).encode() + b"\n")
