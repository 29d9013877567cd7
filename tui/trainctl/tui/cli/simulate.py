"""`trainctl simulate`: a run over simulated machines, by the real conductor and policies, into a record.

The simulator is a process of its own; this one prints what it came to, or shows its record as it grows.
"""

import contextlib
import json as json_text
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.tui.cli import output
from trainctl.tui.cli.options import Json, subcommands
from trainctl.tui.text import formatting as fmt

app = subcommands()
END_SECONDS = 10.0


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
    with _Simulator([str(cluster), str(file), *words]) as simulator:
        directory = Path(simulator.line()["run_directory"])
        if watch:
            from trainctl.tui.replay.growing_source import watch_growing  # Textual: only for the full screen

            watch_growing(directory, speed or 60.0)
        made = simulator.line()
    code = 0 if made["state"] == "finished" else RefusedError.exit_code
    if json:
        output.emit({"ok": code == 0, **made})
    else:
        output.say("\n".join(_lines(made)))
    return code


class _Simulator:
    """The process, while this one wants it."""

    def __init__(self, arguments: list[str]) -> None:
        self._command = [sys.executable, "-m", "trainctl.node_agent.simulate", *arguments]

    def __enter__(self) -> "_Simulator":
        self._said: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Its record goes if it isn't complete."""
        assert self._process.stdout is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._said.close()

    def line(self) -> dict[str, Any]:
        """The next object that it prints. Raises InvalidInputError or RefusedError with what it said instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json_text.loads(line)
            return found
        status = self._process.wait()
        self._said.seek(0)
        words = self._said.read().decode("utf-8", "replace").strip().splitlines()
        where, _, problem = (words[-1] if words else f"simulate: the simulator exited with {status}").partition(": ")
        if status == InvalidInputError.exit_code:
            raise InvalidInputError(where, problem)
        raise RefusedError(f"{where}: {problem}")


def _lines(made: Mapping[str, Any]) -> Iterator[str]:
    """For a person; every figure is of the simulation."""
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
