"""`trainctl score` on three unequal nodes, beside three plain loops with transformers that run at once.

The nodes' workers and the loops are held to 100, 50 and 20 % of a core by cgroups (root, Linux). Rates are rows per
second while all workers work, to the end of the work. Exit status 1 if the ratio is under the bar, 2 if no cgroup can
be made.
"""

import argparse
import asyncio
import io
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from lib.sides import SEQUENCE, Cluster, end, end_on_sigterm, run_config, until
from unequal import Quota

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.machine import shim
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer import demo_assets
from trainctl.tui.export.row_scores import Scoring, Wanted, new_id, read_file

BAR = 0.95
CORES = {"fast": 1.0, "middle": 0.5, "slow": 0.2}
MICRO_BATCH = 8
LOAD_SECONDS = 15.0
"""About how much later the last worker has loaded than the first."""
SETTLE_SECONDS = 5.0
"""Time after all workers have begun, in which the dealer learns their speeds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
        rows = measure(Path(stack.enter_context(tempfile.TemporaryDirectory())), options, quotas)
    ratio = statistics.median(row["ratio"] for row in rows)
    for row in rows:
        print(f"loops {row['loops']:,.0f} rows/s, score {row['score']:,.0f} rows/s, ratio {row['ratio']:.3f}")
    print(json.dumps({"bar": BAR, "median_ratio": round(ratio, 4), "rounds": rows}))
    return 0 if ratio >= BAR else 1


def measure(folder: Path, options: argparse.Namespace, quotas: dict[str, Quota]) -> list[dict[str, float]]:
    demo_assets.make_model(folder / "model")
    demo_assets.make_text(folder / "data")
    chance = random.Random(3)
    text = "".join(path.read_text("utf-8") for path in sorted((folder / "data").rglob("*.txt")))
    found = []
    with Cluster(folder, [*CORES]) as cluster:
        run = trained(folder, cluster)
        for _ in range(options.rounds):
            make_rows(folder / "rows.jsonl", text, 600, chance)
            loops = loop_rate(folder, options.seconds, quotas)
            make_rows(
                folder / "rows.jsonl", text, int(loops * (options.seconds + LOAD_SECONDS + SETTLE_SECONDS)), chance
            )
            score = score_rate(folder, cluster, run, quotas)
            found.append({"loops": loops, "score": score, "ratio": score / loops})
    return found


def trained(folder: Path, cluster: Cluster) -> str:
    """The id of a run with a checkpoint, to which `checkpoint` then leads."""
    config = run_config(folder, [*CORES], 3 * MICRO_BATCH, MICRO_BATCH, first_shares="even")
    config |= {"run": {"name": "bench", "steps": 1}, "checkpoint": {"at_end": True}}
    run = cluster.client.send("start-run", {"config": config}, timeout_seconds=300).run
    assert run is not None

    def ended() -> m.RunView | None:
        view = cluster.client.snapshot(0).run
        return view if view is not None and view.state not in m.ACTIVE_RUN_STATES else None

    view = until(ended, "the run's end")
    (folder / "checkpoint").symlink_to(RunPaths(Path(view.directory)).checkpoint(1))
    return run


def make_rows(path: Path, text: str, count: int, chance: random.Random) -> None:
    """Texts of unlike lengths."""
    starts = ((chance.randrange(len(text) - 400), chance.randrange(40, 360)) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text[start : start + size]}) + "\n" for start, size in starts))


def loop_rate(folder: Path, seconds: float, quotas: dict[str, Quota]) -> float:
    """Rows per second of three plain loops together."""
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
    rate = sum(said(loop) for loop in loops.values())
    for loop in loops.values():
        end(loop)
    return rate


def said(loop: "subprocess.Popen[str]") -> float:
    assert loop.stdout is not None
    return float(loop.stdout.readline())


def score_rate(folder: Path, cluster: Cluster, run: str, quotas: dict[str, Quota]) -> float:
    """Rows per second from when all workers have settled in to the end."""
    address = cluster.client.snapshot(0).node.address
    rows, seen = read_file(folder / "rows.jsonl"), list[tuple[float, m.WorkView]]()
    held = set[str]()

    def hold(view: m.WorkView) -> None:
        """Hold each worker once it has loaded."""
        for name in {node.node for node in view.nodes if node.state == "working"} - held:
            for file in (folder / "state" / name).glob("work/*/rank-0.process.json"):
                known = json.loads(file.read_text())
                if shim.start_time(known["pid"]) == known["start_time"]:
                    quotas[name].hold(known["pid"])
                    held.add(name)

    async def scored() -> None:
        def show(view: m.WorkView) -> None:
            hold(view)
            seen.append((time.monotonic(), view))

        async with Client(address) as client:
            await Scoring(client, rows, Wanted(new_id(), run, None, False, ()), io.BytesIO(), show).run()

    asyncio.run(scored())
    working = next(at for at, view in seen if all(node.rows for node in view.nodes))
    start, first = next((at, view) for at, view in seen if at >= working + SETTLE_SECONDS)
    finish, last = next((at, view) for at, view in seen if view.answered == view.rows)
    print({node.node: node.rows for node in last.nodes}, file=sys.stderr)
    return float((last.answered - first.answered) / (finish - start))


if __name__ == "__main__":
    sys.exit(main())
