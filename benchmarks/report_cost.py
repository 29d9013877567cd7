"""What reporting a step of ten values costs the training loop, beside wandb (offline) and tensorboardX where installed.

The real executor runs real plans; only its arithmetic is replaced, by a matrix product, which the peers get too.
Counted is all that a step spends to report: memory's peak begun, the Report made (memory read included), kept for the
next fence, Soon and Report handed to the control thread (which sends them to a real ROUTER over a socket file), and the
Report handed to the thread that writes rank-0.db. Phase switches, which time the step and show its phase, are a row of
their own.
Also: 100,000 rapid reports must all reach rank-0.db. Prints a table, then one JSON line; exits 1 if a bar is missed.
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
from typing import cast

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from trainctl.protocol import messages as m
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.protocol.wire import codec
from trainctl.protocol.wire.sockets import new_socket
from trainctl.trainer.backends.base import Backend, Memory
from trainctl.trainer.backends.host_memory import HostMemory
from trainctl.trainer.control.thread import Control
from trainctl.trainer.data.batch import Batch, from_blocks
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.step.executor import Executor, Identity, Settings
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.stopwatch import Stopwatch

Micros = NDArray[np.float64]
MEDIAN_BAR, P99_BAR = 10.0, 100.0
"""Microseconds, for reports with short work between them."""

WORK = {"short work": 100, "long work": 400}
"""Side of the matrix product between two reports. Long work empties the processor's caches and puts the other cores to
sleep, which whatever comes after it pays for; short work shows the cost of reporting itself."""

OURS = "trainctl"
SAMPLES = 8
GENERATION = m.Generation(1, 1)

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


class Spent:
    """Seconds that a step has spent on reporting so far; whoever times a part adds it."""

    seconds = 0.0


class TimedProgress(Progress):
    """The executor makes its report between the step's commit and the progress's taking it: all of that counts."""

    def __init__(self, spent: Spent) -> None:
        super().__init__()
        self._spent, self._committed_at = spent, 0.0

    def commit(self, plan: m.StepPlan) -> None:
        super().commit(plan)
        self._committed_at = time.perf_counter()

    def remember(self, report: m.Report) -> None:
        super().remember(report)
        self._spent.seconds += time.perf_counter() - self._committed_at


class Work:
    """A backend whose arithmetic is one matrix product; what it says of memory is true."""

    def __init__(self, side: int, spent: Spent) -> None:
        self._matrix = np.ones((side, side), np.float32)
        self._memory, self._spent = HostMemory(None), spent

    def forward(self, batch: Batch, scale: float) -> float:
        self._matrix @ self._matrix
        return 100.0

    def backward(self) -> None: ...

    def accumulate(self) -> None: ...

    def clear(self) -> None: ...

    def gradient_norm(self) -> float:
        return 1.0

    def update(self, learning_rate: float, factor: float) -> None: ...

    def reset_peak(self) -> None:
        begun = time.perf_counter()
        self._memory.reset()
        self._spent.seconds += time.perf_counter() - begun

    def memory(self) -> Memory:
        return self._memory.read()


class Samples:
    """Data that cost nothing to read."""

    samples = 1000
    _batch = from_blocks(np.zeros((SAMPLES, 9), np.int32))

    def batch(self, indices: Indices) -> Batch:
        return self._batch


def plan_of(step: int) -> m.StepPlan:
    cursor = (step - 1) * SAMPLES
    return m.StepPlan(
        run="bench", generation=GENERATION, seq=step, kind="train", step=step, plan_version=1, cursor=cursor,
        global_batch=SAMPLES, work=(m.RankWork(0, (m.Range(cursor, SAMPLES),), SAMPLES),), learning_rate=1e-3,
        divisor=64.0,
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
    """What a step of the training loop spends on reporting, a peer taking what is sent."""
    endpoint = f"ipc://{folder / 's'}"
    peer = Drain(endpoint)
    who = Identity("bench", "here", 0)
    status = StatusWriter(folder / "rank-0.status", os.getpid())
    writer = MetricsWriter(folder / "rank-0.db", "here")
    spent, each = Spent(), np.empty(count)
    progress = TimedProgress(spent)
    with Control(who, endpoint, progress, status) as control:

        def send_soon(message: m.FromTrainer) -> None:
            begun = time.perf_counter()
            control.send(message)
            spent.seconds += time.perf_counter() - begun

        executor = new_executor(who, work, progress, status, send_soon, spent)
        for step in range(1, count + 1):
            report = executor.train(plan_of(step), time.perf_counter())
            begun = time.perf_counter()
            control.send(report)
            writer.append(report)
            each[step - 1] = spent.seconds + time.perf_counter() - begun
            spent.seconds = 0.0
    writer.close()
    status.close()
    taken = peer.close()
    if taken < count:
        raise SystemExit(f"only {taken} of {count} reports reached the agent's end")
    return each * 1e6


def new_executor(
    who: Identity,
    work: int,
    progress: Progress,
    status: StatusWriter,
    send: Callable[[m.FromTrainer], None],
    spent: Spent,
) -> Executor:
    """The trainer's own, at step 0 of a generation of one rank."""
    progress.load(0, 0)
    progress.form(m.Form(run=who.run, generation=GENERATION, engine="none", ranks=(0,)))
    backend, data = cast(Backend, Work(work, spent)), cast(Dataset, Samples())
    return Executor(who, Settings(0, "float32", 1.0), backend, data, progress, status, send)


def measure_phases(folder: Path, count: int, work: int) -> Micros:
    """The switches of a step of one micro-batch: five phases timed and shown, three states shown."""
    status = StatusWriter(folder / "rank-0.status", os.getpid())

    def switch(step: int) -> None:
        watch = Stopwatch(status, 0.0)
        status.show("data", step, (1, 1))
        for name in ("data", "forward", "backward", "sync", "optimizer"):
            with watch.phase(name):
                pass
        status.show("commit")
        status.show("idle")

    spent = measure(switch, count, work)
    status.close()
    return spent


def count_after_a_burst(folder: Path, count: int) -> int:
    """Rows in rank-0.db after `count` reports as fast as they can be made."""
    status = StatusWriter(folder / "rank-0.status", os.getpid())
    who = Identity("bench", "here", 0)
    executor = new_executor(who, 1, Progress(), status, lambda message: None, Spent())
    report = executor.train(plan_of(1), time.perf_counter())
    writer = MetricsWriter(folder / "rank-0.db", "here")
    for step in range(1, count + 1):
        writer.append(msgspec.structs.replace(report, step=step, seq=step))
    writer.close()
    status.close()
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
    peers: dict[str, Callable[[Path, int, int], Micros]] = {OURS: measure_ours, "its phase switches": measure_phases}
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
    ours = timed[OURS]["short work"]
    passed = ours["median_us"] < MEDIAN_BAR and ours["p99_us"] < P99_BAR and arrived == arguments.burst
    print(json.dumps({"reports": timed, "burst": arguments.burst, "arrived": arrived, "passed": passed}))
    return 0 if passed else 1


def print_table(timed: dict[str, dict[str, dict[str, float]]]) -> None:
    """A row for each and the work between; the ratio is to our median."""
    print(f"{'a step of ten values, µs':<26}{'between two':<14}{'median':>10}{'p99':>10}{'mean':>10}{'ratio':>8}")
    for peer, kinds in timed.items():
        for kind, row in kinds.items():
            figures = "".join(f"{row[key]:>10.1f}" for key in ("median_us", "p99_us", "mean_us"))
            print(f"{peer:<26}{kind:<14}{figures}{row['median_us'] / timed[OURS][kind]['median_us']:>8.1f}")


if __name__ == "__main__":
    sys.exit(main())
