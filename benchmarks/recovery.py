"""From kill -9 of a trainer to the next step that the survivors commit, beside torchrun elastic on the same model.

    python -m benchmarks recovery [--kills N] [--elastic-kills N]

Three ranks of one CPU thread each; before each kill all three take part. torchrun's workers train the same model on the
same batches, write a checkpoint at every step, the most that they can save, and start again from it all together; its
--monitor-interval is 0.1 s. Last, the same from the kill of a follower's and of the lead's agent, which are started
again at once, to the next committed step. Prints a table and one JSON object; exits 1 if the median is over 1 s and one
step, the 95th percentile over 3 s, or training resumes later than 5 s after an agent's return.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.sides import Cluster, end, end_on_sigterm, kill_left, run_config, until

from trainctl.protocol.messages import RunView, SnapshotRequest, StepCommitted, StepsRequest
from trainctl.trainer import demo_assets

NODES = ["a", "b", "c"]
SAMPLES, MICRO_BATCH = 8, 4
"""Samples of a rank in a step, and those of a micro-batch."""
WHOLE_STEPS = 10
"""Steps of all ranks between two kills: a rank that is killed sooner, again and again, is given up."""
MEDIAN_BAR_SECONDS, P95_BAR_SECONDS, AGENT_BAR_SECONDS = 1.0, 3.0, 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--elastic-kills", type=int, default=5)
    options = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as name:
        try:
            result = measure(Path(name), options, random.Random(1))
        finally:
            left = kill_left(Path(name))
    print(f"{'':>8} {'kills':>5} {'step s':>7} {'median s':>9} {'p95 s':>6}")
    for what in ("ours", "torchrun"):
        row = result[what]
        print(f"{what:>8} {row['count']:>5} {row['step_seconds']:>7.2f} {row['median']:>9.2f} {row['p95']:>6.2f}")
    for node, seconds in result["agent_return_seconds"].items():
        print(f"agent {node} back: next step after {seconds:.2f} s")
    print(json.dumps({**result, "processes_left": left}))
    return 0 if within_bars(result) and not left else 1


def measure(folder: Path, options: argparse.Namespace, chance: random.Random) -> dict[str, Any]:
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    ours, agents = measure_ours(folder, options.kills, chance)
    print(f"killed {options.kills} trainers and {len(agents)} agents; now torchrun", file=sys.stderr, flush=True)
    theirs = measure_elastic(folder, options.elastic_kills, chance)
    bars = {"median": MEDIAN_BAR_SECONDS, "p95": P95_BAR_SECONDS, "agent_return": AGENT_BAR_SECONDS}
    return {"bar_seconds": bars, "ours": ours, "torchrun": theirs, "agent_return_seconds": agents}


def within_bars(result: dict[str, Any]) -> bool:
    ours = result["ours"]
    return bool(
        ours["median"] <= MEDIAN_BAR_SECONDS + ours["step_seconds"]
        and ours["p95"] <= P95_BAR_SECONDS
        and max(result["agent_return_seconds"].values()) <= AGENT_BAR_SECONDS
    )


def summary(seconds: list[float], step_seconds: float) -> dict[str, Any]:
    """Return a summary of the seconds of each kill, beside the median step that was made undisturbed."""
    ordered = [round(value, 4) for value in sorted(seconds)]
    return {
        "count": len(ordered),
        "step_seconds": round(step_seconds, 4),
        "median": statistics.median(ordered),
        "p95": ordered[round(0.95 * (len(ordered) - 1))],
        "all": ordered,
    }


# ---------------------------------------------------------------- trainctl


def measure_ours(folder: Path, kills: int, chance: random.Random) -> tuple[dict[str, Any], dict[str, float]]:
    """From each kill to the survivors' next step; and seconds to it from agents' returns, by node."""
    with Cluster(folder, NODES) as cluster:
        cluster.start(run_config(folder, NODES, SAMPLES * len(NODES), MICRO_BATCH, first_shares="even"))
        cluster.client.send("resume", {}, timeout_seconds=60)
        whole(cluster)
        usual = statistics.median(row.step_seconds for row in newest(cluster))
        found = [after_kill(cluster, chance) for _ in range(kills)]
        agents = {NODES[index]: round(after_agent_kill(cluster, index), 4) for index in (1, 0)}
        return summary(found, usual), agents


def after_kill(cluster: Cluster, chance: random.Random) -> float:
    time.sleep(chance.uniform(0.5, 1.5))
    pid = cluster.trainer_pids()[chance.choice(NODES)]
    before = view(cluster).generation
    begun = time.time()
    os.kill(pid, signal.SIGKILL)
    row = until(lambda: next((row for row in newest(cluster) if row.generation > before), None), "the next step")
    whole(cluster)
    return float(row.committed_at - begun)


def after_agent_kill(cluster: Cluster, index: int) -> float:
    """From the restarted agent's first word to the next step."""
    cluster.restart(index)
    back = time.time()
    row = until(lambda: next((row for row in newest(cluster) if row.committed_at > back), None), "the next step")
    whole(cluster)
    return float(row.committed_at - back)


def newest(cluster: Cluster) -> list[StepCommitted]:
    return list(cluster.client.ask(StepsRequest, after_step=max(0, view(cluster).step - 12)).steps)


def view(cluster: Cluster) -> RunView:
    found = cluster.client.ask(SnapshotRequest, 0).run
    assert found is not None
    return found


def whole(cluster: Cluster) -> None:
    """All ranks take part, and some steps have been made so."""

    def is_whole() -> bool:
        rows = newest(cluster)
        run = view(cluster)
        return (
            all(rank.state == "run" for rank in run.ranks)
            and len([row for row in rows if row.generation == run.generation]) >= WHOLE_STEPS
        )

    until(is_whole, "a whole group")


# ---------------------------------------------------------------- torchrun


def measure_elastic(folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """From each kill of a worker to the next step of those started in its place."""
    log = folder / "steps.jsonl"
    with elastic(folder, kills):
        found = [after_worker_kill(folder, log, chance) for _ in range(kills)]
    rows = lines(log)
    pairs = [(one, two) for one, two in itertools.pairwise(rows) if one["pid"] == two["pid"]]
    return summary(found, statistics.median(two["at"] - one["at"] for one, two in pairs))


def after_worker_kill(folder: Path, log: Path, chance: random.Random) -> float:
    count = len(lines(log))
    until(lambda: len(lines(log)) >= count + 4, "torchrun's steps")
    pids = [int((folder / f"pid-{rank}").read_text()) for rank in range(len(NODES))]
    time.sleep(chance.uniform(0.5, 1.5))
    begun = time.time()
    os.kill(chance.choice(pids), signal.SIGKILL)
    row = until(lambda: started_after(log, begun, pids), "torchrun's next step")
    saved = max(other["step"] for other in lines(log) if other["pid"] in pids)
    if not saved <= row["loaded"] == row["step"] - 1 <= saved + 1:  # it may have been killed between file and row
        raise RuntimeError(f"torchrun's workers went on from step {row['loaded']}, not from {saved}")
    return float(row["at"] - begun)


def started_after(log: Path, begun: float, pids: list[int]) -> dict[str, Any] | None:
    """The first step since then of workers that are none of those."""
    return next((row for row in lines(log) if row["at"] > begun and row["pid"] not in pids), None)


def lines(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


@contextlib.contextmanager
def elastic(folder: Path, restarts: int) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(len(NODES)),
        "--max-restarts",
        str(restarts + 2),
        "--monitor-interval",
        "0.1",
        str(Path(__file__).with_name("lib") / "elastic_worker.py"),
        "--folder",
        str(folder),
    ]
    interface = "lo" if sys.platform == "linux" else "lo0"
    # In torchrun's own store the addresses of earlier workers stay, and new ones may try those until a restart is lost.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "torchrun.log").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, text=True)
        try:
            yield
        finally:
            process.terminate()
            end(process, 60)


if __name__ == "__main__":
    sys.exit(main())
