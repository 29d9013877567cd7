"""`trainctl-agent run --detach`: an agent in a session of its own, which outlives the terminal that started it."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import typer

from trainctl.protocol.errors import InvalidInputError

OPTION = "--detach"


def detached(folder: Path) -> None:
    """Start this command line without the option, with what it prints in the node's folder, and print the line that
    says where the agent listens, with the process that stays: its supervisor. Raises InvalidInputError, and typer.Exit
    if the agent doesn't start, with its reason on standard error."""
    log = folder / "logs" / "started.log"
    command = [sys.executable, "-P", "-m", "trainctl.node_agent", *(word for word in sys.argv[1:] if word != OPTION)]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as said:  # not emptied: another agent may write to it
            begin = said.tell()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, start_new_session=True
            )
    except OSError as error:
        raise InvalidInputError(str(log), f"can't be written: {error.strerror}") from None
    assert process.stdout is not None
    with process.stdout as out:
        if line := out.readline():
            print(json.dumps(json.loads(line) | {"pid": process.pid}))
            return
    status = process.wait()
    with contextlib.suppress(OSError):
        print(log.read_bytes()[begin:].decode("utf-8", "replace").rstrip(), file=sys.stderr)
    raise typer.Exit(status)
