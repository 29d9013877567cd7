"""If no agent is running, offers a person at a terminal to start one here. It outlives this program."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainctl.protocol.client import local_agents
from trainctl.protocol.errors import RefusedError
from trainctl.tui.commands import targets

START_SECONDS = 30.0
LOOK_SECONDS = 0.05


def offer(at: targets.Where, tell: Callable[[str], None]) -> None:
    """Ask whether to start an agent if commands would go to this machine's, and none runs, and do so.

    Without a terminal, or a wish, nothing is done. Raises RefusedError if the agent doesn't start.
    """
    default = local_agents.default_address()
    if at.cluster is not None or at.addresses != (default,) or local_agents.running():
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    import typer

    if typer.confirm(f"No agent is running at {default}. Start one on this machine?", default=True, err=True):
        process, log = start()
        tell(f"an agent is running at {default}; its output is in {log}; stop it with: kill {process.pid}")


def start() -> tuple["subprocess.Popen[bytes]", Path]:
    """An agent in a session of its own, which listens by now, and where its output goes. Raises RefusedError."""
    from trainctl.protocol.config.names import node_name
    from trainctl.protocol.record.paths import node_directory

    log = node_directory(node_name()) / "logs" / "started.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "trainctl.node_agent", "run"]
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
    deadline = time.monotonic() + START_SECONDS
    while not local_agents.running():
        if process.poll() is not None or time.monotonic() >= deadline:
            process.terminate()
            lines = log.read_text("utf-8", "replace").strip().splitlines()
            raise RefusedError(f"the agent didn't start: {lines[-1] if lines else 'it printed nothing'} (see {log})")
        time.sleep(LOOK_SECONDS)
    return process, log
