"""The options that subcommands share, and which agent they mean by them."""

import contextlib
import copy
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainctl.protocol.errors import TrainctlError
from trainctl.tui.commands import targets

COMPLETION_SECONDS = 1.0
"""Seconds that a shell waits for an agent to name its runs or nodes."""


def _checked_key(key: str | None) -> str | None:
    if key is None:
        return None
    from trainctl.protocol.config import addresses

    return addresses.check_public(key)


def _or_before(ctx: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
    """Return what was given before the command, where nothing is given after it."""
    return value or ctx.find_root().params.get(option.name or "") or value


Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        metavar="ADDRESS",
        callback=_or_before,
        show_default=False,
        help="Address of the agent, tcp://host:port or ipc:///path. Default: $TRAINCTL_CONNECT, or the agent on this "
        "machine.",
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        callback=_or_before,
        show_default=False,
        help="Cluster file whose agents are tried in order. Default: $TRAINCTL_CLUSTER, or the user's cluster.toml.",
    ),
]
ServerKey = Annotated[
    str | None,
    typer.Option(
        "--server-key",
        metavar="KEY",
        callback=_checked_key,
        show_default=False,
        help="The agent's public key, if the cluster file doesn't have it. Default: $TRAINCTL_SERVER_KEY.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=_or_before,
        help="Settings file for the full screen. Default: the user's config.toml.",
    ),
]


def agents_of(ctx: typer.Context) -> targets.Where:
    """Return the agents to ask for a completion, as far as the command line names them."""
    params = ctx.params
    return where(ctx, params.get("connect"), params.get("cluster"))


def complete_nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the nodes that begin like this, for the shell."""
    from trainctl.protocol.messages import SnapshotRequest
    from trainctl.tui.cli import agent_call

    names: list[str] = []
    with contextlib.suppress(TrainctlError):
        agents = agents_of(ctx)
        if agents.cluster is not None:
            names += agents.cluster.nodes
        else:
            address = agents.addresses[0]
            seen = agent_call.call(
                address, lambda client: client.ask(SnapshotRequest, 0), answer_seconds=COMPLETION_SECONDS
            )
            names += [seen.node.node, *(peer.node for peer in seen.peers)]
    return [node for node in dict.fromkeys(names) if node.startswith(incomplete)]


Node = Annotated[str | None, typer.Option("--node", help="The node to act on.", autocompletion=complete_nodes)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON; with --follow, one object per line.")]
ReadOnly = Annotated[bool, typer.Option("--read-only", callback=_or_before, help="Watch only: send no commands.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for it to be applied.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value in the run file, such as optimizer.learning_rate=1e-3; "
        "nodes=a,b names all nodes that take part.",
    ),
]


def where(ctx: typer.Context, connect: str | None, cluster: Path | None, *, simulated: bool = False) -> targets.Where:
    """Return the agents to ask. The first of these that is set wins: --connect (before or after the command),
    --cluster, $TRAINCTL_CONNECT, the default cluster file, the only agent on this machine. `simulated`: also nodes that
    are only described for `trainctl simulate`."""
    given = connect or (os.environ.get("TRAINCTL_CONNECT") if cluster is None else None)
    found = None if given else targets.cluster_file(cluster, simulated=simulated)
    targets.use_keys(found if cluster is not None else None, ctx.find_root().params.get("server_key"))
    if found is not None:
        return targets.Where(found.addresses, found)
    return targets.Where((given,)) if given else targets.on_this_machine()


def share_server_key(given: Any, command: Any) -> None:
    """Add the option `given` to each command and subcommand that takes --connect."""
    for below in getattr(command, "commands", {}).values():
        share_server_key(given, below)
    if any(option.name == "connect" for option in command.params):
        shared = copy.copy(given)
        shared.expose_value, shared.callback = False, _keep_key
        command.params.append(shared)


def _keep_key(ctx: typer.Context, _: Any, key: str | None) -> None:
    if key is not None:
        ctx.find_root().params["server_key"] = _checked_key(key)


class WholeSummaries(TyperGroup):
    """A group whose help gives the summaries of its commands whole, wrapped where they are long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(1000)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def subgroup(summary: str) -> typer.Typer:
    """Return a command that only has subcommands."""
    return typer.Typer(cls=WholeSummaries, rich_markup_mode=None, help=summary)


def subcommands() -> typer.Typer:
    """Return a group for one file's commands. The `trainctl` command adds them to its own."""
    return typer.Typer(rich_markup_mode=None)
