"""The `trainctl` command: every subcommand's arguments, its exit code, and the one line of whatever goes wrong."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError, UnreachableError
from trainctl.tui import calls, output, places, typed

INTERRUPTED = 130
BROKEN_PIPE = 141
"""128 + SIGINT and 128 + SIGPIPE, as a shell tells it."""


class _Group(TyperGroup):
    """Ends quietly when the reader of standard output has gone, which the parser library would call a failure."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _quiet_pipe():  # --help prints here
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _quiet_pipe():
            return super().invoke(ctx)


@contextlib.contextmanager
def _quiet_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        output.silence()
        raise typer.Exit(BROKEN_PIPE) from None


app = typer.Typer(
    cls=_Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Watch and steer the training of one model. Without a command: the full-screen program.",
    epilog="Exit codes: 0 applied, 1 an unexpected system error, 2 usage, 3 rejected or failed, 4 expired or not "
    "applied in time, 5 unreachable or another version, 6 not authorised, 130 interrupted.",
)

Connect = Annotated[
    str | None,
    typer.Option(
        "--connect",
        metavar="ADDRESS",
        help=f"The agent, tcp://host:port (else $TRAINCTL_CONNECT, else {calls.DEFAULT_ADDRESS}).",
        show_default=False,
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="A cluster file: its agents are tried in order (else $TRAINCTL_CLUSTER, else the user's cluster.toml).",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, and nothing else there.")]
JsonLines = Annotated[bool, typer.Option("--json", help="JSON; with following, one object a line.")]
Run = Annotated[str | None, typer.Option("--run", help="A run id (default: the active run, else the newest).")]
ReadOnly = Annotated[bool, typer.Option("--read-only", help="Watch without being able to change anything.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait for it to be applied.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value: optimizer.learning_rate=1e-3.")
]


def where(ctx: typer.Context, connect: str | None, cluster: Path | None) -> places.Where:
    """What --connect says after the command or before it, else --cluster in the same way, else $TRAINCTL_CONNECT, else
    the default cluster file, else the default address."""
    root = ctx.find_root().params
    given, file = connect or root.get("connect"), cluster or root.get("cluster")
    if not given and file is None:
        given = os.environ.get("TRAINCTL_CONNECT")
    found = None if given else places.cluster_file(file)
    return places.Where((given or calls.DEFAULT_ADDRESS,)) if found is None else places.Where(found.addresses, found)


def address_of(ctx: typer.Context, connect: str | None, cluster: Path | None) -> str:
    """The agent to talk to. Raises UnreachableError if no agent of a cluster answers."""
    return calls.find_lead(where(ctx, connect, cluster).addresses)


# ---------------------------------------------------------------- the full screen


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    connect: Connect = None,
    cluster: ClusterFile = None,
    read_only: ReadOnly = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    if version:
        output.say(f"trainctl {_program_version()}")
        raise typer.Exit
    return _full_screen(where(ctx, connect, cluster), read_only=read_only) if ctx.invoked_subcommand is None else 0


@app.command()
def attach(
    ctx: typer.Context, connect: Connect = None, cluster: ClusterFile = None, read_only: ReadOnly = False
) -> int:
    """The full-screen program. Leaving it changes nothing: the run goes on."""
    return _full_screen(
        where(ctx, connect, cluster), read_only=read_only or bool(ctx.find_root().params.get("read_only"))
    )


def _full_screen(at: places.Where, *, read_only: bool) -> int:
    if not _has_screen():
        raise InvalidInputError(
            "terminal", "the full screen needs a terminal on standard input, output and error; "
            "try trainctl status or watch",
        )  # fmt: skip
    places.is_local(at.addresses[0])
    from trainctl.protocol.client import user_name
    from trainctl.tui.app import run_app  # Textual: only for the full screen

    try:
        address = calls.find_lead(at.addresses)
    except UnreachableError:
        address = at.addresses[0]  # the screen waits for it, and says so
    return run_app(address, by=user_name(), read_only=read_only)


def _has_screen() -> bool:
    """Whether a person sees all three streams; the full screen is drawn on standard error."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Steps to train [150 headless, else 2000].")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, max=8, help="Agents, a rank each [3 with torch and MLX installed, else 2].", show_default=False
        ),
    ] = None,
    backend: Annotated[
        Literal["auto", "torch", "mlx"], typer.Option(help="What computes; auto: both where both are installed.")
    ] = "auto",
    headless: Annotated[
        bool, typer.Option("--headless", help="No screen; ends with one JSON object. Implied without a terminal.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Headless, and errors too are one JSON object.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where model, text and runs go [the user's cache folder].", show_default=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep this demo's run when a later demo starts.")] = False,
) -> int:
    """A small real model trained on real text: a few agents, a run and the screen, all on this machine."""
    from trainctl.tui import demo as program

    without_screen = headless or json or not _has_screen()
    count = steps or (program.HEADLESS_STEPS if without_screen else program.SCREEN_STEPS)
    wanted = program.Wanted(steps=count, nodes=nodes, backend=backend, folder=folder, keep=keep)
    return program.headless(wanted) if without_screen else program.on_screen(wanted)


# ---------------------------------------------------------------- runs


@app.command()
def run(
    ctx: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="RUN.toml", show_default=False)] = None,
    set_: Set = None,
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Take up an old run again.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow its steps and events (Ctrl-C detaches).")
    ] = False,
    connect: Connect = None,
    cluster: ClusterFile = None,
    timeout: Timeout = 600.0,
    json: JsonLines = False,
) -> int:
    """Start a run from a run file, or take up an old one; prints its id."""
    if (file is None) == (resume is None):
        raise InvalidInputError("run", "give either RUN.toml or --resume RUN")
    if resume is not None and set_:
        raise InvalidInputError("--set", "a resumed run keeps its own run file")
    at = where(ctx, connect, cluster)
    if file is not None:
        overrides = typed.pairs(set_ or [], "--set")
        config = places.run_file(file, overrides, local=places.is_local(at.addresses[0]), cluster=at.cluster)
        args: dict[str, Any] = {"config": config}
    else:
        args = {"resume": typed.check_text(resume or "", "--resume")}
    order = calls.make_order("start-run", args, ttl_seconds=_ttl(timeout))
    address = calls.find_lead(at.addresses)
    if follow:
        return _run_and_follow(address, order, json=json, from_start=resume is None)
    reply = _send(address, order, "applied", timeout)
    if (code := calls.exit_code(reply)) or reply.run is None:
        return _finish(order.verb, reply, json=json, code=code)
    _show_started(reply, reply.run, json=json)
    return 0


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False)],
    set_: Set = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Whether a run file's fields are right, its nodes are of the cluster, and model and data are there and not empty.

    Of the weights it reads the headers, of samples the first lines, of text the size; of other machines it knows no
    files. Nothing is loaded or started.
    """
    found = places.cluster_file(cluster)
    config = places.run_file(file, typed.pairs(set_ or [], "--set"), local=True, cluster=found)
    nodes = tuple(config["nodes"]) or (found.nodes if found is not None else ())
    if found is None and len(nodes) > 1:
        output.tell("several nodes: give --cluster FILE to check that they are there, and the files of those here")
    if json:
        output.emit_ok(config=config, nodes=nodes)
    else:
        ranks = f" on {len(nodes)} nodes: {', '.join(nodes)}" if len(nodes) > 1 else ""
        output.say(
            f"{file}: in order; {config['run']['steps']:,} steps of {config['batch']['global']:,} samples{ranks}"
        )
    return 0


@app.command(name="ls")
def list_runs(ctx: typer.Context, connect: Connect = None, cluster: ClusterFile = None, json: Json = False) -> int:
    """The runs the agent knows, newest first."""
    reply = calls.call(address_of(ctx, connect, cluster), lambda client: client.runs(), lead=True)
    if json:
        output.emit_ok(runs=reply.runs)
    elif reply.runs:
        output.say(output.runs_table(reply.runs))
    else:
        output.tell("no runs yet; start one with trainctl run RUN.toml")
    return 0


@app.command()
def status(
    ctx: typer.Context, run: Run = None, connect: Connect = None, cluster: ClusterFile = None, json: Json = False
) -> int:
    """The run, its ranks and the machines, as they are now."""

    async def look(client: Any) -> tuple[m.Snapshot, dict[str, m.HostReading]]:
        snapshot = await calls.settled_snapshot(client, run)
        return snapshot, await calls.hosts_of(snapshot.peers)

    snapshot, hosts = calls.call(address_of(ctx, connect, cluster), look, lead=True)
    if json:
        output.emit_ok(
            node=snapshot.node, run=snapshot.run, last_step=snapshot.last_step, rank_steps=snapshot.rank_steps,
            peers=snapshot.peers, hosts=hosts, at=snapshot.at,
        )  # fmt: skip
    else:
        output.say(output.status_text(snapshot, hosts))
    return 0


@app.command()
def watch(
    ctx: typer.Context, run: Run = None, connect: Connect = None, cluster: ClusterFile = None, json: JsonLines = False
) -> int:
    """A line for each committed step and each event as they come, until Ctrl-C."""
    from trainctl.tui import follow

    calls.call(
        address_of(ctx, connect, cluster), lambda client: follow.show(client, lambda item: True, json=json, run=run),
        lead=True,
    )  # fmt: skip
    return 0


@app.command()
def events(
    ctx: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with those that come.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", min=0, max=500, help="How many of the newest.")] = 100,
    run: Run = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: JsonLines = False,
) -> int:
    """What happened in a run: commands, checkpoints, evaluations, faults."""
    from trainctl.tui import follow as following

    address = address_of(ctx, connect, cluster)
    return calls.call(
        address, lambda client: following.show_events(client, run, last, follow=follow, json=json), lead=True
    )


@app.command()
def logs(
    ctx: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Whose log.", show_default="0")] = None,
    node: Annotated[str | None, typer.Option("--node", help="The node whose rank's log.")] = None,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=0, help="Only the last lines.", show_default="all")
    ] = None,
    run: Run = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: JsonLines = False,
) -> int:
    """What a trainer wrote."""
    from trainctl.tui import logs as reading

    if rank is not None and node is not None:
        raise InvalidInputError("--node", "give either --rank or --node")

    async def show(client: Any) -> int:
        chosen = await reading.rank_of(client, run, node) if node is not None else rank or 0
        return await reading.show_logs(client, run, chosen, last, follow=follow, json=json)

    return calls.call(address_of(ctx, connect, cluster), show)


# ---------------------------------------------------------------- commands


@app.command(epilog=typed.verbs_summary())
def send(
    ctx: typer.Context,
    verb: Annotated[str, typer.Argument(metavar="VERB", show_default=False)],
    words: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", show_default=False)] = None,
    node: Annotated[str | None, typer.Option("--node", help="The node it is for.")] = None,
    run: Run = None,
    id_: Annotated[str | None, typer.Option("--id", metavar="UUID", help="Repeat a command: the same outcome.")] = None,
    if_plan: Annotated[
        int | None, typer.Option("--if-plan", min=0, help="Refuse it if the plan has moved on from this.")
    ] = None,
    ttl: Annotated[float, typer.Option("--ttl", min=0.001, max=86400, help="Seconds it stays valid.")] = 60.0,
    wait: Annotated[Literal["applied", "accepted", "none"], typer.Option(help="What to wait for.")] = "applied",
    timeout: Timeout = 60.0,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Change something: trainctl send resize-batch micro=8 --node studio."""
    at = where(ctx, connect, cluster)
    args = typed.verb_args(verb, words or [], local=places.is_local(at.addresses[0]))
    for name, text in (("--node", node), ("--run", run)):
        typed.check_text(text or "", name)
    order = calls.make_order(verb, args, id=id_, node=node, run=run, if_plan=if_plan, ttl_seconds=ttl)
    reply = _send(calls.find_lead(at.addresses), order, wait, timeout)
    if wait == "none":
        return _sent(verb, reply, json=json)
    return _finish(verb, reply, json=json, code=calls.exit_code(reply))


def _sent(verb: str, reply: m.CommandReply, *, json: bool) -> int:
    """What is said of a command that was handed to the socket: nobody has answered, so there is no state."""
    if json:
        output.emit_ok(verb=verb, **{**_fields(reply), "state": None})
    else:
        output.say(f"{verb} sent, not awaited; id {reply.id}")
    return 0


def _send(address: str, order: calls.Order, wait: calls.Wait, timeout: float) -> m.CommandReply:
    answer_seconds = min(calls.ANSWER_SECONDS, timeout)
    return calls.call(address, lambda client: calls.send(client, order, wait, timeout), answer_seconds=answer_seconds)


def _finish(verb: str, reply: m.CommandReply, *, json: bool, code: int) -> int:
    line = output.reply_line(verb, reply)
    if json and code:
        output.emit_error(reply.state, line, verb=verb, **_fields(reply))
    elif json:
        output.emit_ok(verb=verb, **_fields(reply))
    elif code:
        output.complain(line)
    else:
        output.say(line)
    return code


def _fields(reply: m.CommandReply) -> dict[str, Any]:
    names = ("id", "state", "step", "reason", "field", "before", "after", "plan_version", "run")
    return {name: getattr(reply, name) for name in names}


def _ttl(timeout: float) -> float:
    return min(86400.0, max(60.0, timeout))


def _run_and_follow(address: str, order: calls.Order, *, json: bool, from_start: bool) -> int:
    reply = _send(address, order, "accepted", calls.ANSWER_SECONDS)
    if code := calls.exit_code(reply):
        return _finish(order.verb, reply, json=json, code=code)
    active = calls.call(address, lambda client: client.snapshot(0, reply.run)).run
    run = reply.run or (active.run if active is not None else "")
    _show_started(reply, run, json=json)
    try:
        return calls.call(address, lambda client: _followed(client, run, json=json, from_start=from_start))
    except KeyboardInterrupt:
        output.tell(f"detached; {run} goes on: trainctl attach or trainctl watch shows it, trainctl send stop ends it")
        return INTERRUPTED


async def _followed(client: Any, run: str, *, json: bool, from_start: bool) -> int:
    from trainctl.tui import follow

    view = await follow.show(client, lambda item: True, json=json, run=run, from_start=from_start, until_end=True)
    if view is None or view.state != "failed":
        return 0
    now = (await client.snapshot(0, run)).run or view
    output.complain(f"{run} failed: {now.reason or 'no reason given'}")
    return RefusedError.exit_code


def _show_started(reply: m.CommandReply, run: str, *, json: bool) -> None:
    if json:
        output.emit_ok(**{"verb": "start-run", **_fields(reply), "run": run})
    else:
        output.say(run)


# ---------------------------------------------------------------- the edge


def main(argv: list[str] | None = None) -> int:
    """Run one command line; the exit code. No exception leaves it but the interpreter's own end."""
    arguments = sys.argv[1:] if argv is None else argv
    json = "--json" in arguments
    _prepare()
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="trainctl", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        return _fail("usage", f"{error.format_message()}{_hint(error)}", error.exit_code, json=json)
    except TrainctlError as error:
        return _fail(output.error_code(error), str(error), error.exit_code, json=json)
    except BrokenPipeError:
        output.silence()
        return BROKEN_PIPE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail("system", f"{where}{error.strerror or error}", 1, json=json)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _fail(code: str, text: str, exit_code: int, *, json: bool) -> int:
    if json:
        output.emit_error(code, text)
    else:
        output.complain(text)
    return exit_code


def _hint(error: typer.TyperException) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", None)
    return f" (see {path} --help)" if path else ""


def _prepare() -> None:
    """Streams that print what their encoding lacks as `?`, and a fault of our own told in one line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if not os.environ.get("TRAINCTL_DEBUG"):
        sys.excepthook = _one_line_fault


def _one_line_fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" in {trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno}" if trace is not None else ""
    output.complain(f"internal fault: {kind.__name__}: {error}{where} (TRAINCTL_DEBUG=1 shows all of it)")


def _program_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("trainctl")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
