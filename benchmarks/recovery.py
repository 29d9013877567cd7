"""From kill -9 of a trainer to the next step that the survivors commit, beside torchrun elastic on the same model.

    python benchmarks/recovery.py [--kills N] [--elastic-kills N]

Three ranks of one CPU thread each; before each kill all three take part. torchrun's workers write a checkpoint at every
step, the most that they can save, and start again all together; its --monitor-interval is 0.1 s. Last, the same from
the kill of a follower's and of the lead's agent, which are started again at once, to the next committed step. Prints a
table and one JSON object; exits 1 if the median is over 1 s and one step, the 95th percentile over 3 s, or training
resumes later than 5 s after an agent's return.
"""

import argparse
import contextlib
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

from sides import Cluster, run_config, until

from trainctl.protocol import messages as m
from trainctl.trainer import demo_assets

NODES = ["a", "b", "c"]
BATCH, MICRO_BATCH = 24, 4
MEDIAN_BAR_SECONDS, P95_BAR_SECONDS, AGENT_BAR_SECONDS = 1.0, 3.0, 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--elastic-kills", type=int, default=5)
    options = parser.parse_args()
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo_assets.make_model(folder / "model")
        demo_assets.make_text(folder / "data")
        ours, step_seconds, agents = measure_ours(folder, options.kills, chance)
        print(f"killed {options.kills} trainers; now torchrun", file=sys.stderr, flush=True)
        theirs = measure_elastic(folder, options.elastic_kills, chance)
    result = {
        "step_seconds": step_seconds,
        "ours": summary(ours),
        "torchrun": summary(theirs),
        "agent_return_seconds": agents,
    }
    print(f"a step takes {step_seconds:.2f} s")
    for what in ("ours", "torchrun"):
        row = result[what]
        print(f"{what:>9}: median {row['median']:.2f} s, p95 {row['p95']:.2f} s of {row['count']}")
    print(f"   agents: next step {', '.join(f'{node} {seconds:.2f} s' for node, seconds in agents.items())} after")
    print(json.dumps(result))
    within = result["ours"]["median"] <= MEDIAN_BAR_SECONDS + step_seconds
    within = within and result["ours"]["p95"] <= P95_BAR_SECONDS and max(agents.values()) <= AGENT_BAR_SECONDS
    return 0 if within else 1


def summary(seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {"median": statistics.median(ordered), "p95": p95, "count": len(ordered), "all": ordered}


# ---------------------------------------------------------------- trainctl


def measure_ours(folder: Path, kills: int, chance: random.Random) -> tuple[list[float], float, dict[str, float]]:
    """Seconds to the survivors' next step for each kill, the median step before, and seconds after agents' returns."""
    with Cluster(folder, NODES) as cluster:
        cluster.start(run_config(folder, NODES, BATCH, MICRO_BATCH, first_shares="even"))
        cluster.client.send("resume", {}, timeout_seconds=60)
        whole(cluster)
        usual = statistics.median(row.step_seconds for row in newest(cluster))
        found = [after_kill(cluster, chance) for _ in range(kills)]
        agents = {}
        for index in (1, 0):
            agents[NODES[index]] = after_agent_kill(cluster, index)
        return found, usual, agents


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


def newest(cluster: Cluster) -> list[m.StepCommitted]:
    return list(cluster.client.steps(after_step=max(0, view(cluster).step - 12)).steps)


def view(cluster: Cluster) -> m.RunView:
    found = cluster.client.snapshot(0).run
    assert found is not None
    return found


def whole(cluster: Cluster) -> None:
    """All ranks take part, and some steps have been made so."""

    def is_whole() -> bool:
        rows = newest(cluster)
        run = view(cluster)
        return (
            all(rank.state == "run" for rank in run.ranks)
            and len([row for row in rows if row.generation == run.generation]) >= 4
        )

    until(is_whole, "a whole group")


# ---------------------------------------------------------------- torchrun


def measure_elastic(folder: Path, kills: int, chance: random.Random) -> list[float]:
    """Seconds from each kill of a worker to the next step."""
    log = folder / "steps.jsonl"
    with elastic(folder, kills):
        found = []
        for _ in range(kills):
            count = len(lines(log))
            until(lambda count=count: len(lines(log)) >= count + 4, "torchrun's steps")
            pids = [(folder / f"pid-{rank}").read_text() for rank in range(len(NODES))]
            time.sleep(chance.uniform(0.1, 0.5))
            begun = time.time()
            os.kill(int(chance.choice(pids)), signal.SIGKILL)
            row = until(
                lambda pids=pids: next((row for row in lines(log)[::-1] if str(row["pid"]) not in pids), None),
                "torchrun's next step",
            )
            first = next(other for other in lines(log) if other["pid"] == row["pid"])
            found.append(float(first["at"]) - begun)
    return found


def lines(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


@contextlib.contextmanager
def elastic(folder: Path, restarts: int) -> Iterator[None]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(NODES)),
        "--max-restarts", str(restarts + 2), "--monitor-interval", "0.1",
        str(Path(__file__).with_name("elastic_worker.py")), "--folder", str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
    with (folder / "torchrun.log").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
