"""What reporting a step of ten values costs the training loop, beside wandb (offline) and tensorboardX where installed.

The loop's part is everything it does to report: the Report built, handed to the control thread (which encodes and
sends it to a real ROUTER over a socket file), and handed to the thread that writes rank-0.db. Also: 100,000
rapid reports must all reach rank-0.db. Prints a table, then one JSON line; exits 1 if a bar is missed.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from trainctl.protocol import codec
from trainctl.protocol import messages as m
from trainctl.protocol.record import open_for_reading
from trainctl.protocol.sockets import new_socket
from trainctl.protocol.statuspage import StatusWriter
from trainctl.trainer.control import Control
from trainctl.trainer.ledger import Ledger
from trainctl.trainer.metrics import MetricsWriter
from trainctl.trainer.step import Identity

Micros = NDArray[np.float64]
MEDIAN_BAR, P99_BAR = 10.0, 100.0
"""Microseconds, for reports with short work between them."""

WORK = {"short work": 100, "long work": 400}
"""Side of the matrix product between two reports. Long work empties the processor's caches and puts the other cores to
sleep, which whatever comes after it pays for; short work shows the cost of reporting itself."""

VALUES = (
    "loss", "grad_norm", "learning_rate", "data", "forward", "backward", "optimizer", "wait", "step_seconds", "memory",
)  # fmt: skip


class Drain:
    """An agent's end, in a process of its own, that takes whatever comes and counts it."""

    def __init__(self, endpoint: str) -> None:
        command = [sys.executable, __file__, "--drain", endpoint]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it listens

    def close(self) -> int:
        """How many reports came."""
        out, _ = self._process.communicate("", timeout=60)
        return int(out)


def drain(endpoint: str) -> None:
    """The drain's process: count until standard input closes and nothing more is waiting."""
    context = zmq.Context()
    listening = new_socket(context, zmq.ROUTER)
    listening.bind(endpoint)
    poller = zmq.Poller()
    poller.register(listening, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    print("listening", flush=True)
    taken = 0
    while listening in (events := dict(poller.poll())) or sys.stdin.fileno() not in events:
        if listening in events:
            taken += isinstance(codec.decode_answer(listening.recv_multipart()[1]), m.Report)
    print(taken)
    listening.close()
    context.term()


def build_report(step: int) -> m.Report:
    """A step's report with ten values that change."""
    x = step * 1e-3
    return m.Report(
        run="bench", rank=0, generation=m.Generation(1, 1), seq=step, kind="train", step=step, loss_sum=100.0 - x,
        weight=256.0, own_weight=256.0, own_samples=8, grad_norm=1.0 + x, clip_scale=1.0, micro_batch=8,
        phases=m.Phases(x, 2 * x, 3 * x, 0.0, 4 * x, 5 * x), step_seconds=15 * x, finished_at=time.time(),
        memory_bytes=1_000_000 + step,
    )  # fmt: skip


def measure(report: Callable[[int], None], count: int, work: int) -> Micros:
    """Microseconds of each of `count` reports, with a matrix product of side `work` between two, as a loop would
    have."""
    spent = np.empty(count)
    matrix = np.ones((work, work), np.float32)
    for step in range(1, count + 1):
        matrix @ matrix
        begun = time.perf_counter()
        report(step)
        spent[step - 1] = time.perf_counter() - begun
    return spent * 1e6


def measure_ours(folder: Path, count: int, work: int) -> Micros:
    """The trainer's own reporting path, with a peer that takes what is sent."""
    endpoint = f"ipc://{folder / 's'}"
    peer = Drain(endpoint)
    who = Identity("bench", "here", 0)
    status = StatusWriter(folder / "rank-0.status", os.getpid())
    writer = MetricsWriter(folder / "rank-0.db", "here")
    with Control(who, endpoint, Ledger(), status) as control:

        def report(step: int) -> None:
            made = build_report(step)
            control.send(made)
            writer.append(made)

        spent = measure(report, count, work)
    writer.close()
    status.close()
    taken = peer.close()
    if taken < count:
        raise SystemExit(f"only {taken} of {count} reports reached the agent's end")
    return spent


def count_after_a_burst(folder: Path, count: int) -> int:
    """Rows in rank-0.db after `count` reports as fast as they can be made."""
    writer = MetricsWriter(folder / "rank-0.db", "here")
    for step in range(1, count + 1):
        writer.append(build_report(step))
    writer.close()
    connection = open_for_reading(folder / "rank-0.db")
    (rows,) = connection.execute("SELECT count(*) FROM rank_steps").fetchone()
    connection.close()
    return int(rows)


def values(step: int) -> dict[str, float]:
    """The same ten values for the peers."""
    return {name: step * 1e-3 + place for place, name in enumerate(VALUES)}


def measure_wandb(folder: Path, count: int, work: int) -> Micros:
    """wandb's `log` in offline mode."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(folder)}
    import wandb

    run = wandb.init(project="bench", dir=str(folder), mode="offline")
    spent = measure(lambda step: run.log(values(step), step=step), count, work)
    run.finish()
    return spent


def measure_tensorboardx(folder: Path, count: int, work: int) -> Micros:
    """tensorboardX's `add_scalar`, ten times."""
    import tensorboardX

    writer = tensorboardX.SummaryWriter(str(folder))

    def report(step: int) -> None:
        for name, value in values(step).items():
            writer.add_scalar(name, value, step)

    spent = measure(report, count, work)
    writer.close()
    return spent


def summary(spent: Micros) -> dict[str, float]:
    """Median, p99 and mean in microseconds."""
    median, p99 = np.percentile(spent, [50, 99])
    return {
        "median_us": round(float(median), 2),
        "p99_us": round(float(p99), 2),
        "mean_us": round(float(spent.mean()), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=3000, help="reports timed for each")
    parser.add_argument("--burst", type=int, default=100_000, help="rapid reports that must all arrive")
    parser.add_argument("--drain", metavar="ENDPOINT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drain:
        drain(arguments.drain)
        return 0
    peers: dict[str, Callable[[Path, int, int], Micros]] = {"trainctl": measure_ours}
    peers |= {"wandb offline": measure_wandb} if importlib.util.find_spec("wandb") else {}
    peers |= {"tensorboardX": measure_tensorboardx} if importlib.util.find_spec("tensorboardX") else {}
    timed: dict[str, dict[str, dict[str, float]]] = {}
    for peer, measured in peers.items():
        timed[peer] = {}
        for kind, work in WORK.items():
            with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:
                timed[peer][kind] = summary(measured(Path(folder), arguments.count, work))
    with tempfile.TemporaryDirectory() as folder:
        arrived = count_after_a_burst(Path(folder), arguments.burst)
    print_table(timed)
    print(f"{arrived:,} of {arguments.burst:,} rapid reports in rank-0.db")
    ours = timed["trainctl"]["short work"]
    passed = ours["median_us"] < MEDIAN_BAR and ours["p99_us"] < P99_BAR and arrived == arguments.burst
    print(json.dumps({"reports": timed, "burst": arguments.burst, "arrived": arrived, "passed": passed}))
    return 0 if passed else 1


def print_table(timed: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"{'a step of ten values, µs':<26}{'between two':<14}{'median':>10}{'p99':>10}{'mean':>10}")
    for peer, kinds in timed.items():
        for kind, row in kinds.items():
            print(f"{peer:<26}{kind:<14}{row['median_us']:>10.1f}{row['p99_us']:>10.1f}{row['mean_us']:>10.1f}")


if __name__ == "__main__":
    sys.exit(main())
