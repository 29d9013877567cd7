"""Two torch ranks, one held to a fifth of a core: what the policy `rebalance` makes of them, beside even DDP.

    python -m benchmarks unequal [--steps N] [--rounds N] [--quota 0.2]

In turns: each rank's plain loop alone, the slow one under its quota; both loops at once, with nothing between them,
which is what this machine has to give; the group under agents, whose policy `rebalance` has found the shares from even
ones; and DDP with even shares.
The quota is a cgroup's (v1 cpu.cfs_quota_us or v2 cpu.max) and needs the right to make one. Prints a table and one JSON
object; exits 1 if the group's rate is under the bar times that of both loops at once, 2 if no cgroup can be made.
"""

import argparse
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lib.quota import Quota
from lib.sides import Cluster, Ddp, ddp, end_on_sigterm, run_config

from trainctl.protocol.messages import SnapshotRequest
from trainctl.trainer import demo_assets

BAR = 0.97
"""Least median rate of the group, as a part of what both loops reach at once."""
GLOBAL_BATCH, MICRO_BATCH = 48, 4
BALANCE_STEPS = 40
"""Steps that the policy has to find the shares from even ones."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quota", type=float, default=0.2, help="cores that the slow rank may use")
    options = parser.parse_args()
    end_on_sigterm()
    try:
        quota = Quota(options.quota)
    except OSError as error:
        print(f"no cgroup can be made here: {error}", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = measure(Path(folder), options, quota)
    finally:
        quota.remove()
    print(f"shares by the policy {result['shares']}; tok/s, and parts of both loops' rate at once")
    print(f"{'round':>5} {'fast':>7} {'slow':>7} {'at once':>8} {'group':>14} {'even DDP':>14}")
    for number, row in enumerate(result["rounds"], 1):
        print(
            f"{number:>5} {row['fast']:>7,.0f} {row['slow']:>7,.0f} {row['at_once']:>8,.0f}"
            f" {row['ours']:>7,.0f} {row['ratio']:>6.3f} {row['ddp']:>7,.0f} {row['ddp_ratio']:>6.3f}"
        )
    print(json.dumps(result))
    return 0 if result["median_ratio"] >= BAR else 1


def measure(folder: Path, options: argparse.Namespace, quota: Quota) -> dict[str, Any]:
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    with ddp(folder, 1) as fast, ddp(folder, 1) as slow, ddp(folder, 2) as even:
        quota.hold(slow.pids[0])
        quota.hold(even.pids[1])
        with Cluster(folder, ["fast", "slow"]) as cluster:
            config = run_config(folder, ["fast", "slow"], GLOBAL_BATCH, MICRO_BATCH, first_shares="even")
            cluster.start(config | {"policy": {"rebalance": {"mode": "off"}}})
            quota.hold(cluster.trainer_pids()["slow"])
            shares = balance(cluster)
            rows = [one_round(options.steps, fast, slow, cluster, even) for _ in range(options.rounds)]
    return {
        "bar": BAR,
        "quota_cores": options.quota,
        "shares": shares,
        "median_ratio": round(statistics.median(row["ratio"] for row in rows), 4),
        "median_solo_ratio": round(statistics.median(row["solo_ratio"] for row in rows), 4),
        "rounds": rows,
    }


def one_round(steps: int, fast: Ddp, slow: Ddp, cluster: Cluster, even: Ddp) -> dict[str, float]:
    """Tokens per second of all of them; the parts of both loops' rate at once, and of the solo rates' sum."""
    few, most = max(3, steps // 4), GLOBAL_BATCH - MICRO_BATCH
    solo_fast = fast.measure(steps, most, MICRO_BATCH)["tokens_per_second"]
    solo_slow = slow.measure(few, MICRO_BATCH, MICRO_BATCH)["tokens_per_second"]
    ours = cluster.measure(steps)["tokens_per_second"]
    at_once = both(steps, most, fast, slow)
    theirs = even.measure(few, GLOBAL_BATCH // 2, MICRO_BATCH)["tokens_per_second"]
    return {
        "fast": solo_fast,
        "slow": solo_slow,
        "at_once": at_once,
        "ours": ours,
        "ddp": theirs,
        "ratio": ours / at_once,
        "ddp_ratio": theirs / at_once,
        "solo_ratio": ours / (solo_fast + solo_slow),
    }


def both(steps: int, samples: int, fast: Ddp, slow: Ddp) -> float:
    """Return the sum of both rates while both compute. The slow one makes as many steps as take about as long."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(slow.measure, 2 * steps, MICRO_BATCH, MICRO_BATCH)
        rate = fast.measure(steps, samples, MICRO_BATCH)["tokens_per_second"]
        return rate + other.result()["tokens_per_second"]


def balance(cluster: Cluster) -> dict[str, int]:
    """Shares that the policy `rebalance` finds from even ones; it is off afterwards, while they are measured."""
    mode(cluster, "on")
    cluster.measure(BALANCE_STEPS)
    mode(cluster, "off")
    view = cluster.client.ask(SnapshotRequest, 0).run
    assert view is not None
    return {rank.node: rank.share for rank in view.ranks}


def mode(cluster: Cluster, mode: str) -> None:
    """Set the mode of the policy `rebalance`."""
    cluster.client.send("autopilot", {"name": "rebalance", "mode": mode})


if __name__ == "__main__":
    sys.exit(main())
