"""What a run's own metrics cost an agent: 64 from each of 8 ranks, 10 steps/s, for 5 minutes.

A real agent process records and publishes an attached run; this process is the run's program and sends its steps twice
a second. Counted is the CPU time of the agent's process, bytes on disk of a raw value, and how long the agent takes for
a chart of one metric of all ranks at each zoom. Prints a table, then one JSON line; exits 1 if a bar is missed.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from trainctl.protocol import messages as m
from trainctl.protocol.client import BlockingClient
from trainctl.protocol.record.schema import VALUES_KEPT, open_for_reading

RANKS, METRICS, STEPS_PER_SECOND, COLUMNS = 8, 64, 10, 240
CORE_BAR, BYTES_BAR, CHART_BAR_SECONDS = 0.15, 24.0, 0.05
SEND_SECONDS = 0.5
RUN = "measured"
NAMES = tuple(f"user:metric_{number}" for number in range(METRICS))
SOME = NAMES[:: METRICS // 5]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", "bench", "--state", folder]
        command += ["--listen", "tcp://127.0.0.1:0", "--live", "tcp://127.0.0.1:0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
            try:
                assert agent.stdout is not None
                address = json.loads(agent.stdout.readline())["listen"]
                with BlockingClient(address, by="bench", timeout_seconds=60.0) as client:
                    record = Path(
                        client.attach_run(RUN, "bench", [m.GuestRank(rank) for rank in range(RANKS)]).directory
                    )
                    core, last = feed(client, psutil.Process(agent.pid), seconds)
                    drawn = charts(client, last)
                    client.end_run(RUN)
            finally:
                agent.terminate()
        size, count = stored(record / "record.db")
    each = size / count
    print(f"{METRICS} metrics x {RANKS} ranks x {STEPS_PER_SECOND} steps/s: {core:.1%} of a core, bar {CORE_BAR:.0%}")
    print(f"a raw value on disk: {each:.1f} B, bar {BYTES_BAR:.0f}; values of {VALUES_KEPT:,} steps are kept")
    for span, took in drawn.items():
        print(f"a chart of {span} steps: {took * 1e3:.1f} ms, bar {CHART_BAR_SECONDS * 1e3:.0f}")
    made = {"core": round(core, 4), "bytes_a_value": round(each, 2), "chart_seconds": drawn, "steps": last}
    print(json.dumps(made))
    return int(core > CORE_BAR or each > BYTES_BAR or max(drawn.values()) > CHART_BAR_SECONDS)


def feed(client: BlockingClient, agent: psutil.Process, seconds: float) -> tuple[float, int]:
    """Send steps at their pace; the agent's share of a core, and the newest step."""
    begun, spent, last = time.monotonic(), cpu_seconds(agent), 0
    while (elapsed := time.monotonic() - begun) < seconds:
        due = int(elapsed * STEPS_PER_SECOND)
        client.run_steps(RUN, [step(number) for number in range(last + 1, due + 1)])
        last = due
        time.sleep(SEND_SECONDS)
    return (cpu_seconds(agent) - spent) / (time.monotonic() - begun), last


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def step(number: int) -> m.GuestStep:
    """One with a value of each metric of each rank."""
    parts = tuple(
        m.GuestPart(
            rank, 384.0, 384.0, 3, step_seconds=0.1, phases=m.Phases(0.001, 0.03, 0.05, 0.01, 0.005),
            values={name: random.random() for name in NAMES},
        )
        for rank in range(RANKS)
    )  # fmt: skip
    return m.GuestStep(
        step=number,
        committed_at=time.time(),
        step_seconds=0.1,
        samples=24,
        tokens=3072,
        weight=3072.0,
        loss=2.0,
        parts=parts,
    )


def charts(client: BlockingClient, last: int) -> dict[str, float]:
    """Seconds of the slowest of five metrics, each the median of three requests, by the steps in view."""
    slowest: dict[str, float] = {}
    for span in sorted({min(span, last) for span in (100, 1_000, 10_000, last)}):
        took = (statistics.median(chart_seconds(client, name, span, last) for _ in range(3)) for name in SOME)
        slowest[f"{span:,}"] = round(max(took), 4)
    return slowest


def chart_seconds(client: BlockingClient, name: str, span: int, last: int) -> float:
    """One chart of the newest `span` steps, from request to reply."""
    begun = time.perf_counter()
    client.history(RUN, (name,), last - span + 1, last, COLUMNS)
    return time.perf_counter() - begun


def stored(record: Path) -> tuple[int, int]:
    """Bytes of the table of raw values, and how many it has."""
    connection = open_for_reading(record)
    (size,) = connection.execute("SELECT sum(pgsize) FROM dbstat WHERE name LIKE '%metric_values%'").fetchone()
    (count,) = connection.execute("SELECT sum(length(body) / 8) FROM metric_values").fetchone()
    connection.close()
    return size, count


if __name__ == "__main__":
    sys.exit(main())
