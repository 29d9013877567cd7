"""The subcommands over a run's record: `replay` shows it in the screens, `export` writes it as a table."""

from typing import Annotated

import typer

from trainctl.protocol.errors import InvalidInputError
from trainctl.tui import run_folders
from trainctl.tui.cli_options import subcommands
from trainctl.tui.output import has_screen

app = subcommands()

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or the id of a run on this machine.")]


@app.command()
def replay(
    run: RunArgument,
    speed: Annotated[float, typer.Option(min=0.25, max=4096, help="Times as fast as it was.")] = 8.0,
) -> int:
    """A run from its directory alone, in the same screens: played, paused, and moved along. It takes no commands."""
    directory = run_folders.find(run)
    if not has_screen():
        raise InvalidInputError("terminal", "a replay needs a terminal on standard input, output and error")
    from trainctl.tui.replay_app import run_replay  # Textual: only for the full screen

    return run_replay(directory, speed)
