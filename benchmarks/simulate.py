"""Speed at which runs are simulated, and how near a simulation of a real run is to it.

    python -m benchmarks simulate [--steps N] [--real] [--rounds N]

Simulates runs with steps of about 1 s at 8 and 64 ranks, and prints simulated seconds per real second. With `--real` it
also calibrates this machine with a small model, trains a run, simulates the same run from the stored profile, and
compares the medians of the steps; of several such rounds the median counts. Exits 1 if a figure misses its bar.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.sides import end_on_sigterm

BARS = {8: 1000, 64: 200}
"""Least simulated seconds per real second, by number of ranks."""
FARTHEST = 0.05
"""Most that the simulated median step may differ from the real one, relative."""
RUN = """
[run]
name = "bench"
steps = {steps}
[model]
path = "/model"
[data]
path = "/data.txt"
[batch]
global = {batch}
micro = 4
[optimizer]
learning_rate = 1e-3
[checkpoint]
at_end = false
"""
NODE = """
[nodes.n{rank}.simulated]
samples_per_second = {rate}
link_gbit = 10
model_gb = 10
sample_gb = 1
memory_gb = 40
"""


def simulated(folder: Path, cluster: Path, run: Path, *options: str) -> dict:
    """Return the result of a simulation."""
    command = [sys.executable, "-m", "trainctl.node_agent.simulate", str(cluster), str(run), *options]
    done = subprocess.run([*command, f"--output={folder}"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def speed(ranks: int, steps: int, folder: Path) -> dict:
    """Return the speed of simulating a run with 4 samples a rank and step, at nearly 4 per second."""
    cluster, run = folder / f"cluster-{ranks}.toml", folder / f"run-{ranks}.toml"
    cluster.write_text("".join(NODE.format(rank=rank, rate=4.1) for rank in range(ranks)))
    run.write_text(RUN.format(steps=steps, batch=4 * ranks))
    made = simulated(folder, cluster, run, "--parameters=1000000")
    times = made["seconds"] / made["real_seconds"]
    return {"ranks": ranks, "steps": steps, "times_real": round(times), "bar": BARS[ranks]}


def against_real_runs(folder: Path, steps: int, rounds: int) -> dict:
    """The medians of the steps of real runs of one rank, and of their simulations."""
    from lib.real_run import calibrated_runs

    found, cluster = [], folder / "simulated.toml"
    for real in calibrated_runs(folder, steps, rounds):
        cluster.write_text(f'[nodes.n.simulated]\nprofile = "{real.profile}"\n')
        made = simulated(folder, cluster, real.run_file, f"--steps={steps}")["step_seconds"]
        own = statistics.median(real.steps)
        found.append({"real_seconds": own, "simulated_seconds": made, "off": made / own - 1})
        print(f"a real run's median step {own:.4f} s, simulated {made:.4f} s: {made / own - 1:+.1%}", flush=True)
    return {"rounds": found, "off": statistics.median(one["off"] for one in found), "bar": FARTHEST}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000, help="steps at 8 ranks; a quarter at 64")
    parser.add_argument("--real", action="store_true", help="also compare with real runs")
    parser.add_argument("--rounds", type=int, default=5, help="real runs, each after a new calibration")
    options = parser.parse_args()
    end_on_sigterm()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = []
        for ranks, steps in ((8, options.steps), (64, options.steps // 4)):
            rows.append(row := speed(ranks, steps, folder))
            print(
                f"{ranks:>3} ranks, {steps:,} steps: {row['times_real']:,} x real time (bar {row['bar']:,})", flush=True
            )
        real = against_real_runs(folder, 60, options.rounds) if options.real else None
    if real is not None:
        print(f"steps of {options.rounds} real runs, simulated from their profiles: {real['off']:+.1%} (median)")
    print(json.dumps({"speed": rows, "real": real}))
    missed = any(row["times_real"] < row["bar"] for row in rows)
    return int(missed or (real is not None and abs(real["off"]) > FARTHEST))


if __name__ == "__main__":
    sys.exit(main())
