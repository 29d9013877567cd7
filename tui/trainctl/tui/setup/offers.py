"""Offers to a person at a terminal: to start an agent where none runs, and to download a model that isn't in the
Hugging Face cache.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from trainctl.protocol.client import local_agents
from trainctl.protocol.config.names import node_directory, node_name
from trainctl.protocol.errors import InvalidInputError, NotCachedError, RefusedError, installing
from trainctl.tui.commands import targets

START_SECONDS = 30.0
"""Seconds within which an agent says where it listens, also on a busy machine."""


def offer_agent(at: targets.Where, tell: Callable[[str], None]) -> None:
    """Ask whether to start an agent if commands would go to this machine's, and none runs, and do so.

    Nothing is done without a terminal, or if the person declines. Raises RefusedError if the agent doesn't start.
    """
    default = local_agents.default_address()
    if at.cluster is not None or at.addresses != (default,) or local_agents.running():
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    import typer

    if typer.confirm(f"No agent is running at {default}. Start one on this machine?", default=True, err=True):
        process, log = start_agent()
        tell(f"an agent is running at {default}; its output is in {log}; stop it with: kill {process}")


def start_agent() -> tuple[int, Path]:
    """Start an agent in a session of its own, and return its supervisor's process and where its output goes. Raises
    RefusedError."""
    log = node_directory(node_name()) / "logs" / "started.log"
    command = [sys.executable, "-m", "trainctl.node_agent", "run", "--detach"]
    try:
        started = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=START_SECONDS
        )
    except subprocess.TimeoutExpired:
        problem = f"the agent hasn't said where it listens for {START_SECONDS:g} s"
        raise RefusedError(f"{problem}: see {log}, and try again once it is up") from None
    if started.returncode:
        lines = started.stderr.strip().splitlines()
        raise RefusedError(f"the agent didn't start: {lines[-1] if lines else 'it printed nothing'} (see {log})")
    return json.loads(started.stdout)["pid"], log


def offer_download(missing: NotCachedError, *, may_ask: bool, tell: Callable[[str], None]) -> None:
    """Download the model if a person at the terminal agrees. Raises `missing` if nobody is there or they decline, and
    RefusedError if the download fails."""
    if not (may_ask and sys.stdin.isatty() and sys.stderr.isatty()):
        raise missing
    program = _program()
    try:
        if not typer.confirm(f"Download {missing.model} with hf download?", default=False, err=True):
            raise missing
        _download(program, missing.model)
    except (KeyboardInterrupt, typer.Abort):
        tell(f"trainctl: interrupted; to download the rest, run: hf download {missing.model}")
        raise


def _program() -> str:
    """hf on PATH, or beside this Python: a virtual environment need not be active."""
    own = Path(sys.executable).with_name("hf")
    found = shutil.which("hf") or (str(own) if own.is_file() else None)
    if found is None:
        raise InvalidInputError("hf", f"the Hugging Face command isn't on PATH; {installing('torch', 'mlx')}")
    return found


def _download(program: str, model: str) -> None:
    """Download a model with `program`, whose output goes to standard error: it is a note for the person."""
    status = subprocess.run([program, "download", model], stdout=sys.stderr, check=False).returncode
    if status:
        raise RefusedError(f"hf download {model} failed (exit status {status}); the lines above have the reason")
