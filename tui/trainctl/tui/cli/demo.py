"""`trainctl demo`: a small real model trained on real text by a few ranks on this machine, or a simulated cluster, with
a screen or without."""

import asyncio
import contextlib
import importlib.util
import json
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainctl.protocol.client.live_queue import Connection
from trainctl.protocol.config.names import node_name
from trainctl.protocol.errors import InvalidInputError, RefusedError, UnreachableError, installing
from trainctl.protocol.messages import CommandReply, Event, RunView, Sample, Snapshot, SnapshotRequest, StepCommitted
from trainctl.tui.cli import agent_call, output, tables, watch
from trainctl.tui.cli.options import subcommands
from trainctl.tui.cli.output import stage
from trainctl.tui.commands import command
from trainctl.tui.demo import agents
from trainctl.tui.demo.folder import Objective, Session, default_folder, run_config, write_run_file

if TYPE_CHECKING:
    from trainctl.tui.state.view_state import ViewState

app = subcommands()
MOST_DEMO_NODES = 8
"""Nodes that may train on one machine."""
HEADLESS_STEPS = 150
SCREEN_STEPS = 2000
PROGRESS_LINES = 15
"""About how many steps a headless demo reports."""
END_SECONDS = 60.0
WATCH_SECONDS = 2.0
NEEDED = {"torch": ("torch", "transformers"), "mlx": ("mlx", "mlx_lm")}


@dataclass(frozen=True)
class DemoOptions:
    """A demo as its options describe it."""

    steps: int
    nodes: int | None = None  # None: three where torch and MLX are both there, else two
    backend: str = "auto"
    folder: Path | None = None
    keep: bool = False
    objective: Objective = "pretrain"
    simulated: bool = False  # nothing is trained, and the agents end with this program


@dataclass(frozen=True)
class Demo:
    """A demo whose agents are up."""

    address: str  # the first one's, which will lead
    session: Session
    config: dict[str, Any]


def make_files(folder: Path | None, objective: Objective) -> int:
    """Make the model and the data of a demo, without training anything, and return the exit code."""
    from trainctl.tui.demo.agents import StartError
    from trainctl.tui.demo.supervisor import make_assets

    root = (folder or default_folder()).absolute()
    try:
        asyncio.run(make_assets(root, objective))
    except StartError as error:
        raise RefusedError(f"the demo's files can't be made: {error}") from None
    made = ", ".join(sorted(path.name for path in root.iterdir()))
    output.say(f"made a small untrained model and its data in {root}: {made}")
    return 0


def run_headless(wanted: DemoOptions) -> int:
    """Train to the end with progress on standard error, print one JSON object, and return the exit code."""
    with _supervised(wanted) as (demo, supervisor):
        try:
            run = _start(demo)
            view = agent_call.call(demo.address, lambda client: _followed(client, run, wanted.steps, supervisor))
            _let_end(supervisor)
        except KeyboardInterrupt:
            output.tell("stopping the demo")
            supervisor.send_signal(signal.SIGTERM)
            _let_end(supervisor)
            raise
        if view.state == "failed":
            raise RefusedError(f"the demo failed at step {view.step:,}: {view.reason or 'no reason given'}")
        output.emit_ok(simulated=wanted.simulated, **summary(view))
    return 0


def run_on_screen(wanted: DemoOptions) -> int:
    """Train with the full screen open. The run continues after the screen closes."""
    from trainctl.protocol.config.names import user_name
    from trainctl.tui.app.launch import run_app  # Textual: only for the full screen

    with _supervised(wanted) as (demo, supervisor):
        try:
            _start(demo)
            code = run_app(demo.address, by=user_name(), say=_farewell_simulated if wanted.simulated else _farewell)
        except KeyboardInterrupt:
            supervisor.send_signal(signal.SIGTERM)
            raise
    return code


def _farewell(state: "ViewState", address: str) -> str:
    """Return what is said when the screen is left: how to come back or end it, or where an ended run's record is."""
    from trainctl.tui.app.launch import farewell

    if state.run is None or state.active:
        return f"{farewell(state, address)}; stop it with: trainctl send stop"
    return f"the demo has ended ({state.run.state} at step {state.run.step:,}); its record is in {state.run.directory}"


def _farewell_simulated(state: "ViewState", address: str) -> str:
    step = state.run.step if state.run is not None else 0
    return f"the simulated run ended at step {step:,}; nothing was trained"


def _rounded(step: StepCommitted | None) -> float | None:
    return round(step.loss, 3) if step is not None and step.loss is not None else None


def summary(view: RunView) -> dict[str, Any]:
    """Return a run's figures, read from its record. A figure that no step reported is None. Raises InvalidInputError if
    there is no record."""
    from trainctl.protocol.record.reader import RecordReader

    with RecordReader(Path(view.directory)) as record:
        (first, *_), last, sums = record.steps(limit=1)[0] or (None,), record.last_step(), record.totals()
    tokens_per_second = None
    # The first step's seconds hold the model's warming up.
    if first is not None and sums.step_seconds > first.step_seconds:
        tokens_per_second = (sums.tokens - (first.tokens or 0)) / (sums.step_seconds - first.step_seconds)
    nodes = [
        {
            "name": rank.node,
            "backend": rank.backend,
            "share": rank.share,
            "tokens": round(sums.tokens_by_node.get(rank.node, 0.0)),
        }
        for rank in sorted(view.ranks, key=lambda item: item.rank)
    ]
    return {
        "run": view.run,
        "state": view.state,
        "steps": view.step,
        "first_loss": _rounded(first),
        "last_loss": _rounded(last),
        "tokens_per_second": round(tokens_per_second, 1) if tokens_per_second else None,
        "nodes": nodes,
        "generation": str(view.generation),
        "engine": view.engine,
        "mixed": len({node["backend"] for node in nodes if node["tokens"]}) > 1,
        "run_directory": view.directory,
    }


# ---------------------------------------------------------------- start and end


@contextlib.contextmanager
def _supervised(wanted: DemoOptions) -> Iterator[tuple[Demo, "subprocess.Popen[bytes]"]]:
    """A demo that is ready for its run. Closing our end of the supervisor's input tells it that nobody watches."""
    nodes = {} if wanted.simulated else ranks_of(wanted)
    root = (wanted.folder or default_folder()).absolute()
    try:
        session = Session.create(root, keep=wanted.keep)
    except OSError as error:
        raise InvalidInputError("--folder", f"can't write the demo's files to {root}: {error.strerror}") from None
    if wanted.simulated:
        with _simulated(session, wanted) as started:
            yield started
        return
    command = [sys.executable, "-m", "trainctl.tui.demo.supervisor", *(f"--node={node}" for node in nodes)]
    with session.supervisor_log.open("wb") as log:
        supervisor = subprocess.Popen(
            [*command, "--session", str(session.folder), "--assets", str(root), "--objective", wanted.objective],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        address = _until_ready(supervisor, session)
        config = run_config(root, nodes, wanted.steps, wanted.objective)
        write_run_file(session, config)
        yield Demo(address, session, config), supervisor
    finally:
        close_pipes(supervisor)


@contextlib.contextmanager
def _simulated(session: Session, wanted: DemoOptions) -> Iterator[tuple[Demo, "subprocess.Popen[bytes]"]]:
    """A simulated demo that is ready for its run; its agents end with this."""
    count = wanted.nodes or agents.NODES
    agents.write_files(session, count)
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "simulate", str(session.cluster_file), "--leash"]
    with session.supervisor_log.open("wb") as log, session.locked():
        simulation = subprocess.Popen(
            [*command, "--state", str(session.state)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            assert simulation.stdout is not None
            line = simulation.stdout.readline()
            if not line:
                raise RefusedError(f"the simulated agents exited immediately; see {session.supervisor_log}")
            config = agents.run_config(session, [*agents.nodes(count)], wanted.steps)
            write_run_file(session, config)
            yield Demo(json.loads(line)["listen"], session, config), simulation
        finally:
            _let_end(simulation)


def _until_ready(supervisor: "subprocess.Popen[bytes]", session: Session) -> str:
    assert supervisor.stdout is not None
    with contextlib.ExitStack() as shown:
        for line in supervisor.stdout:
            shown.close()
            said = json.loads(line)
            if said["state"] == "ready":
                address: str = said["address"]
                return address
            if said["state"] == "failed":
                raise InvalidInputError("demo", said["error"])
            text = output.one_line(f"demo: {said['state']} {said['what']}")
            shown.enter_context(stage(text))
    raise RefusedError(f"the demo's supervisor exited immediately; see {session.supervisor_log}")


def _start(demo: Demo) -> str:
    """Start the run; its id once the agent has taken it. Raises RefusedError if it doesn't."""
    order = command.make_order("start-run", {"config": demo.config})

    async def begin(client: Any) -> tuple[CommandReply, Snapshot]:
        return await command.send(client, order, "accepted", agent_call.ANSWER_SECONDS), await client.ask(
            SnapshotRequest, 0
        )

    reply, snapshot = agent_call.call(demo.address, begin)
    if command.exit_code(reply) or snapshot.run is None:
        raise RefusedError(tables.reply_line("start-run", reply))
    output.tell(f"demo: {snapshot.run.run} at {demo.address}, in {snapshot.run.directory}")
    return snapshot.run.run


async def _followed(client: Any, run: str, steps: int, supervisor: "subprocess.Popen[bytes]") -> RunView:
    """Return the run's last view. Raises RefusedError if its agent is gone with nobody left to start it again."""
    progress = asyncio.create_task(_progress(client, run, steps), name="progress")
    try:
        while not (await asyncio.wait({progress}, timeout=WATCH_SECONDS))[0]:
            if supervisor.poll() is None:
                continue
            try:
                await client.ask(SnapshotRequest, 0)
            except UnreachableError as error:
                await asyncio.wait({progress}, timeout=WATCH_SECONDS)  # it may have seen the end just before
                if not progress.done():
                    raise RefusedError(f"{error}, and the demo's supervisor has exited") from None
        return await progress
    finally:
        progress.cancel()


async def _progress(client: Any, run: str, steps: int) -> RunView:
    """Report the run on standard error until it has ended; its last view."""
    every = max(1, steps // PROGRESS_LINES)
    view: RunView | None = None
    async for item in watch.lines(client, run=run, from_start=True, until_end=True):
        match item:
            case StepCommitted():
                if item.step % every == 0 or item.step in (1, steps):
                    sys.stderr.write(f"{tables.step_line(item, view)}\n")
            case Event():
                sys.stderr.write(f"{tables.event_line(item)}\n")
            case RunView():
                view = item
            case Sample() | Connection() | watch.Restarted():
                pass
    with contextlib.suppress(UnreachableError):  # an agent whose supervisor was killed leaves with the run
        view = (await client.ask(SnapshotRequest, 0, run)).run or view
    if view is None:
        raise RefusedError(f"no agent knows {run} any more")
    return view


def _let_end(supervisor: "subprocess.Popen[bytes]") -> None:
    """Tell the supervisor that nobody watches and wait until it has taken its agent down."""
    close_pipes(supervisor)
    try:
        supervisor.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        output.tell(f"demo: the supervisor (process {supervisor.pid}) is still shutting down")


def close_pipes(process: "subprocess.Popen[bytes]") -> None:
    """Close this side of the process's standard input and output."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


# ---------------------------------------------------------------- this machine


def ranks_of(wanted: DemoOptions) -> dict[str, str]:
    """Return the demo's nodes in rank order, each with its backend. Raises InvalidInputError if what it needs isn't
    installed.

    If there are several nodes and both backends are installed, the last node uses MLX. It is much slower on a Linux
    CPU.
    """
    there = installed(wanted.backend, wanted.objective)
    if wanted.nodes == 1:
        return {node_name(): wanted.backend}
    count = wanted.nodes or len(there) + 1
    kinds = [there[0]] * (count - 1) + [there[-1]]
    return {f"{kind}-{letter}": kind for kind, letter in zip(kinds, string.ascii_lowercase, strict=False)}


def installed(backend: str, objective: Objective) -> tuple[str, ...]:
    """Return the installed backends among those that `backend` selects. Raises InvalidInputError if there are none, or
    if the objective's assets can't be made."""
    wanted = tuple(NEEDED) if backend == "auto" else (backend,)
    found = tuple(name for name in wanted if all(importlib.util.find_spec(module) for module in NEEDED[name]))
    if not found:
        raise InvalidInputError("backend", f"{' and '.join(wanted)} not installed; {installing(*wanted)}")
    if objective == "qlora" and not all(importlib.util.find_spec(module) for module in NEEDED["mlx"]):
        raise InvalidInputError("objective", f"qlora needs mlx-lm, to quantize its model; {installing('mlx')}")
    return found


# ---------------------------------------------------------------- the subcommand


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Steps to train [150 headless, else 2000].")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16,
            help=f"Agents to start, with one rank each, at most {MOST_DEMO_NODES} that train [3 with torch and MLX "
            "installed, else 2; 8 with --simulated].",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        Literal["auto", "torch", "mlx"],
        typer.Option(help="Library to train with; auto uses both if both are installed."),
    ] = "auto",
    objective: Annotated[
        Literal["pretrain", "sft", "dpo", "qlora"],
        typer.Option(
            help="Train on text (pretrain), on prompts with completions (sft), the same with adapters on a 4-bit model "
            "(qlora), or on preferences between answers (dpo)."
        ),
    ] = "pretrain",
    headless: Annotated[
        bool,
        typer.Option(
            "--headless", help="Run without the screen; print one JSON object at the end. Implied without a terminal."
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Like --headless; errors are printed as one JSON object too.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the model, the text and the runs [in the user's cache folder].", show_default=False
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep this demo's run when the next demo starts.")] = False,
    files: Annotated[
        bool, typer.Option("--files", help="Make the model and the text in --folder, and train nothing.")
    ] = False,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Simulate a cluster instead, with faults; nothing is trained.")
    ] = False,
) -> int:
    """Train a small real model on real text. Starts a few agents, a run and the full screen on this machine."""
    without_screen = headless or json or not output.has_screen()
    if not simulated and nodes is not None and nodes > MOST_DEMO_NODES:
        raise InvalidInputError(
            "--nodes", f"must be at most {MOST_DEMO_NODES}, or add --simulated, which trains nothing"
        )
    if files:
        return make_files(folder, objective)
    count = steps or (HEADLESS_STEPS if without_screen else SCREEN_STEPS)
    wanted = DemoOptions(count, nodes, backend, folder, keep, objective, simulated)
    return run_headless(wanted) if without_screen else run_on_screen(wanted)
