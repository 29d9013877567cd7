"""Cost that a profile leaves behind: the length of a run's later steps, beside those of a run that is never profiled.

    python -m benchmarks profile_cost [--backend torch|mlx] [--pairs N] [--steps N] [--threads N]

Two agents each host the same run, both at once, so that what slows the machine slows both. Every other turn begins with
a profile of 3 steps of one of them, and counts the steps that end after the last recorded one: the loop waits for the
profiler in the first of these, and the trace is written during those that follow. A turn's ratio is the median step of
the profiled run over that of the other in the same time. A pair is a turn with a profile and one without, in either
order, and its figure the one's ratio over the other's. Prints a table, then one JSON object; exits 1 if the median is
over the bar. It needs a core for each run.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from hosted_overhead import NODE, write_config
from lib.ratios import interval
from lib.sides import agent, end_on_sigterm, kill_left

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import ACTIVE_RUN_STATES, SnapshotRequest, StepProfilesRequest, StepsRequest
from trainctl.protocol.messages.events import Profiled
from trainctl.trainer import demo_assets

BAR = 0.02
"""Largest part by which the steps after a profile may be longer or shorter."""
PROFILED_STEPS = 3
WARM_STEPS = 6
"""Steps of both runs before the first turn."""
POLL_SECONDS = 0.5
"""Seldom, for asking takes time from what is measured."""


class Turn(NamedTuple):
    """Steps of the profiled run over the median step of the other."""

    median: float
    worst: float


class Side:
    """A run under an agent of its own."""

    def __init__(self, config: dict[str, Any], state: Path) -> None:
        self._agent = agent(NODE, state)
        _, address = self._agent.__enter__()
        self._client = BlockingClient(address).__enter__()
        self._client.send("start-run", {"config": config}, timeout_seconds=120)

    @property
    def step(self) -> int:
        """The last one."""
        run = self._client.ask(SnapshotRequest, 0).run
        assert run is not None
        return run.step

    def profile(self) -> int:
        """The last step of a profile, once its trace is there."""
        known = self._newest_id
        self._client.send("profile", {"steps": PROFILED_STEPS})
        while self._newest_id == known:
            time.sleep(POLL_SECONDS)
        done = self._client.ask(StepProfilesRequest, None, 1).profiles[-1].data
        assert isinstance(done, Profiled), done.text
        return done.last_step

    @property
    def _newest_id(self) -> int:
        """The newest profile's event number."""
        found = self._client.ask(StepProfilesRequest, None, 1).profiles
        return found[-1].id if found else 0

    def commits(self, first: int) -> list[float]:
        """Times of the commits from a step on."""
        return [row.committed_at for row in self._client.ask(StepsRequest, after_step=first - 1, limit=500).steps]

    def close(self) -> None:
        self._client.send("stop", {"checkpoint": False})
        while (run := self._client.ask(SnapshotRequest, 0).run) is not None and run.state in ACTIVE_RUN_STATES:
            time.sleep(POLL_SECONDS)
        self._client.__exit__(None, None, None)
        self._agent.__exit__(None, None, None)


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
    ratios = [now.median / was.median for was, now in zip(before, after, strict=True)]
    found, usual = interval(ratios), interval([turn.median for turn in before])
    worst = {"before": max(turn.worst for turn in before), "after": max(turn.worst for turn in after)}
    print(f"{'pair':>4} {'without':>8} {'worst':>8} {'after a profile':>16} {'worst':>8} {'ratio':>8}")
    for number, (was, now, ratio) in enumerate(zip(before, after, ratios, strict=True), 1):
        print(f"{number:>4} {was.median:>8.3f} {was.worst:>8.3f} {now.median:>16.3f} {now.worst:>8.3f} {ratio:>8.3f}")
    print(json.dumps({"backend": options.backend, "bar": BAR, "without": usual, "worst": worst, **found}))
    return 0 if abs(found["median"] - 1) <= BAR else 1


def measure(folder: Path, options: argparse.Namespace) -> tuple[list[Turn], list[Turn]]:
    """By pair, the turn without a profile and the one with it."""
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    config = write_config(folder, options)
    one, other = sides = tuple(Side(config, folder / name) for name in ("profiled", "other"))
    try:
        for side in sides:
            while side.step < WARM_STEPS:
                time.sleep(POLL_SECONDS)
        found: tuple[list[Turn], list[Turn]] = ([], [])
        for number in range(options.pairs):
            for profiled in (False, True) if number % 2 == 0 else (True, False):
                found[profiled].append(_turn(one, other, options.steps, profiled=profiled))
        return found
    finally:
        for side in sides:
            side.close()


def _turn(one: Side, other: Side, steps: int, *, profiled: bool) -> Turn:
    first, beside = (one.profile() if profiled else one.step), other.step
    while one.step < first + steps:
        time.sleep(POLL_SECONDS)
    commits = one.commits(first)[: steps + 1]
    earlier = max(1, beside - 2 * steps)  # the other's steps began before the trace was there
    meanwhile = [at for at in other.commits(earlier) if commits[0] <= at <= commits[-1]]
    own, usual = (_seconds(times) for times in (commits, meanwhile))
    middle = statistics.median(usual)
    return Turn(statistics.median(own) / middle, max(own) / middle)


def _seconds(commits: list[float]) -> list[float]:
    """Return the seconds of each step."""
    return [after - before for before, after in itertools.pairwise(commits)]


if __name__ == "__main__":
    sys.exit(main())
