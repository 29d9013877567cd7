"""The process that simulates a run, and what it came to in lines for a person."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.tui.text import formatting as fmt

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
