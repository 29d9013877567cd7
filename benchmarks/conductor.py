"""The cost of a step in the conductor, beside that in 0.2.0: milliseconds at 8, 64 and 128 ranks.

    python -m benchmarks conductor [--steps N] [--rounds N]

Both versions run in a process of their own and take turns: the same events, without trainers, sockets or disk. 0.2.0 is
that of the wheels which the tests keep. Prints a table and one JSON object with the 95 % interval of each median
ratio; exits 1 if a median ratio is above its bar.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lib.ratios import interval
from lib.sides import end_on_sigterm

BARS = {8: 1.1, 64: 1.1, 128: 1.1}
"""Most milliseconds by number of ranks, as a part of 0.2.0's."""
WHEELS = (Path(__file__).parents[1] / "tests" / "golden" / "release-0.2.0").glob("*.whl")


class Side:
    """One version's conductor, in its own process."""

    def __init__(self, ranks: int, package: Path | None) -> None:
        """`package`: the folder of another version than the installed one."""
        path = {"PYTHONPATH": str(package)} if package else {}
        worker = Path(__file__).parent / "lib" / "conductor_steps.py"
        self._process = subprocess.Popen(
            [sys.executable, str(worker), str(ranks)],
            env=os.environ | path,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def milliseconds(self, steps: int) -> float:
        """Return the milliseconds of a step."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of a round at 8 ranks; fewer at more")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        for wheel in WHEELS:
            zipfile.ZipFile(wheel).extractall(folder)
        rows = [measure(ranks, options, Path(folder)) for ranks in BARS]
    print(f"{'ranks':>5} {'now':>8} {'0.2.0':>8} {'ratio':>7} {'low':>7} {'high':>7} {'bar':>6}")
    for row in rows:
        print(
            f"{row['ranks']:>5} {row['now_ms']:>8.3f} {row['before_ms']:>8.3f} {row['median']:>7.3f}"
            f" {row['low']:>7.3f} {row['high']:>7.3f} {row['bar']:>6}"
        )
    growth = (rows[-1]["now_ms"] - rows[0]["now_ms"]) / (rows[-1]["ranks"] - rows[0]["ranks"])
    print(f"each further rank: {1000 * growth:.1f} us a step")
    print(json.dumps({"rows": rows, "us_per_rank": round(1000 * growth, 2)}))
    return 0 if all(row["median"] <= row["bar"] for row in rows) else 1


def measure(ranks: int, options: argparse.Namespace, package: Path) -> dict:
    """Rounds in pairs; which goes first alternates."""
    sides = {"now": Side(ranks, None), "before": Side(ranks, package)}
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    steps = max(20, options.steps * 8 // ranks)
    try:
        for number in range(options.rounds):
            for name in sorted(sides, reverse=number % 2 == 0):
                rounds[name].append(sides[name].milliseconds(steps))
    finally:
        for side in sides.values():
            side.close()
    ratios = [now / before for now, before in zip(rounds["now"], rounds["before"], strict=True)]
    return {
        "ranks": ranks,
        "bar": BARS[ranks],
        "now_ms": round(statistics.median(rounds["now"]), 4),
        "before_ms": round(statistics.median(rounds["before"]), 4),
        **interval(ratios),
    }


if __name__ == "__main__":
    sys.exit(main())
