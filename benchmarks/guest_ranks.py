"""Measures the cost of a run of several ranks in the loop's own processes, by CPU at 5 ms a step.

    python -m benchmarks guest_ranks [--ranks N] [--pairs N]

Ranks under gloo, coupled by a small sum over all of them each step, in pairs of blocks: attached, with a loss and nine
other values, and bare. The ratio is the bare CPU time of all ranks over the attached one, threads included. A real
agent records the run. Also the time of `step()` between two ticks. Ends with a JSON line; exits 1 if it misses the bar.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from guest_cost import BLOCK, STEP_SECONDS, block_cpu, values, work
from lib.sides import agent, end_on_sigterm

from trainctl import guest

LOOP_BAR = 0.985
"""Bare over attached CPU."""
TICK_SECONDS = 0.000_2  # a call that takes longer was at a tick, or was interrupted


def rank(pairs: int) -> None:
    """Print this rank's CPU seconds of each block, bare and attached, and the microseconds of its calls."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    run = guest.attach("ranks")
    once, flag, calls = work(torch, 256), torch.zeros(1), list[float]()

    def step() -> None:
        once()
        distributed.all_reduce(flag)

    def attached(_: int, row: dict[str, float]) -> None:
        began = time.perf_counter()
        run.step(**row)
        calls.append(time.perf_counter() - began)

    blocks = []
    for pair in range(pairs):
        both = {}
        for log in (attached, None) if pair % 2 else (None, attached):
            distributed.barrier()
            both[log is not None] = block_cpu(step, log, 0)
        blocks.append((both[False], both[True]))
    run.close()
    between = [spent for spent in calls if spent < TICK_SECONDS]
    print(json.dumps({"blocks": blocks, "call_us": 1e6 * statistics.median(between)}))
    distributed.barrier()


def measure(ranks: int, pairs: int) -> dict[str, object]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    command = [sys.executable, __file__, "--rank", "--pairs", str(pairs)]
    processes = [
        subprocess.Popen(command, env=common | {"RANK": str(place)}, stdout=subprocess.PIPE) for place in range(ranks)
    ]
    said = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    ratios = []
    for blocks in zip(*(one["blocks"] for one in said), strict=True):
        bare, attached = (sum(block[side] for block in blocks) for side in (0, 1))
        ratios.append(bare / attached)
    return {
        "ranks": ranks,
        "bare_over_attached": statistics.median(ratios),
        "call_us": [one["call_us"] for one in said],
        "values": len(values(0)),
    }


def main() -> int:
    """Measure, print, and return the exit status."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=60, help=f"pairs of blocks of {BLOCK} steps, attached and bare")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.pairs)
        return 0
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:
        os.environ["TRAINCTL_STATE"] = folder
        with agent("bench", Path(folder)):
            figures = measure(options.ranks, options.pairs)
    ratio = figures["bare_over_attached"]
    assert isinstance(ratio, float)
    print(f"step() between ticks: {figures['call_us']} us; a step takes {1000 * STEP_SECONDS:g} ms")
    print(f"bare / attached CPU of {options.ranks} ranks: {ratio:.4f}, bar {LOOP_BAR}")
    print(json.dumps(figures | {"passed": ratio >= LOOP_BAR}))
    return 0 if ratio >= LOOP_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
