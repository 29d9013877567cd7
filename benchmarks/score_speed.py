"""`trainctl score` on three unequal nodes, beside three plain loops with transformers that run at once.

The nodes' workers and the loops are held to 100, 50 and 20 % of a core by cgroups (root, Linux). Rates are rows per
second while all workers work, to the end of the work: loading is in neither side's time. Each file is scored twice, and
the loops run before and after each. The second time one worker is killed on the way; then the loops' rows count without
those that its node could have done from its last answer until its next worker had loaded. Every row must have one
result. Other programs should be quiet, for their load changes between the loops and the scoring. Exit status 1 if a
ratio is under the bar or a row isn't there once, 2 if no cgroup can be made.
"""

import argparse
import asyncio
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from lib.sides import SEQUENCE, Cluster, end, end_on_sigterm, run_config, until
from unequal import Quota

from trainctl.protocol.client.client import Client
from trainctl.protocol.machine import shim
from trainctl.protocol.messages import ACTIVE_RUN_STATES, RunView, SnapshotRequest, WorkView
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer import demo_assets
from trainctl.tui.export.row_scores import ScoreRequest, Scoring, new_id, read_file

BAR = 0.95
CORES = {"fast": 1.0, "middle": 0.5, "slow": 0.2}
MICRO_BATCH = 8
LOAD_SECONDS = 15.0
"""About how much later the last worker has loaded than the first."""
SETTLE_SECONDS = 5.0
"""Time after all workers have begun, in which the dealer learns their speeds."""
VICTIM = "middle"
"""Node whose worker is killed."""


Measure = Callable[[Path, argparse.Namespace, dict[str, Quota]], list[dict[str, float]]]


def main() -> int:
    return run(__doc__.splitlines()[0], measure, ("ratio", "ratio_with_kill"))


def run(description: str, measured: Measure, ratios: Sequence[str]) -> int:
    """Read the options, have the rounds measured under quotas, and print them with the medians of `ratios`. Returns the
    exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=30.0, help="about how long a measurement takes")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    end_on_sigterm()
    with ExitStack() as stack:
        try:
            quotas = {node: Quota(cores, node) for node, cores in CORES.items()}
        except OSError as error:
            print(f"no cgroup can be made here: {error}", file=sys.stderr)
            return 2
        for quota in quotas.values():
            stack.callback(quota.remove)
        rows = measured(Path(stack.enter_context(tempfile.TemporaryDirectory())), options, quotas)
    for row in rows:
        print(", ".join(f"{name} {value:,.3f}" for name, value in row.items()))
    medians = {name: statistics.median(row[name] for row in rows) for name in ratios}
    print(json.dumps({"bar": BAR, **{f"median_{name}": round(value, 4) for name, value in medians.items()}}))
    return 0 if min(medians.values()) >= BAR else 1


def measure(folder: Path, options: argparse.Namespace, quotas: dict[str, Quota]) -> list[dict[str, float]]:
    """For each round and both scorings the loops' rate, the scoring's and the ratio."""
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    chance = random.Random(3)
    text = "".join(path.read_text("utf-8") for path in sorted((folder / "data").rglob("*.txt")))
    found = []
    with Cluster(folder, [*CORES]) as cluster:
        run = trained(folder, cluster)
        for _ in range(options.rounds):
            make_rows(folder / "rows.jsonl", text, 600, chance)
            first = loop_rates(folder, options.seconds, quotas)
            count = int(sum(first.values()) * (options.seconds + LOAD_SECONDS + SETTLE_SECONDS))
            make_rows(folder / "rows.jsonl", text, count, chance)
            quiet = Measurement(folder, cluster, run, quotas)
            quiet.score()
            second = loop_rates(folder, options.seconds, quotas)
            killed = Measurement(folder, cluster, run, quotas, kill_after=SETTLE_SECONDS + options.seconds / 3)
            killed.score()
            third = loop_rates(folder, options.seconds, quotas)
            found.append({**compared(quiet, first, second), **compared(killed, second, third, "_with_kill")})
    return found


def compared(
    made: "Measurement", before: dict[str, float], after: dict[str, float], name: str = ""
) -> dict[str, float]:
    """A scoring beside the mean of the loops before and after it, for other programs may take more or less CPU."""
    loops = sum(before.values()) / 2 + sum(after.values()) / 2
    lost = (before[VICTIM] + after[VICTIM]) / 2 * made.out_seconds
    ratio = made.rows / (loops * made.seconds - lost)
    found = {f"loops{name}": loops, f"score{name}": made.rows / made.seconds, f"ratio{name}": ratio}
    return found | ({"out_seconds": made.out_seconds} if made.out_seconds else {})


def trained(folder: Path, cluster: Cluster) -> str:
    """The id of a run with a checkpoint, to which `checkpoint` then leads."""
    config = run_config(folder, [*CORES], 3 * MICRO_BATCH, MICRO_BATCH, first_shares="even")
    config |= {"run": {"name": "bench", "steps": 1}, "checkpoint": {"at_end": True}}
    run = cluster.client.send("start-run", {"config": config}, timeout_seconds=300).run
    assert run is not None

    def ended() -> RunView | None:
        view = cluster.client.ask(SnapshotRequest, 0).run
        return view if view is not None and view.state not in ACTIVE_RUN_STATES else None

    view = until(ended, "the run's end")
    (folder / "checkpoint").symlink_to(RunPaths(Path(view.directory)).checkpoint(1))
    return run


def make_rows(path: Path, text: str, count: int, chance: random.Random) -> None:
    """Texts of unlike lengths."""
    starts = ((chance.randrange(len(text) - 400), chance.randrange(40, 360)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text[start : start + size]}) + "\n" for start, size in starts))


def loop_rates(folder: Path, seconds: float, quotas: dict[str, Quota]) -> dict[str, float]:
    """Rows per second of three plain loops that run at once."""
    command = [sys.executable, str(Path(__file__).parent / "lib" / "score_loop.py"), str(folder)]
    command.append(str(MICRO_BATCH * SEQUENCE))
    loops = {
        node: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for node in CORES
    }
    for node, loop in loops.items():
        said(loop)
        quotas[node].hold(loop.pid)
    for loop in loops.values():
        assert loop.stdin is not None
        loop.stdin.write(f"{seconds}\n")
        loop.stdin.close()
    rates = {node: said(loop) for node, loop in loops.items()}
    for loop in loops.values():
        end(loop)
    return rates


def said(loop: "subprocess.Popen[str]") -> float:
    assert loop.stdout is not None
    return float(loop.stdout.readline())


class Measurement:
    """One scoring of the file, from when all workers have settled in to the end."""

    def __init__(
        self, folder: Path, cluster: Cluster, run: str, quotas: dict[str, Quota], kill_after: float | None = None
    ) -> None:
        """`kill_after`: seconds from when all workers have answered until the victim's worker is killed."""
        self._folder, self._run, self._quotas, self._kill_after = folder, run, quotas, kill_after
        self._address = cluster.client.ask(SnapshotRequest, 0).node.address
        self._seen: list[tuple[float, WorkView]] = []
        self._held: dict[str, int] = {}  # by node
        self._all_work_at = self._killed_at = 0.0
        self.rows = 0
        self.seconds = self.out_seconds = 0.0

    def score(self) -> None:
        """Raises SystemExit if a row doesn't have one result."""
        output = io.BytesIO()
        asyncio.run(self._score(output))
        lines = [json.loads(line) for line in output.getvalue().splitlines()]
        wanted = self._seen[-1][1].rows
        if [line["row"] for line in lines] != [*range(1, wanted + 1)] or any("error" in line for line in lines):
            raise SystemExit(f"{len(lines)} results for {wanted} rows, or with errors")
        start, first = next((at, view) for at, view in self._seen if at >= self._all_work_at + SETTLE_SECONDS)
        finish, last = next((at, view) for at, view in self._seen if view.answered == view.rows)
        self.rows, self.seconds = last.answered - first.answered, finish - start
        if self._kill_after is not None:
            self.out_seconds = self._out_seconds()
        print({node.node: node.rows for node in last.nodes}, file=sys.stderr)

    async def _score(self, output: io.BytesIO) -> None:
        rows = read_file(self._folder / "rows.jsonl")
        async with Client(self._address) as client:
            await Scoring(client, rows, ScoreRequest(new_id(), self._run, None, False, ()), output, self._show).run()

    def _show(self, view: WorkView) -> None:
        now = time.monotonic()
        self._seen.append((now, view))
        for node in view.nodes:
            if node.state == "working":
                self._hold(node.node)
        if not self._all_work_at and view.nodes and all(node.rows for node in view.nodes):
            self._all_work_at = now
        is_due = self._kill_after is not None and self._all_work_at and now > self._all_work_at + self._kill_after
        if is_due and not self._killed_at:
            self._killed_at = now
            os.kill(self._held[VICTIM], signal.SIGKILL)

    def _hold(self, node: str) -> None:
        """Hold a worker once it has loaded."""
        for file in (self._folder / "state" / node).glob("work/*/rank-0.process.json"):
            known = json.loads(file.read_text())
            if known["pid"] != self._held.get(node) and shim.start_time(known["pid"]) == known["start_time"]:
                self._quotas[node].hold(known["pid"])
                self._held[node] = known["pid"]

    def _out_seconds(self) -> float:
        """From the victim's last answer before its death until its next worker had loaded."""
        of_victim = [
            (at, next(node for node in view.nodes if node.node == VICTIM)) for at, view in self._seen[1:] if view.nodes
        ]
        before = [(at, node.rows) for at, node in of_victim if at <= self._killed_at]
        answered = next(at for at, rows in before if rows == before[-1][1])
        out = next(at for at, node in of_victim if at > self._killed_at and node.state != "working")
        back = next((at for at, node in of_victim if at > out and node.state == "working"), self._seen[-1][0])
        return back - max(answered, self._all_work_at)


if __name__ == "__main__":
    sys.exit(main())
