"""`trainctl-agent`: the command line of a node's agent."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainctl.protocol.errors import TrainctlError
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
    announce: Annotated[Path | None, typer.Option(help="Write the bound addresses to this file, as JSON.")] = None,
) -> None:
    """Run the agent in the foreground until SIGTERM; its trainers outlive it."""
    asyncio.run(_serve(name or _host_name(), listen, live, state, announce))


async def _serve(name: str, listen: str, live: str | None, state: Path | None, announce: Path | None) -> None:
    from trainctl.node_agent.daemon import Agent

    async with Agent(name, listen, live, state) as agent:
        line = json.dumps({"name": name, "listen": agent.address, "live": agent.live_address, "pid": os.getpid()})
        print(line, flush=True)
        if announce is not None:
            draft = announce.with_name(announce.name + ".new")
            draft.write_text(line + "\n")
            draft.replace(announce)
        await agent.serve()


def _host_name() -> str:
    """The machine's name as a node name."""
    short = socket.gethostname().split(".")[0].lower()
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in short).strip("._-") or "node"


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
