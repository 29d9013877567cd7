"""`trainctl-agent`: the command line of a node's agent."""

import asyncio
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainctl.protocol.alerting import AlertHooks, check_command, check_webhook
from trainctl.protocol.cluster import Cluster, read_default
from trainctl.protocol.errors import InvalidInputError, TrainctlError
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
    cluster: Annotated[
        Path | None, typer.Option(help="The cluster.toml that names all nodes; default: the one of this machine.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="Where requests are taken; port 0 picks a free one. Default: as the cluster file says, or "
            f"tcp://127.0.0.1:{DEFAULT_PORT}."
        ),
    ] = None,
    live: Annotated[str | None, typer.Option(help="Where live messages go out; default: the port after.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for this machine's nodes and runs.")] = None,
    alert_command: Annotated[
        str, typer.Option(help="A program and its arguments, called about alerts; instead of the cluster file's.")
    ] = "",
    alert_webhook: Annotated[
        str, typer.Option(help="An http address that alerts are posted to; instead of the cluster file's.")
    ] = "",
    leash: Annotated[
        bool, typer.Option("--leash", hidden=True, help="Leave once standard input has ended and no run is active.")
    ] = False,
) -> None:
    """Run the agent in the foreground until SIGTERM; its trainers outlive it."""
    node = name or node_name()
    nodes = _cluster_of(node, cluster)
    if listen is None:
        listen = nodes.nodes[node].address if nodes.nodes else f"tcp://127.0.0.1:{DEFAULT_PORT}"
    hooks = _hooks(nodes, alert_command, alert_webhook)
    asyncio.run(_serve(node, listen, live, state, nodes, hooks, leash=leash))


def _hooks(cluster: Cluster, command: str, webhook: str) -> AlertHooks:
    """What is called about alerts: as the options say, or else the cluster file. Raises InvalidInputError."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise InvalidInputError("--alert-command", str(error)) from None
    check_command(AlertHooks(command=words), "--alert-command")
    check_command(cluster.alerts, "cluster file: alerts.command")
    check_webhook(AlertHooks(webhook=webhook), "--alert-webhook")
    return AlertHooks(command=words or cluster.alerts.command, webhook=webhook or cluster.alerts.webhook)


def _cluster_of(node: str, path: Path | None) -> Cluster:
    """The cluster that a node is in: that of the file given, which must name it, or of the default one if it does."""
    found = read_default(path)
    if node in found.nodes:
        return found
    if path is not None:
        known = ", ".join(found.nodes) or "none"
        raise InvalidInputError("--name", f"no node {node!r} in {path}; there are: {known}")
    return Cluster()


async def _serve(
    name: str, listen: str, live: str | None, state: Path | None, cluster: Cluster, hooks: AlertHooks, *, leash: bool
) -> None:
    from trainctl.node_agent.daemon import Agent

    async with Agent(name, listen, live, state, cluster, leashed=leash, hooks=hooks) as agent:
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
