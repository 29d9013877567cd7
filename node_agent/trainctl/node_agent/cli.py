"""`trainctl-agent`: the command line of a node's agent."""

import asyncio
import contextlib
import json
import logging
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from trainctl.node_agent.services import service_commands
from trainctl.node_agent.services.managed_service import GRACE_SECONDS
from trainctl.protocol.client.local_agents import registered
from trainctl.protocol.config.addresses import EXAMPLE_LISTEN, ListenAddress, check_listen, parse_listen
from trainctl.protocol.config.alert_rules import AlertHooks, check_command, check_webhook
from trainctl.protocol.config.cluster_file import Cluster, check_hooks, default_path, read_default
from trainctl.protocol.config.env_policy import AGENT_OPTIONS
from trainctl.protocol.config.names import node_directory, node_name, state_root
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.machine.large_imports import import_large
from trainctl.protocol.machine.standard_streams import exit_code, lossy_streams, open_closed
from trainctl.protocol.record.paths import runs_directory

if TYPE_CHECKING:
    from trainctl.node_agent.agent import Agent, Options

app = typer.Typer(
    name="trainctl-agent",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The node agent. It hosts this machine's trainers, and leads, records and publishes runs."""
    if version:
        from trainctl.protocol.machine.facts import installed_version

        print(f"trainctl-agent {installed_version('trainctl') or '(not installed)'}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        raise InvalidInputError("command", f"give one of {', '.join(ctx.command.commands)} (see --help)")  # type: ignore[attr-defined]


@app.command(
    short_help="Run the agent in the foreground until SIGTERM.",
    context_settings={"auto_envvar_prefix": AGENT_OPTIONS.removesuffix("_")},
)
def run(
    name: Annotated[str, typer.Option(help="This node's name in run files.")] = "",
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file with all nodes; default: this machine's cluster.toml.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="Address for requests: ipc:///path, or tcp://host:port, which needs keys; port 0 picks a free one. "
            "Default: the cluster file's, or a Unix socket that only this user can open."
        ),
    ] = None,
    live: Annotated[
        str | None,
        typer.Option(help="Address for live messages. Default: the port after --listen's, or its path with .live."),
    ] = None,
    state: Annotated[Path | None, typer.Option(help="Folder for this machine's nodes and runs.")] = None,
    alert_command: Annotated[
        str, typer.Option(help="Program and arguments to run on each alert; overrides the cluster file.")
    ] = "",
    alert_webhook: Annotated[
        str, typer.Option(help="HTTP address to post alerts to; overrides the cluster file.")
    ] = "",
    metrics: Annotated[
        str,
        typer.Option(
            help=f"Serve Prometheus metrics at IP-ADDRESS:PORT, such as {EXAMPLE_LISTEN}; overrides the cluster file."
        ),
    ] = "",
    metrics_for_anyone: Annotated[
        bool,
        typer.Option("--metrics-for-anyone", help="Allow --metrics to listen outside loopback and trusted networks."),
    ] = False,
    advertise: Annotated[
        bool, typer.Option("--advertise", help="Announce this agent on the local network (multicast DNS).")
    ] = False,
    no_keys: Annotated[
        bool,
        typer.Option(
            "--no-keys", help="Listen on loopback TCP without keys: every user of this machine becomes an operator."
        ),
    ] = False,
    parent_watch: Annotated[
        bool,
        typer.Option(
            "--leash",
            hidden=True,
            allow_from_autoenv=False,
            help="Exit once standard input has closed and no run is active.",
        ),
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            allow_from_autoenv=False,
            help="Start the agent in a session of its own, print where it listens, and return: the agent "
            "outlives this terminal.",
        ),
    ] = False,
    drain_on_term: Annotated[
        bool,
        typer.Option(
            "--drain-on-term",
            help="On SIGTERM, have this node's rank leave its run at the next step, then exit. The last node "
            "writes a checkpoint.",
        ),
    ] = False,
    grace: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds for --drain-on-term; then the agent exits with status 1.")
    ] = GRACE_SECONDS,
    spot_notice_command: Annotated[
        str,
        typer.Option(
            help="Program and arguments to run every 5 s; exit status 0 means that this machine will be taken "
            "back, so that its rank leaves its run."
        ),
    ] = "",
    exit_if_stalled: Annotated[
        float, typer.Option(min=0, max=3600, help="Exit if the event loop hangs for this many seconds; 0: never.")
    ] = 0.0,
) -> None:
    """Run the agent in the foreground until SIGTERM. Its trainers keep running.

    Each option can also be set by the environment variable that is given with it. The command line wins.
    """
    node = name or node_name()
    if not name:
        _name_others(node, state)
    if detach:
        _detach(node_directory(node, state))
        return
    nodes = _cluster_of(node, cluster)
    if listen is None and nodes.nodes:
        listen = nodes.nodes[node].address
    import_large("trainctl.node_agent.agent")
    from trainctl.node_agent.agent import Options

    options = Options(
        watches_parent=parent_watch,
        hooks=_hooks(nodes, alert_command, alert_webhook),
        metrics=_metrics_address(node, nodes, metrics, anyone=metrics_for_anyone),
        advertise=advertise or nodes.advertise,
        no_keys=no_keys,
        drain_on_term=drain_on_term,
        grace_seconds=grace,
        spot_notice=_words(spot_notice_command, "--spot-notice-command"),
    )
    # Not asyncio.run(), which waits for the loop's threads.
    asyncio.Runner().run(_serve(node, (listen, live), state, nodes, options, exit_if_stalled))


def _name_others(node: str, state: Path | None) -> None:
    """Say which other names this machine's agent had, unless it has runs by its own."""
    if runs_directory(node_directory(node, state)).exists():
        return
    others = sorted(runs.parent.name for runs in (state or state_root()).glob("*/runs") if any(runs.iterdir()))
    if others:
        names = ", ".join(others)
        print(f"trainctl-agent: this is {node}; runs here are of {names}: --name {others[0]}", file=sys.stderr)


def _detach(folder: Path) -> None:
    """Start this command line without the option, with what it prints in the node's folder, and print the line that
    says where the agent listens, with the process that stays: its supervisor. Raises InvalidInputError, and typer.Exit
    if the agent doesn't start, with its reason on standard error."""
    log = folder / "logs" / "started.log"
    command = [
        sys.executable,
        "-P",
        "-m",
        "trainctl.node_agent",
        *(word for word in sys.argv[1:] if word != "--detach"),
    ]
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


def _metrics_address(node: str, cluster: Cluster, text: str, *, anyone: bool) -> ListenAddress | None:
    """Return the address at which Prometheus is served: as the option says, or else the cluster file. Raises
    InvalidInputError."""
    entry = cluster.nodes.get(node)
    where = "--metrics" if text else f"cluster file: nodes.{node}.metrics"
    text = text or (entry.metrics if entry is not None else "")
    if not text:
        return None
    place = parse_listen(text, where)
    check_listen(place, where, cluster.trusted_networks, anyone=anyone)
    return place


def _hooks(cluster: Cluster, command: str, webhook: str) -> AlertHooks:
    """Return the hooks called about alerts: as the options say, or else the cluster file. Raises InvalidInputError."""
    words = _words(command, "--alert-command")
    check_command(cluster.alerts, "cluster file: alerts.command")
    check_webhook(AlertHooks(webhook=webhook), "--alert-webhook")
    return AlertHooks(command=words or cluster.alerts.command, webhook=webhook or cluster.alerts.webhook)


def _words(command: str, where: str) -> tuple[str, ...]:
    """A program and its arguments. Raises InvalidInputError if there is no such program."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise InvalidInputError(where, str(error)) from None
    check_command(AlertHooks(command=words), where)
    return words


def _cluster_of(node: str, path: Path | None) -> Cluster:
    """The cluster that a node is in: that of the file given, which must name it, or of the default one if it does.
    Raises InvalidInputError."""
    found = read_default(path)
    if node in found.nodes:
        check_hooks(found, path or default_path())
        return found
    known = ", ".join(found.nodes) or "none"
    if path is not None:
        raise InvalidInputError("--name", f"no node {node!r} in {path}; the nodes are {known}")
    if found != Cluster():
        text = f"trainctl-agent: {default_path()} has no effect here: it doesn't name the node {node}, but {known}"
        print(text, file=sys.stderr, flush=True)
    return Cluster()


async def _serve(
    name: str,
    addresses: tuple[str | None, str | None],
    state: Path | None,
    cluster: Cluster,
    options: "Options",
    stall_seconds: float,
) -> None:
    from trainctl.node_agent.agent import Agent
    from trainctl.node_agent.services.supervision import at_work
    from trainctl.node_agent.transport import bind
    from trainctl.protocol.machine.process_title import set_title

    set_title("agent", name)
    os.umask(os.umask(PRIVATE) | PRIVATE)  # records and tokens hold what the data say
    bind.allow_open_files()
    known = [entry.address for entry in cluster.nodes.values()]
    async with Agent(name, *addresses, state, cluster, options) as agent, at_work(agent, stall_seconds):
        root = str((state or state_root()).absolute())
        socket = agent.guest_socket
        with registered(name, agent.address, known, agent.public_key, root, socket) as registration:
            agent.looks.append(registration.look)
            _say_bound(agent)
            await agent.serve()


def _say_bound(agent: "Agent") -> None:
    said = {"name": agent.node, "listen": agent.address, "live": agent.live_address, "pid": os.getpid()}
    print(json.dumps(said | ({"metrics": url} if (url := agent.metrics_url) is not None else {})), flush=True)


@app.command(short_help="Run the simulated nodes of a cluster file as agents on this machine.")
def simulate(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER.toml", help="Cluster file with simulated nodes.")],
    state: Annotated[Path | None, typer.Option(help="Folder for the nodes and their runs.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of all chance.")] = 0,
    parameters: Annotated[
        int | None, typer.Option(min=1, help="Trained parameters, where the model isn't on this machine.")
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="Serve the first node's Prometheus metrics at IP-ADDRESS:PORT on loopback.")
    ] = "",
    parent_watch: Annotated[
        bool, typer.Option("--leash", hidden=True, help="Exit once standard input has closed.")
    ] = False,
) -> None:
    """Run the simulated nodes of a cluster file as agents on this machine. They take runs and commands as others do, in
    real time, but their trainers train nothing."""
    from trainctl.node_agent.simulate.simulated_agents import SimulatedAgents
    from trainctl.protocol.machine.process_title import set_title

    set_title("simulated agents", f"of {cluster}")
    at = _metrics_address("", Cluster(), metrics, anyone=False)

    async def serve() -> None:
        simulated = SimulatedAgents(
            cluster, state, seed=seed, parameters=parameters, metrics=at, watches_parent=parent_watch
        )
        async with simulated:
            first = simulated.agents[0]
            with registered(first.node, first.address, [agent.address for agent in simulated.agents]):
                _say_bound(first)
                await simulated.serve()

    asyncio.run(serve())


service_commands.register(app)


PRIVATE = 0o077
"""Permissions that files of an agent and its trainers don't give, whatever this process's umask is."""
READING = frozenset({"status", "--version"})
"""Those that only print, so that their outcome is whether that was taken; and so is `--help`."""


def main() -> int:
    """Run the command and return its exit status; an expected error prints one line."""
    open_closed()
    with lossy_streams() as printed:
        code = _outcome()
    only_prints = {*sys.argv[1:2]} & READING or {"-h", "--help"} & {*sys.argv}
    if code or printed.lost is None or not only_prints:
        return code
    return exit_code(printed.lost)


def _outcome() -> int:
    try:
        code = typer.main.get_command(app).main(prog_name="trainctl-agent", standalone_mode=False)
    except typer.TyperException as error:
        code = _refused(error.format_message().replace("Value error, ", ""), error.exit_code)
    except TrainctlError as error:
        code = _refused(str(error), error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        code = _refused(f"{where}{error.strerror or error}", 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    return code if isinstance(code, int) else 0


def leave(status: int) -> NoReturn:
    """End the process. Its threads end with it, wherever they are: one may read a file of many GB, or wait for a disk.

    They may: what they write is whole at every moment, or is removed by the next agent, as after `kill -9`.
    """
    if threading.active_count() == 1:
        sys.exit(status)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader may have gone
            stream.flush()
    os._exit(status)


def _refused(text: str, exit_code: int) -> int:
    print(f"trainctl-agent: {' '.join(text.split())}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    leave(main())
