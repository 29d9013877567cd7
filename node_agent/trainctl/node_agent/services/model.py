"""What a service of the agent is, and the steps that install and remove it; all of it values."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Manager = Literal["systemd", "launchd"]
Scope = Literal["system", "user"]
STOP_SECONDS = 120
"""Seconds, at least, that an agent may take to end before it is killed."""
GRACE_SECONDS = 15.0
"""Seconds within which a node leaves its run by default once its agent is terminated. What ends the agent, such as
Kubernetes, must wait longer."""
GRACE_MARGIN_SECONDS = 15
"""Seconds more than its grace that an agent which drains its node is given to end."""
OPEN_FILES = 65536
WATCHDOG_SECONDS = 30
"""Seconds after which a hung event loop ends the agent, by systemd or, under launchd, by itself."""
_BIN = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Service:
    """One agent that starts with the machine (`system`) or with a person's session (`user`)."""

    node: str
    command: tuple[str, ...]  # program and arguments, in the foreground
    scope: Scope
    user: str  # whom it runs as
    logs: Path  # the node's folder of logs
    nice: int | None = None  # None: as the manager has it
    environment: tuple[tuple[str, str], ...] = ()  # its own, by name

    @property
    def stop_seconds(self) -> int:
        """Seconds it may take to end before it is killed: more than the grace of a node that drains."""
        if "--grace" not in self.command:
            return STOP_SECONDS
        grace_seconds = float(self.command[self.command.index("--grace") + 1])
        return max(STOP_SECONDS, math.ceil(grace_seconds) + GRACE_MARGIN_SECONDS)


class State(NamedTuple):
    """How a manager has the service now."""

    loaded: bool = False  # the manager knows it
    enabled: bool = False  # it starts by itself
    running: bool = False
    pid: int | None = None
    detail: str = ""  # in the manager's words


class Write(NamedTuple):
    """Put a file in its place, whole or not at all."""

    path: Path
    data: bytes


class Folder(NamedTuple):
    """Make a folder that is the user's, and what of it lacks, for no one else to read."""

    path: Path
    user: str


class Remove(NamedTuple):
    """Remove a file."""

    path: Path


class Call(NamedTuple):
    """Run a manager's command; `else_say` of one that may fail is what holds then."""

    words: tuple[str, ...]
    else_say: str = ""


class UntilFails(NamedTuple):
    """Run a command again and again until it fails: what it asks for is gone."""

    words: tuple[str, ...]
    seconds: float


Step = Write | Folder | Remove | Call | UntilFails


class Installed(NamedTuple):
    """What an installed file says of itself."""

    node: str
    logs: Path


def search_path(program: str, manager: Manager) -> str:
    """PATH of a service whose interpreter is `program`: its own folder, and where tools such as macmon are installed,
    for a manager gives little of it."""
    own = str(Path(program).parent)
    return f"{own}:/opt/homebrew/bin:{_BIN}" if manager == "launchd" else f"{own}:{_BIN}"


def variables(service: Service, manager: Manager) -> dict[str, str]:
    """The environment that the agent is given."""
    return {"PATH": search_path(service.command[0], manager), **dict(service.environment)}
