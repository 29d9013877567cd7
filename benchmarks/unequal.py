"""Two torch ranks, one held to a fifth of a core: what a group with shares by rate makes of them, beside even DDP.

    python benchmarks/unequal.py [--steps N] [--rounds N] [--quota 0.2]

Solo rates first (the plain loop, one after the other, the slow one under its quota), then in turns the group under
agents after `rebalance auto=true`, and DDP with even shares. The quota is a cgroup's (v1 cpu.cfs_quota_us or v2
cpu.max) and needs the right to make one. Prints a table and one JSON object; exits 1 if the group's rate is under the
bar times the sum of the solo rates, 2 if no cgroup can be made.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from sides import Cluster, ddp, run_config

from trainctl.trainer import demo_assets

BAR = 0.90
GLOBAL_BATCH, MICRO_BATCH = 48, 4
PERIOD_US = 20_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quota", type=float, default=0.2, help="cores that the slow rank may use")
    options = parser.parse_args()
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
    print(f"solo {result['solo_fast']:,.0f} and {result['solo_slow']:,.0f} tok/s; shares {result['shares']}")
    for row in result["rounds"]:
        print(f"  group {row['ours']:>9,.0f} tok/s, {row['ratio']:.3f} of the sum; even DDP {row['ddp_ratio']:.3f}")
    print(json.dumps(result))
    return 0 if result["median_ratio"] >= BAR else 1


class Quota:
    """A cgroup that holds its processes to some of a core."""

    def __init__(self, cores: float) -> None:
        v1 = Path("/sys/fs/cgroup/cpu")
        root = v1 if v1.is_dir() else Path("/sys/fs/cgroup")
        self._folder = root / f"trainctl-bench-{os.getpid()}"
        self._folder.mkdir()
        try:
            if root == v1:
                (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self._folder / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD_US)))
            else:
                (self._folder / "cpu.max").write_text(f"{int(cores * PERIOD_US)} {PERIOD_US}")
        except OSError:
            self._folder.rmdir()
            raise
        self._root = root

    def hold(self, pid: int) -> None:
        """A process with all its threads and children, and those it will have."""
        process = psutil.Process(pid)
        for held in (process, *process.children(recursive=True)):
            (self._folder / "cgroup.procs").write_text(str(held.pid))

    def remove(self) -> None:
        for pid in (self._folder / "cgroup.procs").read_text().split():
            (self._root / "cgroup.procs").write_text(pid)
        self._folder.rmdir()


def measure(folder: Path, options: argparse.Namespace, quota: Quota) -> dict[str, Any]:
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    half = GLOBAL_BATCH // 2
    with ddp(folder, 1) as fast:
        solo_fast = fast.measure(options.steps, half, MICRO_BATCH)["tokens_per_second"]
    with ddp(folder, 1) as slow:
        quota.hold(slow.pids[0])
        solo_slow = slow.measure(max(3, options.steps // 4), MICRO_BATCH, MICRO_BATCH)["tokens_per_second"]
    total, rows = solo_fast + solo_slow, []
    with Cluster(folder, ["fast", "slow"]) as cluster, ddp(folder, 2) as even:
        cluster.start(run_config(folder, ["fast", "slow"], GLOBAL_BATCH, MICRO_BATCH))
        quota.hold(cluster.trainer_pids()["slow"])
        quota.hold(even.pids[1])
        shares = balance(cluster)
        for _ in range(options.rounds):
            ours = cluster.measure(options.steps)["tokens_per_second"]
            theirs = even.measure(max(3, options.steps // 4), half, MICRO_BATCH)["tokens_per_second"]
            rows.append({"ours": ours, "ddp": theirs, "ratio": ours / total, "ddp_ratio": theirs / total})
    return {
        "bar": BAR, "quota_cores": options.quota, "solo_fast": solo_fast, "solo_slow": solo_slow, "shares": shares,
        "median_ratio": round(statistics.median(row["ratio"] for row in rows), 4), "rounds": rows,
    }  # fmt: skip


def balance(cluster: Cluster) -> dict[str, int]:
    """Shares by measured rates, asked for twice: the first rates come from even shares."""
    for _ in range(2):
        cluster.measure(4)
        cluster.client.send("rebalance", {"auto": True}, timeout_seconds=120)
    view = cluster.client.snapshot(0).run
    assert view is not None
    return {rank.node: rank.share for rank in view.ranks}


if __name__ == "__main__":
    sys.exit(main())
