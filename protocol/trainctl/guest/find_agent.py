"""Find the agent of this machine that records attached runs, by the files in which agents register."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def state_folder() -> Path:
    """Return the folder of this user's runs, where agents register and by default look for spool files."""
    if chosen := os.environ.get("TRAINCTL_STATE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path("~/Library/Application Support/trainctl").expanduser()
    return Path(os.environ.get("XDG_STATE_HOME", "").strip() or "~/.local/state").expanduser() / "trainctl"


def spool_state() -> Path:
    """Return the state folder for spool files while no agent is known: $TRAINCTL_GUEST_STATE, or the user's."""
    chosen = os.environ.get("TRAINCTL_GUEST_STATE")
    return Path(chosen) if chosen else state_folder()


def sockets() -> list[tuple[str, Path]]:
    """Return the sockets on which agents here listen for guests, the preferred one first, each with the state folder in
    which that agent looks for spool files.

    That is the one of $TRAINCTL_GUEST_SOCKET alone, else those of the agents that run: first the one at
    $TRAINCTL_CONNECT, then in the order of their cluster file.
    """
    if chosen := os.environ.get("TRAINCTL_GUEST_SOCKET"):
        return [(chosen, spool_state())]
    agents = _agents(state_folder() / ".agents")
    preferred = os.environ.get("TRAINCTL_CONNECT")
    agents.sort(key=lambda agent: (agent.get("address") != preferred, _place(agent), agent.get("node", "")))
    return [(agent["socket"], Path(agent.get("state") or spool_state())) for agent in agents]


def _agents(folder: Path) -> list[dict[str, Any]]:
    agents = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            agent = json.loads(file.read()) if _is_locked(file.fileno()) else {}
            if agent.get("socket") and agent.get("host") == socket.gethostname():
                agents.append(agent)
    return agents


def _is_locked(file: int) -> bool:
    """Return whether the agent that wrote a file lives: it holds a lock on it."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _place(agent: dict[str, Any]) -> int:
    cluster = agent.get("cluster") or ()
    return cluster.index(agent["address"]) if agent.get("address") in cluster else len(cluster)
