"""The subcommands that answer before a run: `advise` by computing, `simulate` by a run that trains nothing, `bench` by
short real runs.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from trainctl.protocol.config.names import node_name
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.tui.cli import output, tables
from trainctl.tui.cli.options import ClusterFile, Connect, Json, Set, subcommands, where
from trainctl.tui.text import formatting as fmt

if TYPE_CHECKING:
    from trainctl.protocol.advice.advice import Advice
    from trainctl.protocol.advice.advice_facts import AdviceFacts
    from trainctl.protocol.advice.plans import Plan
    from trainctl.tui.bench.bench_rows import BenchRow
    from trainctl.tui.bench.bench_runs import BenchPlan

app = subcommands()


@app.command()
def advise(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False)],
    set_: Set = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    no_data: Annotated[bool, typer.Option("--no-data", help="Don't read the run's data.")] = False,
    parameters: Annotated[
        int | None, typer.Option("--parameters", min=1, help="Trained parameters, if the model isn't on this machine.")
    ] = None,
    json: Json = False,
) -> int:
    """Advise on which nodes to train, alone, in step or separately, how long it takes and what it costs.

    It computes with the nodes' profiles (trainctl calibrate), from their agents or from their folders on this machine.
    Nodes that the cluster file only describes, for trainctl simulate, are taken as described.
    Nodes without a profile are estimated from device tables if their device is known; estimates are marked with ~.
    It also prints what would change the answer, a checklist of the run's settings, and environment variables. Rows and
    samples are read for their lengths. Nothing is started or changed.
    """
    from trainctl.protocol.advice.advice import advise as advice_for
    from trainctl.tui.advise import advice_lines
    from trainctl.tui.advise.gather import gather
    from trainctl.tui.commands import arguments

    at = where(ctx, connect, cluster, simulated=True)
    agent = None if at.cluster is not None else at.addresses[0]
    pairs = arguments.pairs(set_ or [], "--set")
    found = gather(file, pairs, at.cluster, agent, read_data=not no_data, parameters=parameters)
    advice = advice_for(found.facts, found.checks)
    if json:
        output.emit_ok(**_advice_fields(advice, found.facts, found.notes))
        return 0
    for line in advice_lines.advice_lines(advice, found.facts.run, found.notes):
        output.say(output.log_text(line, raw=False))
    return 0


@app.command()
def bench(
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", show_default=False)],
    over: Annotated[
        list[str] | None,
        typer.Option("--over", metavar="KEY=VALUE,VALUE", help="Values to compare; repeat it for all combinations."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=3, max=10_000, help="Steps of each run.")] = 30,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NODE", help="Use this node's settings [this machine's].", show_default=False),
    ] = None,
    set_: Set = None,
    cluster: ClusterFile = None,
    json: Json = False,
) -> int:
    """Measure a run file with each of some settings, by short runs on this machine, and print one table.

    Each combination of the --over values trains for real, one after another, on an agent that is started for them and
    ends with them. The first fifth of the steps, and steps that compile, don't count. There is no checkpoint and no
    evaluation, and your agents and runs are left alone; end a run that trains here first. X is the rate relative to
    the first row's. A setting that fails is a row that says why. Ctrl-C ends everything.
    """
    from trainctl.protocol.config.objectives import sample_unit
    from trainctl.tui.bench import bench_rows, bench_runs
    from trainctl.tui.commands import arguments, targets
    from trainctl.tui.commands.checked_run_file import nodes_here
    from trainctl.tui.setup import data_check

    overrides, settings = arguments.pairs(set_ or [], "--set"), bench_rows.grid(over or [])
    config, nodes = bench_runs.readable(file, overrides, settings), targets.cluster_file(cluster)
    here = node or next(iter(nodes_here(config)), "") or node_name()
    entry = nodes.cluster.nodes.get(here) if nodes is not None else None
    currency = nodes.cluster.currency if nodes is not None else ""
    if len(config.nodes) > 1:
        output.tell(f"the run has several nodes: {here} is measured alone, on this machine")
    steps_of_runs = bench_runs.whole_steps(file, overrides, settings, data_check.epoch_here)
    plan = bench_runs.BenchPlan(file, overrides, settings, here, steps)
    try:
        rows = asyncio.run(_rows(plan))
    except asyncio.CancelledError:
        raise typer.Abort from None
    rows = bench_rows.compared(rows, steps_of_runs, entry.price_per_hour if entry is not None else None)
    failed = RefusedError.exit_code if all(row.problem for row in rows) else 0
    unit = sample_unit(config.objective.kind)
    if json:
        output.emit({"ok": not failed, **bench_rows.fields(rows, here, currency, unit)})
        return failed
    header = bench_rows.header(rows, unit)
    right = " ".join(header[column] for column in bench_rows.numeric(header, len(rows[0].settings)))
    output.say(tables.table(header, [bench_rows.cells(row, currency) for row in rows], right=right))
    return failed


async def _rows(plan: "BenchPlan") -> list["BenchRow"]:
    from trainctl.tui.bench import bench_runs
    from trainctl.tui.demo.agents import StartError

    rows: list[BenchRow] = []
    try:
        _tell(plan, 0)
        async for row in bench_runs.measured(plan):
            rows.append(row)
            _tell(plan, len(rows))
    except StartError as error:
        raise RefusedError(str(error)) from None
    return rows


def _tell(plan: "BenchPlan", done: int) -> None:
    if done < len(plan.settings):
        named = ", ".join(f"{key} = {value}" for key, value in plan.settings[done].items()) or "as it is"
        output.tell(f"{done + 1} of {len(plan.settings)}: {named}")


def _advice_fields(advice: "Advice", facts: "AdviceFacts", notes: tuple[str, ...]) -> dict[str, Any]:
    """Return the advice as plain values. Each plan also says whether it fits and can run; docs/advise.md lists all
    fields."""
    plain: dict[str, Any] = msgspec.to_builtins(advice)
    run = facts.run
    return {
        **plain,
        "answer": _plan(advice.answer),
        "independent": _plan(advice.independent),
        "plans": [_plan(plan) for plan in advice.plans],
        "notes": notes,
        "run": {
            "file": run.file,
            "steps": run.steps,
            "global_batch": run.global_batch,
            "unit": run.unit,
            "tokens_per_sample": run.tokens_per_sample,
            "gradient_bytes": run.gradient_bytes,
            "parameters": run.parameters,
            "trained": run.trained,
            "currency": run.currency,
            "lead": run.lead,
        },
        "nodes": {node.name: _node(node) for node in facts.nodes},
    }


def _plan(plan: "Plan | None") -> dict[str, Any] | None:
    if plan is None:
        return None
    plain: dict[str, Any] = msgspec.to_builtins(plan)
    fits, found = (*plan.memory, *plan.shared_memory), (*plain["memory"], *plain["shared_memory"])
    for fit, memory in zip(fits, found, strict=True):
        memory |= {"fits": fit.fits, "spare_bytes": fit.spare_bytes}
    return {**plain, "fits": plan.fits, "can_run": plan.can_run}


def _node(node: Any) -> dict[str, Any]:
    made = node.profile.created_at if node.profile is not None else None
    return {
        "device": node.device,
        "backend": node.backend,
        "machine": node.machine,
        "cores": node.cores,
        "threads": node.threads,
        "calibrated_at": made,
        "watts": node.watts,
        "price_per_hour": node.price_per_hour,
    }


@app.command()
def simulate(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER.toml", help="Cluster file with simulated nodes.")],
    file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of noise, drift, failures and losses.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10_000_000, help="Steps, in place of the run file's.", show_default=False)
    ] = None,
    parameters: Annotated[
        int | None,
        typer.Option(min=1, help="Trained parameters, if the model isn't on this machine.", show_default=False),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show the run in the full screen while it plays.")] = False,
    speed: Annotated[
        float | None,
        typer.Option(
            min=0.25, max=4096, help="With --watch: playback speed; 2 is twice real time [60].", show_default=False
        ),
    ] = None,
    output_folder: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="State folder [the user's].", show_default=False),
    ] = None,
    json: Json = False,
) -> int:
    """Simulate a run before you buy or start anything. Nothing is trained.

    Each node of the cluster file says in [nodes.NAME.simulated] how fast it is, how it varies and how it fails.
    """

    if speed is not None and not watch:
        raise InvalidInputError("--speed", "applies only to the full screen: add --watch, or leave it out")
    if watch and (json or not output.has_screen()):
        raise InvalidInputError("--watch", "needs a terminal, and no --json: leave it out")
    given = {"--seed": seed, "--steps": steps, "--parameters": parameters, "--output": output_folder}
    words = [f"{option}={value}" for option, value in given.items() if value is not None]
    with SimulatorProcess([str(cluster), str(file), *words]) as simulator:
        directory = Path(simulator.line()["run_directory"])
        if watch:
            from trainctl.tui.replay.replay_app import watch_growing  # Textual: only for the full screen

            watch_growing(directory, speed or 60.0)
        made = simulator.line()
    code = 0 if made["state"] == "finished" else RefusedError.exit_code
    if json:
        output.emit({"ok": code == 0, **made})
    else:
        output.say("\n".join(summary_lines(made)))
    return code


END_SECONDS = 10.0


class SimulatorProcess:
    """The process, while this one wants it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "trainctl.node_agent.simulate", *arguments]

    def __enter__(self) -> "SimulatorProcess":
        self._said: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End the simulator, and remove its record if that isn't complete."""
        assert self._process.stdout is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def line(self) -> dict[str, Any]:
        """Return the next object that it prints. Raises InvalidInputError or RefusedError with what it said instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        status = self._process.wait()
        self._said.seek(0)
        words = self._said.read().decode("utf-8", "replace").strip().splitlines()
        where, _, problem = (words[-1] if words else f"simulate: the simulator exited with {status}").partition(": ")
        if status == InvalidInputError.exit_code:
            raise InvalidInputError(where, problem)
        raise RefusedError(f"{where}: {problem}")


def summary_lines(made: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for a person; every figure is of the simulation."""
    reason = f": {made['reason']}" if made["reason"] else ""
    yield f"simulated  {made['run']}: {made['state']}{reason}; nothing was trained"
    yield f"time       {fmt.duration(made['seconds'])} simulated in {fmt.seconds(made['real_seconds'])}"
    yield f"steps      {made['steps']:,}, seed {made['seed']}"
    if made["samples_per_second"] is not None:
        rates = f"{_figure(made['samples_per_second'])} samples/s, {fmt.rate(made['tokens_per_second'])} tokens/s"
        times = f"a step takes {fmt.seconds(made['step_seconds'])}, of which the sum {fmt.seconds(made['sum_seconds'])}"
        yield f"speed      {rates}; {times}"
        alone = ", ".join(f"{node} {_figure(rate)}" for node, rate in made["alone_samples_per_second"].items())
        yield f"efficiency {fmt.percent(made['efficiency'])} of its nodes alone, in samples/s: {alone}"
    shares = ", ".join(f"{node} {share}" for node, share in made["shares"].items())
    yield f"shares     {shares} of {made['global_batch']:,}"
    yield f"faults     trainers died: {made['deaths']}; returns to a checkpoint: {made['returns']}"
    actions = ", ".join(f"{name} {count}" for name, count in made["actions"].items())
    yield f"policies   {actions or 'no commands'}"
    if made["cost"] is not None:
        yield f"cost       {fmt.money(made['cost'], made['currency'])}"
    yield f"record     trainctl replay {made['run_directory']}"


def _figure(value: float) -> str:
    """Three figures."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
