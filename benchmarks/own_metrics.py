"""What metrics that a run brings cost the lead's agent: 64 of them from each of 8 ranks.

Each step is what the agent does with 8 reports: decoded from the wire, made into rows, encoded to be published, and
written into a real record with its rollups. Sockets and the rest of the loop are not in it. Counted is CPU time of this
process. Then bytes on disk of a raw value, and how long a chart of one metric of all ranks takes at each zoom.
Prints a table, then one JSON line; exits 1 if a bar is missed.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from trainctl.node_agent.conductor import rows
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import VALUES_KEPT, open_for_reading
from trainctl.protocol.wire import codec

RANKS, METRICS, STEPS_PER_SECOND, COLUMNS = 8, 64, 10, 240
CORE_BAR, BYTES_BAR, CHART_BAR_SECONDS = 0.15, 24.0, 0.05
GENERATION = m.Generation(1, 1)
NAMES = tuple(f"user:metric_{number}" for number in range(METRICS))


def reports(step: int) -> list[bytes]:
    """Of all ranks, as they come from the trainers."""
    values = [{name: random.random() for name in NAMES} for _ in range(RANKS)]
    return [
        codec.encode(m.Report(
            run="run", rank=rank, generation=GENERATION, seq=step, kind="train", step=step, loss_sum=6604.8,
            weight=3072.0, own_weight=384.0, own_samples=3, grad_norm=0.71, micro_batch=3,
            phases=m.Phases(0.001, 0.03, 0.05, 0.01, 0.005, 0.001), step_seconds=0.1, finished_at=time.time(),
            values=of_rank,
        ))
        for rank, of_rank in enumerate(values)
    ]  # fmt: skip


def take(recorder: RunDb, plan: m.StepPlan, frames: list[bytes]) -> None:
    """One step's reports, as the lead's agent takes them."""
    told = [codec.decode_answer(frame) for frame in frames]
    taken = [report for report in told if isinstance(report, m.Report)]
    step = rows.step_committed(taken[0], plan, 24 * taken[0].step, rows.RunSums().after(taken[0]))
    parts = [rows.rank_step(report, f"node-{report.rank}") for report in taken]
    for message in (step, *parts):
        codec.encode(message)
    recorder.commit(step, parts, time.time())


def charts(directory: Path, last: int) -> dict[str, float]:
    """Seconds of the slowest of five metrics, all ranks, by the steps in view; each drawn three times, the median."""
    slowest: dict[str, float] = {}
    for span in (100, 1_000, 10_000, 100_000, last):
        first = max(last - span + 1, 1)
        for name in NAMES[:: METRICS // 5]:
            took = statistics.median(draw(directory, name, first, last) for _ in range(3))
            slowest[f"{min(span, last)} steps"] = max(slowest.get(f"{min(span, last)} steps", 0.0), took)
    return slowest


def draw(directory: Path, name: str, first: int, last: int) -> float:
    """Seconds of one chart."""
    begun = time.perf_counter()
    with RecordReader(directory) as reader:
        for rank in range(RANKS):
            reader.series(name, rank, first, last, COLUMNS)
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="3,000 are 5 minutes at 10 steps/s")
    parser.add_argument("--apart", type=int, default=1, help="steps' numbers are so far apart")
    given = parser.parse_args()
    steps, apart = given.steps, given.apart
    plan = m.StepPlan(
        run="run", generation=GENERATION, seq=1, kind="train", step=1, plan_version=1, cursor=0, global_batch=24,
        work=(), learning_rate=1e-3, divisor=1.0,
    )  # fmt: skip
    spent = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        directory.mkdir()
        paths = RunPaths(directory)
        with RunDb(paths) as recorder:
            for step in range(1, steps + 1):
                frames = reports(step * apart)
                begun = time.process_time()
                take(recorder, plan, frames)
                spent.append(time.process_time() - begun)
        connection = open_for_reading(paths.record)
        (size,) = connection.execute("SELECT sum(pgsize) FROM dbstat WHERE name LIKE '%metric_values%'").fetchone()
        (count,) = connection.execute("SELECT sum(length(body) / 8) FROM metric_values").fetchone()
        connection.close()
        drawn = charts(directory, steps * apart)
    core, each = statistics.fmean(spent) * STEPS_PER_SECOND, size / count
    result = {
        "core": round(core, 4), "bytes_a_value": round(each, 2), "values_kept_steps": VALUES_KEPT,
        "chart_seconds": {span: round(seconds, 4) for span, seconds in drawn.items()},
    }  # fmt: skip
    print(f"{METRICS} metrics x {RANKS} ranks x {STEPS_PER_SECOND} steps/s: {core:.1%} of a core, bar {CORE_BAR:.0%}")
    print(f"a raw value on disk: {each:.1f} B, bar {BYTES_BAR:.0f}")
    for span, seconds in drawn.items():
        print(f"a chart of {span}: {seconds * 1e3:.1f} ms, bar {CHART_BAR_SECONDS * 1e3:.0f}")
    print(json.dumps(result))
    return int(core > CORE_BAR or each > BYTES_BAR or max(drawn.values()) > CHART_BAR_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
