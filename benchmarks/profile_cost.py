"""What a profile leaves behind: the length of a run's later steps, beside those of a run that is never profiled.

    python benchmarks/profile_cost.py [--backend torch|mlx] [--pairs N] [--steps N] [--threads N]

Two agents each host the same run; one trains while the other is paused, in turns. The first pairs are before any
profile. Then each turn of the profiled run begins with a profile of 3 steps, and its steps count from the first one
after the last recorded one: the loop waits for the profiler in it, and the trace is written during those that follow.
A pair's ratio is the median step of the profiled run over that of the other; what is reported is the ratio after
profiles over the ratio before, and the worst step over the other run's median. Prints a table, then one JSON object;
exits 1 if the median is over the bar.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from hosted_overhead import NODE, write_config
from lib.ratios import interval
from lib.sides import end_on_sigterm, kill_left

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages.events import Profiled
from trainctl.trainer import demo_assets

BAR = 0.02
"""Largest part by which the steps after a profile may be longer or shorter."""
PROFILED_STEPS = 3
WARM_STEPS = 3
"""Steps after a pause that are not counted: caches settle."""


class Pair(NamedTuple):
    """The profiled run's steps over the median step of the other."""

    median: float
    worst: float


class Side:
    """A run under an agent of its own, paused but while its steps are measured."""

    def __init__(self, config: dict[str, Any], state: Path) -> None:
        command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", NODE]
        self._agent = subprocess.Popen(
            [*command, "--listen", "tcp://127.0.0.1:0", "--state", str(state)], stdout=subprocess.PIPE, text=True
        )
        assert self._agent.stdout is not None
        self._client = BlockingClient(json.loads(self._agent.stdout.readline())["listen"]).__enter__()
        self._client.send("start-run", {"config": config}, timeout_seconds=120)
        self._client.send("pause", {})

    @property
    def _step(self) -> int:
        run = self._client.snapshot(0).run
        assert run is not None
        return run.step

    def steps(self, steps: int, *, profiled: bool) -> list[float]:
        """Seconds of each step, by the times of the commits."""
        known = self._newest_id
        if profiled:
            self._client.send("profile", {"steps": PROFILED_STEPS})
        self._client.send("resume", {})
        first = self._last_profiled(known) if profiled else self._step + WARM_STEPS
        while self._step < first + steps:
            time.sleep(0.1)
        self._client.send("pause", {})
        rows = self._client.steps(after_step=first - 1, limit=steps + 1).steps
        return [after.committed_at - before.committed_at for before, after in itertools.pairwise(rows)]

    @property
    def _newest_id(self) -> int:
        """The newest profile's event number."""
        found = self._client.traces(None, 1).profiles
        return found[-1].id if found else 0

    def _last_profiled(self, known: int) -> int:
        """The last step of the profile after event `known`, once its trace is written."""
        while self._newest_id == known:
            time.sleep(0.1)
        done = self._client.traces(None, 1).profiles[-1].data
        assert isinstance(done, Profiled), done.text
        return done.last_step

    def close(self) -> None:
        self._client.send("stop", {"checkpoint": False})
        while (run := self._client.snapshot(0).run) is not None and run.state in m.ACTIVE_RUN_STATES:
            time.sleep(0.1)
        self._client.__exit__(None, None, None)
        self._agent.terminate()
        self._agent.wait(20)


def main() -> int:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["torch", "mlx"], default="torch")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            before, after = measure(Path(folder), options)
        finally:
            kill_left(Path(folder))  # trainers outlive their agents
    medians = [pair.median for pair in before]
    base = statistics.median(medians)
    found = interval([pair.median / base for pair in after])
    worst = {"before": max(pair.worst for pair in before), "after": max(pair.worst for pair in after)}
    print(f"{'pair':>4} {'before':>8} {'worst':>8} {'after a profile':>16} {'worst':>8}")
    for number, (was, now) in enumerate(zip(before, after, strict=True), 1):
        print(f"{number:>4} {was.median:>8.3f} {was.worst:>8.3f} {now.median:>16.3f} {now.worst:>8.3f}")
    said = {"backend": options.backend, "bar": BAR, "before": interval(medians), "worst": worst, **found}
    print(json.dumps(said))
    return 0 if abs(found["median"] - 1) <= BAR else 1


def measure(folder: Path, options: argparse.Namespace) -> tuple[list[Pair], list[Pair]]:
    """The ratios of pairs before any profile, and of those after one."""
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    config = write_config(folder, options)
    sides = [Side(config, folder / name) for name in ("profiled", "other")]
    try:
        return tuple(  # type: ignore[return-value]
            [_pair(*sides, options.steps, number, profiled=profiled) for number in range(options.pairs)]
            for profiled in (False, True)
        )
    finally:
        for side in sides:
            side.close()


def _pair(one: Side, other: Side, steps: int, number: int, *, profiled: bool) -> Pair:
    """The order alternates."""
    turns = [lambda: one.steps(steps, profiled=profiled), lambda: other.steps(steps, profiled=False)]
    order = (0, 1) if number % 2 == 0 else (1, 0)
    found = {place: turns[place]() for place in order}
    usual = statistics.median(found[1])
    return Pair(statistics.median(found[0]) / usual, max(found[0]) / usual)


if __name__ == "__main__":
    sys.exit(main())
