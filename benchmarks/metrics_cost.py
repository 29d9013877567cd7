"""Measures the cost of metrics, in a training loop that reports them (`report`) and in the agent that records them
(`agent`).

    python -m benchmarks metrics_cost [report|agent] [--count N] [--burst N] [--seconds N]

`report` is a step of ten values, beside wandb (offline) and tensorboardX where installed, and beside the least there
could be: the same row encoded and put on a queue that another thread takes from. The real loop runs real plans;
only its arithmetic is replaced, by a matrix product, which the peers get too. Counted is all that a step spends to
report: memory's peak begun, the Report made (memory read included), kept for the next fence, Soon and Report handed to
the control thread (which sends them to a real ROUTER over a socket file), and the Report handed to the thread that
writes rank-0.db. Phase switches, which time the step and show its phase, are a row of their own. The bars are on
ratios, measured in blocks that alternate. Also: 100,000 rapid reports must all reach rank-0.db.

`agent` is 64 metrics of a run from each of 8 ranks, 10 steps/s, for 5 minutes. A real agent process records and
publishes an attached run; this process is the run's program and sends its steps twice a second. Counted is the CPU time
of the agent's process, bytes on disk of a raw value, and how long the agent takes for a chart of one metric of all
ranks at each zoom. Prints a table for each, then one JSON line; exits 1 if a bar is missed.
"""

import argparse
import importlib.util
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import psutil
from lib.reporting import Loop, Micros, Reporter
from lib.sides import agent

from trainctl.protocol.client import BlockingClient
from trainctl.protocol.messages import GuestPart, GuestRank, GuestStep, HistoryRequest, Phases
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.schema import VALUES_KEPT, open_for_reading
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.step.observer import Stopwatch

# ---------------------------------------------------------------- a training loop that reports

TO_ROW, TO_TEN = "ten values / the same row encoded and put on a queue", "forty values / ten values"
"""Ratios of medians, with short work between reports."""
BARS = {TO_ROW: 3.0, TO_TEN: 2.0}
"""Largest medians allowed."""
TEN, FORTY = 10, 40
PAIRS, BLOCK = 100, 50
Z_95 = 1.96
WORK = {"short work": 100, "long work": 400}
"""Side of the matrix product between two reports. Long work empties the processor's caches and puts the other cores to
sleep, which whatever comes after it pays for; short work shows the cost of reporting itself."""
OURS = "trainctl"


def measured(report: Callable[[int], None], count: int, work: int) -> Micros:
    """Return the microseconds of each of `count` reports, with a matrix product of side `work` between two."""
    spent = np.empty(count)
    matrix = np.ones((work, work), np.float32)
    for step in range(1, count + 1):
        matrix @ matrix
        begun = time.perf_counter()
        report(step)
        spent[step - 1] = time.perf_counter() - begun
    return spent * 1e6


def of_trainctl(folder: Path, count: int, work: int) -> Micros:
    with Reporter(folder, work, TEN) as reporter:
        return reporter.measure(count)


def of_phase_switches(folder: Path, count: int, work: int) -> Micros:
    """Time a step of one micro-batch: five phases timed and shown, three states shown."""
    status = StatusWriter(folder / "rank-0.status", os.getpid())

    def switch(step: int) -> None:
        watch = Stopwatch(status, 0.0)
        status.show("data", step, (1, 1))
        for name in ("data", "forward", "backward", "sync", "optimizer"):
            with watch.phase(name):
                pass
        status.show("commit")
        status.show("idle")

    spent = measured(switch, count, work)
    status.close()
    return spent


def peer_values(step: int) -> dict[str, float]:
    return {f"value_{place}": step * 1e-3 + place for place in range(TEN)}


def of_wandb(folder: Path, count: int, work: int) -> Micros:
    """Time wandb's `log` in offline mode."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    import wandb

    run = wandb.init(project="bench", dir=str(folder), mode="offline")
    spent = measured(lambda step: run.log(peer_values(step), step=step), count, work)
    run.finish()
    return spent


def of_tensorboardx(folder: Path, count: int, work: int) -> Micros:
    """Time tensorboardX's `add_scalar`, ten times."""
    import tensorboardX

    writer = tensorboardX.SummaryWriter(str(folder))

    def report(step: int) -> None:
        for name, value in peer_values(step).items():
            writer.add_scalar(name, value, step)

    spent = measured(report, count, work)
    writer.close()
    return spent


PEERS: Mapping[str, tuple[str, Callable[[Path, int, int], Micros]]] = {
    OURS: ("trainctl", of_trainctl),
    "its phase switches": ("trainctl", of_phase_switches),
    "wandb offline": ("wandb", of_wandb),
    "tensorboardX": ("tensorboardX", of_tensorboardx),
}
"""By name: the module that must be installed, and what measures it."""


def ratio_of(ours: Callable[[int], Micros], other: Callable[[int], Micros]) -> dict[str, float]:
    """Compare the medians of PAIRS blocks of each, one after the other, either one first in turn. The 95 % interval is
    by order, whatever the ratios' distribution: other work on the machine spoils some of them."""
    ratios = []
    for pair in range(PAIRS):
        first, second = (float(np.median(side(BLOCK))) for side in ((ours, other) if pair % 2 else (other, ours)))
        ratios.append(first / second if pair % 2 else second / first)
    ratios.sort()
    beside = int(PAIRS / 2 - Z_95 * math.sqrt(PAIRS) / 2)
    return {"median": float(np.median(ratios)), "low": ratios[beside], "high": ratios[-1 - beside]}


def ratios() -> dict[str, dict[str, float]]:
    """Return ours against the row, and against itself with more values."""
    work = WORK["short work"]
    matrix = np.ones((work, work), np.float32)
    queue: SimpleQueue[bytes] = SimpleQueue()

    def take() -> None:
        while queue.get():
            pass

    threading.Thread(target=take, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as few, Reporter(Path(few), work, TEN) as ten:

        def put(step: int) -> None:
            queue.put(msgspec.msgpack.encode(ten.report))

        found = {TO_ROW: ratio_of(ten.measure, lambda count: measured(put, count, len(matrix)))}
        queue.put(b"")
        with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as more, Reporter(Path(more), work, FORTY) as forty:
            found[TO_TEN] = ratio_of(forty.measure, ten.measure)
    return found


def count_after_a_burst(folder: Path, count: int) -> int:
    """Return the rows in rank-0.db after `count` reports as fast as they can be made."""
    status = StatusWriter(folder / "rank-0.status", os.getpid())
    report = Loop(1, status, lambda message: None, TEN).step()
    writer = MetricsWriter(folder / "rank-0.db", "here")
    for step in range(1, count + 1):
        writer.append(msgspec.structs.replace(report, step=step, seq=step))
    writer.close()
    status.close()
    connection = open_for_reading(folder / "rank-0.db")
    (rows,) = connection.execute("SELECT count(*) FROM rank_steps").fetchone()
    connection.close()
    return int(rows)


def report(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    timed: dict[str, dict[str, dict[str, float]]] = {}
    print(f"{'a step of ten values, µs':<26}{'between two':<14}{'median':>10}{'p99':>10}{'mean':>10}{'ratio':>8}")
    for peer, (module, measure) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{peer}: not installed")
            continue
        timed[peer] = {}
        for kind, work in WORK.items():
            with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:
                spent = measure(Path(folder), options.count, work)
            median, p99 = (float(value) for value in np.percentile(spent, [50, 99]))
            timed[peer][kind] = {"median_us": median, "p99_us": p99, "mean_us": float(spent.mean())}
            figures = "".join(f"{value:>10.1f}" for value in timed[peer][kind].values())
            print(f"{peer:<26}{kind:<14}{figures}{median / timed[OURS][kind]['median_us']:>8.1f}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        arrived = count_after_a_burst(Path(folder), options.burst)
    print(f"{arrived:,} of {options.burst:,} rapid reports in rank-0.db", flush=True)
    compared = ratios()
    for name, ratio in compared.items():
        interval = f"95 % within {ratio['low']:.2f} and {ratio['high']:.2f}"
        print(f"{name}: {ratio['median']:.2f}, {interval}, bar {BARS[name]:.0f}")
    passed = arrived == options.burst and all(ratio["median"] <= BARS[name] for name, ratio in compared.items())
    return {"reports": timed, "ratios": compared, "burst": options.burst, "arrived": arrived}, passed


# ---------------------------------------------------------------- an agent that records

RANKS, METRICS, STEPS_PER_SECOND, COLUMNS = 8, 64, 10, 240
CORE_BAR, BYTES_BAR, CHART_BAR_SECONDS = 0.15, 24.0, 0.05
SEND_SECONDS = 0.5
RUN = "measured"
NAMES = tuple(f"user:metric_{number}" for number in range(METRICS))


def agent_cost(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    with tempfile.TemporaryDirectory() as folder:
        with agent("bench", Path(folder)) as (process, address), BlockingClient(address, by="bench") as client:
            run = client.attach_run(RUN, "bench", [GuestRank(rank) for rank in range(RANKS)])
            core, last = feed(client, psutil.Process(process.pid), options.seconds)
            spans = sorted({min(span, last) for span in (100, 1_000, 10_000, last)})
            charts = {f"{span:,}": slowest_chart(client, span, last) for span in spans}
            client.end_run(RUN)
        connection = open_for_reading(Path(run.directory) / "record.db")
        (size,) = connection.execute("SELECT sum(pgsize) FROM dbstat WHERE name LIKE '%metric_values%'").fetchone()
        (count,) = connection.execute("SELECT sum(length(body) / 8) FROM metric_values").fetchone()
        connection.close()
    print(f"{METRICS} metrics x {RANKS} ranks x {STEPS_PER_SECOND} steps/s: {core:.1%} of a core, bar {CORE_BAR:.0%}")
    print(f"a raw value on disk: {size / count:.1f} B, bar {BYTES_BAR:.0f}; values of {VALUES_KEPT:,} steps are kept")
    for span, seconds in charts.items():
        print(f"a chart of {span} steps: {seconds * 1e3:.1f} ms, bar {CHART_BAR_SECONDS * 1e3:.0f}")
    figures = {"core": core, "bytes_a_value": size / count, "chart_seconds": charts, "steps": last}
    return figures, core <= CORE_BAR and size / count <= BYTES_BAR and max(charts.values()) <= CHART_BAR_SECONDS


def feed(client: BlockingClient, process: psutil.Process, seconds: float) -> tuple[float, int]:
    """Send steps at their pace; return the agent's share of a core, and the newest step."""
    begun, before, last = time.monotonic(), process.cpu_times(), 0
    while (elapsed := time.monotonic() - begun) < seconds:
        due = int(elapsed * STEPS_PER_SECOND)
        client.run_steps(RUN, [step(number) for number in range(last + 1, due + 1)])
        last = due
        time.sleep(SEND_SECONDS)
    spent = sum(process.cpu_times()[:2]) - sum(before[:2])
    return spent / (time.monotonic() - begun), last


def step(number: int) -> GuestStep:
    """Return a step with a value of each metric of each rank."""
    phases = Phases(0.001, 0.03, 0.05, 0.01, 0.005)
    values = [{name: random.random() for name in NAMES} for _ in range(RANKS)]
    parts = [
        GuestPart(rank, 384.0, 384.0, 3, step_seconds=0.1, phases=phases, values=own) for rank, own in enumerate(values)
    ]
    whole = {"samples": 24, "tokens": 3072, "weight": 3072.0, "loss": 2.0}
    return GuestStep(step=number, committed_at=time.time(), step_seconds=0.1, parts=tuple(parts), **whole)


def slowest_chart(client: BlockingClient, span: int, last: int) -> float:
    """Return the seconds of a chart of the newest `span` steps, from request to reply: the slowest of five metrics,
    each the median of three requests."""

    def seconds(name: str) -> float:
        begun = time.perf_counter()
        client.ask(HistoryRequest, RUN, (name,), last - span + 1, last, COLUMNS)
        return time.perf_counter() - begun

    return max(statistics.median(seconds(name) for _ in range(3)) for name in NAMES[:: METRICS // 5])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sections = {"report": report, "agent": agent_cost}
    parser.add_argument("section", nargs="?", choices=[*sections], help="one of both; without it, both")
    parser.add_argument("--count", type=int, default=3000, help="reports timed for each")
    parser.add_argument("--burst", type=int, default=100_000, help="rapid reports that must all arrive")
    parser.add_argument("--seconds", type=float, default=300.0, help="for which the agent records")
    options = parser.parse_args()
    names = [options.section] if options.section else [*sections]
    results = {name: sections[name](options) for name in names}
    passed = all(passed for _, passed in results.values())
    print(json.dumps({name: figures for name, (figures, _) in results.items()} | {"passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
