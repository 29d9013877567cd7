"""`trainctl demo --scripted`: a recorded real run played by as many agents as wanted, with the same faults each time.

The player is a process of its own that ends when its standard input does, so with this program however that ends.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.wire.attachment import Connection
from trainctl.tui.cli import agent_call, output, tables, watch
from trainctl.tui.cli.demo import close_pipes, summary

if TYPE_CHECKING:
    from trainctl.tui.state.view_state import ViewState

NODES = 8
SCREEN_SPEED, HEADLESS_SPEED = 1.0, 60.0
BEGIN_STEPS = 40
"""Steps that a screen finds there, so that its charts begin with something."""
END_SECONDS = 10.0


class ScriptedOptions(NamedTuple):
    """What was asked for on the command line."""

    nodes: int = NODES
    steps: int | None = None  # None: as many as were recorded
    speed: float | None = None  # times as fast as recorded; None: as recorded, far faster without a screen


def on_screen(wanted: ScriptedOptions) -> int:
    """Play the recording in the full screen. It stops when the screen closes."""
    from trainctl.protocol.config.names import user_name
    from trainctl.tui.app.launch import run_app  # Textual: only for the full screen

    with _player(wanted, wanted.speed or SCREEN_SPEED, BEGIN_STEPS) as address:
        return run_app(address, by=user_name(), say=_farewell)


def headless(wanted: ScriptedOptions) -> int:
    """Play to the end with events on standard error, print one JSON object, and return the exit code."""
    with _player(wanted, wanted.speed or HEADLESS_SPEED, 0) as address:
        view = agent_call.call(address, _followed)
        found = agent_call.call(address, lambda client: client.events(view.run, limit=500))
        played = summary(view)
    del played["run_directory"]  # it goes with the player
    severities = {name: sum(event.severity == name for event in found.events) for name in ("warning", "error")}
    commands = [event.verb for event in found.events if event.kind == "command" and event.verb]
    output.emit_ok(recording=True, **played, events=len(found.events), **severities, commands=commands)
    return 0


async def _followed(client: Any) -> m.RunView:
    view: m.RunView | None = None
    async for item in watch.lines(client, from_start=True, until_end=True):
        match item:
            case m.Event():
                sys.stderr.write(f"{tables.event_line(item)}\n")
            case m.RunView():
                view = item
            case m.StepCommitted() | m.Sample() | Connection() | watch.Restarted():
                pass
    view = (await client.snapshot(0)).run or view
    if view is None:
        raise RefusedError("the recording's player has no run: start the demo again")
    return view


def _farewell(state: "ViewState", address: str) -> str:
    step = state.run.step if state.run is not None else 0
    return f"the recording ended at step {step:,}; nothing was trained"


@contextlib.contextmanager
def _player(wanted: ScriptedOptions, speed: float, begin: int) -> Iterator[str]:
    """The address of the first node of a player that lives as long as this."""
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "play", "--leash", f"--nodes={wanted.nodes}"]
    command += [f"--speed={speed}", f"--begin={begin}"]
    command += [f"--steps={wanted.steps}"] if wanted.steps is not None else []
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, start_new_session=True
        )
        try:
            yield _address(process, said)
        finally:
            _end(process)


def _address(process: "subprocess.Popen[bytes]", said: IO[bytes]) -> str:
    """Raises InvalidInputError with what it said instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if line:
        address: str = json.loads(line)["listen"]
        return address
    process.wait()
    said.seek(0)
    words = said.read().decode("utf-8", "replace").strip().splitlines()
    problem = words[-1].removeprefix("trainctl-agent: ") if words else f"its player exited with {process.returncode}"
    raise InvalidInputError("--scripted", problem)


def _end(process: "subprocess.Popen[bytes]") -> None:
    close_pipes(process)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
