"""Word to systemd: that the agent is ready, lives, and stops, as datagrams on the socket that it names.

The protocol (sd_notify(3)) is one line of text to a socket. The libraries for it are either bindings to libsystemd,
which must be there to build them, or as many lines as these with errors swallowed, so there is none among the
dependencies.
"""

import contextlib
import os
import socket
from collections.abc import MutableMapping


class Notifier:
    """Notifies this process's supervisor; without one, does nothing."""

    def __init__(self, address: str, watchdog_seconds: float | None) -> None:
        """`address` is a path, or a name that begins with @; empty: no one listens. `watchdog_seconds`: how long at
        most may lie between two beats, None if no one counts them."""
        self.watchdog_seconds = watchdog_seconds
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | _CLOSE_ON_EXEC) if address else None
        if self._socket is not None:
            self._socket.setblocking(False)  # a supervisor that hangs is no reason to
        self._said = ""

    def ready(self, status: str) -> None:
        """The agent serves."""
        self._say(f"READY=1\nSTATUS={status}")

    def beat(self, status: str) -> None:
        """The event loop turns; `status` is what the agent does, in a line."""
        words = ["WATCHDOG=1"] if self.watchdog_seconds is not None else []
        words += [f"STATUS={status}"] if status != self._said else []
        if words and self._say("\n".join(words)):
            self._said = status

    def stopping(self) -> None:
        """The agent ends of its own will."""
        self._say("STOPPING=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _say(self, text: str) -> bool:
        """Whether it was taken."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)
                return True
        return False


_CLOSE_ON_EXEC = getattr(socket, "SOCK_CLOEXEC", 0)


def from_environment(environment: MutableMapping[str, str], pid: int | None = None) -> Notifier:
    """What the supervisor has said it listens to; taken out of the environment, for it doesn't supervise trainers."""
    address = environment.pop("NOTIFY_SOCKET", "")
    microseconds, meant = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
    ours = meant in ("", str(os.getpid() if pid is None else pid))
    counted = ours and microseconds.isascii() and microseconds.isdigit() and int(microseconds) > 0
    return Notifier(address, int(microseconds) / 1e6 if address and counted else None)
