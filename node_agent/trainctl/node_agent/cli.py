"""`trainctl-agent`: the command line of a node's agent."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.paths import node_name
from trainctl.protocol.sockets import DEFAULT_PORT

app = typer.Typer(
    name="trainctl-agent", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="The node agent: hosts this machine's trainer, conducts, records and publishes.",
)  # fmt: skip


@app.callback()
def root() -> None:
    """The node agent: hosts this machine's trainer, conducts, records and publishes."""


@app.command()
def run(
    name: Annotated[str, typer.Option(help="This node's name in run files.")] = "",
    listen: Annotated[str, typer.Option(help="Where requests are taken; port 0 picks a free one.")] = (
        f"tcp://127.0.0.1:{DEFAULT_PORT}"
    ),
    live: Annotated[str | None, typer.Option(help="Where live messages go out; default: the port after.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for this machine's nodes and runs.")] = None,
    leash: Annotated[
        bool, typer.Option("--leash", hidden=True, help="Leave once standard input has ended and no run is active.")
    ] = False,
) -> None:
    """Run the agent in the foreground until SIGTERM; its trainers outlive it."""
    asyncio.run(_serve(name or node_name(), listen, live, state, leash=leash))


async def _serve(name: str, listen: str, live: str | None, state: Path | None, *, leash: bool) -> None:
    from trainctl.node_agent.daemon import Agent

    async with Agent(name, listen, live, state, leashed=leash) as agent:
        line = {"name": name, "listen": agent.address, "live": agent.live_address, "pid": os.getpid()}
        print(json.dumps(line), flush=True)
        await agent.serve()


def main() -> None:
    """Entry point: every error that is the user's business is one line and an exit code."""
    try:
        app()
    except TrainctlError as error:
        print(f"trainctl-agent: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
