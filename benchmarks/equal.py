"""Two equal torch ranks under agents against torch DDP, side by side in one run.

    python -m benchmarks equal [--steps N] [--rounds N] [--parameters 1m,20m]

Both sides train the same Llama on the same blocks, one CPU thread a rank, 8 samples of 128 tokens a rank and step, in
turns, so that whatever else the machine does weighs on both. Prints a table, also of how long a rank waited for its
next plan, and one JSON object; exits 1 if a median ratio is under the bar or the wait is over 1 % of a 100 ms step.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.sides import Cluster, ddp, end_on_sigterm, run_config

from trainctl.trainer import demo_assets

BAR = 0.95
WAIT_BAR_SECONDS = 0.001
SAMPLES = 8
MODELS: dict[str, dict[str, Any]] = {
    "1m": {"hidden": 128, "layers": 4, "heads": 4, "intermediate": 416},
    "20m": {"hidden": 512, "layers": 6, "heads": 8, "intermediate": 1376},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=0, help="a measurement; 0: 30 for 1m, 6 for 20m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parameters", default="1m,20m")
    options = parser.parse_args()
    end_on_sigterm()
    results = []
    for name in options.parameters.split(","):
        with tempfile.TemporaryDirectory() as folder:
            steps = options.steps or {"1m": 30, "20m": 6}[name]
            results.append(measure(Path(folder), name, steps, options.rounds))
    print(json.dumps({"bar": BAR, "wait_bar_seconds": WAIT_BAR_SECONDS, "models": results}))
    passed = all(row["median_ratio"] >= BAR and row["plan_wait_seconds"] <= WAIT_BAR_SECONDS for row in results)
    return 0 if passed else 1


def measure(folder: Path, name: str, steps: int, rounds: int) -> dict[str, Any]:
    parameters = demo_assets.make_model(folder / "model", demo_assets.llama_config(**MODELS[name]))
    demo_assets.make_text(folder / "data")
    rows = []
    with Cluster(folder, ["a", "b"]) as cluster, ddp(folder, 2) as other:
        cluster.start(run_config(folder, ["a", "b"], 2 * SAMPLES, SAMPLES, first_shares="even"))
        for number in range(rounds):
            if number % 2:
                theirs, ours = other.measure(steps, SAMPLES, SAMPLES), cluster.measure(steps)
            else:
                ours, theirs = cluster.measure(steps), other.measure(steps, SAMPLES, SAMPLES)
            rows.append({"ours": ours, "ddp": theirs, "ratio": ours["tokens_per_second"] / theirs["tokens_per_second"]})
    print(f"{parameters:,} parameters")
    print(f"{'round':>5} {'trainctl tok/s':>15} {'DDP tok/s':>12} {'ratio':>7} {'plan wait ms':>13}")
    for number, row in enumerate(rows, 1):
        print(
            f"{number:>5} {row['ours']['tokens_per_second']:>15,.0f} {row['ddp']['tokens_per_second']:>12,.0f}"
            f" {row['ratio']:>7.3f} {row['ours']['plan_wait_seconds'] * 1e3:>13.2f}"
        )
    return {
        "parameters": parameters,
        "median_ratio": round(statistics.median(row["ratio"] for row in rows), 4),
        "plan_wait_seconds": statistics.median(row["ours"]["plan_wait_seconds"] for row in rows),
        "rounds": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
