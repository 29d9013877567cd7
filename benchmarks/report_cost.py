"""What reporting a step of ten values costs the training loop, beside wandb (offline) and tensorboardX where installed,
and beside the least there could be: the same row encoded and put on a queue that another thread takes from.

The real executor runs real plans; only its arithmetic is replaced, by a matrix product, which the peers get too.
Counted is all that a step spends to report: memory's peak begun, the Report made (memory read included), kept for the
next fence, Soon and Report handed to the control thread (which sends them to a real ROUTER over a socket file), and the
Report handed to the thread that writes rank-0.db. Phase switches, which time the step and show its phase, are a row of
their own.
The bars are on ratios, measured in blocks that alternate. Also: 100,000 rapid reports must all reach rank-0.db. Prints
a table, then one JSON line; exits 1 if a bar is missed.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple, Self, cast

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
from trainctl.trainer.backends.base import Backend, Memory, Parts, Totals
from trainctl.trainer.backends.compile_meter import CompileMeter
from trainctl.trainer.backends.host_memory import HostMemory
from trainctl.trainer.collective.group import Tail
from trainctl.trainer.control.thread import Control
from trainctl.trainer.data.batch import Batch, from_blocks
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.objectives.pretrain import OBJECTIVE
from trainctl.trainer.step import executor
from trainctl.trainer.step.executor import Executor, Identity, Settings
from trainctl.trainer.step.memory_trend import STEPS
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.stopwatch import Stopwatch

Micros = NDArray[np.float64]
TO_ROW, ROW_BAR = "ten values / the same row encoded and put on a queue", 3.0
TO_TEN, TEN_BAR = "forty values / ten values", 2.0
"""Ratios of medians, with short work between reports, and what their own medians may be at most."""
TEN, FORTY = 10, 40
BARS = {TO_ROW: ROW_BAR, TO_TEN: TEN_BAR}
OWN_VALUES = 7
"""What a step of this loop has by name without an objective's: clip scale, own loss, memory and its trend."""
PAIRS, BLOCK = 100, 50
Z_95 = 1.96

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
    """Seconds that a step has spent on reporting so far; what times a part adds it."""

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

    parts = Parts(OBJECTIVE, None)
    compile_meter = CompileMeter()

    def __init__(self, side: int, spent: Spent) -> None:
        self._matrix = np.ones((side, side), np.float32)
        self._memory, self._spent = HostMemory(None), spent

    def forward(self, batch: Batch, *scales: float) -> None:
        self._matrix @ self._matrix

    def backward(self) -> None: ...

    def accumulate(self) -> None: ...

    def clear(self) -> None: ...

    def mark(self) -> None: ...

    def seconds_between(self, begun: None, ended: None) -> float:
        return 0.0

    def totals(self, *, with_norm: bool = False) -> Totals:
        return Totals(self.parts.objective.named([100.0]), 1.0)

    def gradient_norm(self, found: float | None) -> float:
        return found or 1.0

    def update(self, learning_rate: float, factor: float) -> None: ...

    def reset_peak(self) -> None:
        begun = time.perf_counter()
        self._memory.reset()
        self._spent.seconds += time.perf_counter() - begun

    def memory(self) -> Memory:
        return self._memory.read()

    def memory_parts(self, memory: Memory) -> dict[str, float]:
        return {}


class Samples:
    """Data that cost nothing to read."""

    samples = 1000
    _batch = from_blocks(np.zeros((SAMPLES, 9), np.int32))

    def batch(self, indices: Indices) -> Batch:
        return self._batch

    def targets(self, indices: Indices) -> Indices:
        return np.full(len(indices), 8, np.int64)

    def samples_at(self, positions: Indices, seed: int) -> Indices:
        return positions % self.samples

    def covers(self, stop: int) -> bool:
        return True

    def wait_for(self, stop: int, look: Callable[[], None]) -> float:
        return 0.0


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


class Reporter:
    """A training loop whose steps bring `count` values by name, and a peer that takes what is sent."""

    def __init__(self, folder: Path, work: int, count: int = TEN) -> None:
        endpoint = f"ipc://{folder / 's'}"
        self._peer = Drain(endpoint)
        who = Identity("bench", "here", 0)
        self._status = StatusWriter(folder / "rank-0.status", os.getpid())
        self._writer = MetricsWriter(folder / "rank-0.db", "here")
        self._spent, self._step = Spent(), 0
        progress = TimedProgress(self._spent)
        self._control = Control(who, endpoint, progress, self._status)
        self._control.__enter__()
        self._executor = new_executor(who, work, progress, self._status, self._send_soon, self._spent)
        self._brought = {f"user:metric_{place}": 0.125 * place for place in range(count - OWN_VALUES)}
        self.measure(STEPS)
        assert len(self.report.values) == count, sorted(self.report.values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._control.__exit__(*error)
        self._writer.close()
        self._status.close()
        taken = self._peer.close()
        if taken < self._step:
            raise SystemExit(f"only {taken} of {self._step} reports reached the agent's end")

    def _send_soon(self, message: m.FromTrainer) -> None:
        begun = time.perf_counter()
        self._control.send(message)
        self._spent.seconds += time.perf_counter() - begun

    def measure(self, count: int) -> Micros:
        """What each of so many steps of the training loop spends on reporting."""
        each, Brought.values = np.empty(count), self._brought
        for place in range(count):
            self._spent.seconds = 0.0
            self._step += 1
            self.report = self._executor.train(plan_of(self._step), time.perf_counter())
            begun = time.perf_counter()
            self._control.send(self.report)
            self._writer.append(self.report)
            each[place] = self._spent.seconds + time.perf_counter() - begun
        return each * 1e6


def measure_ours(folder: Path, count: int, work: int) -> Micros:
    """Our own."""
    with Reporter(folder, work) as reporter:
        return reporter.measure(count)


class Row:
    """The least that a reporter could do: the same row encoded, and put where another thread takes it."""

    def __init__(self, row: m.Report, work: int) -> None:
        self._row, self._matrix = row, np.ones((work, work), np.float32)
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        while self._queue.get():
            pass

    def measure(self, count: int) -> Micros:
        """Microseconds of each of so many."""
        return measure(self._report, count, len(self._matrix))

    def _report(self, step: int) -> None:
        self._queue.put(msgspec.msgpack.encode(self._row))

    def close(self) -> None:
        self._queue.put(b"")
        self._thread.join()


class Ratio(NamedTuple):
    """The median of ratios over interleaved pairs, and the ends of its 95 % interval."""

    median: float
    low: float
    high: float


def ratio_of(ours: Callable[[int], Micros], other: Callable[[int], Micros]) -> Ratio:
    """Of the medians of PAIRS blocks of each, one after the other, either one first in turn. The interval is by order,
    whatever the ratios' distribution: other work on the machine spoils some of them."""
    ratios = []
    for pair in range(PAIRS):
        first, second = (float(np.median(one(BLOCK))) for one in ((ours, other) if pair % 2 else (other, ours)))
        ratios.append(first / second if pair % 2 else second / first)
    ratios.sort()
    beside = int(PAIRS / 2 - Z_95 * math.sqrt(PAIRS) / 2)
    return Ratio(float(np.median(ratios)), ratios[beside], ratios[-1 - beside])


def measure_ratios() -> dict[str, Ratio]:
    """Ours against the row, and against itself with more values."""
    work = WORK["short work"]
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as one, Reporter(Path(one), work) as ten:
        row = Row(ten.report, work)
        found = {TO_ROW: ratio_of(ten.measure, row.measure)}
        row.close()
        with (
            tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as other,
            Reporter(Path(other), work, FORTY) as many,
        ):
            found[TO_TEN] = ratio_of(many.measure, ten.measure)
    return found


class Brought:
    """What the objective of the loop that runs brings in a step, beside the mean loss."""

    values: Mapping[str, float] = MappingProxyType({})


def own_loss(own: Tail) -> dict[str, float]:
    """In the place of the executor's own."""
    return {"own_loss": own.loss_sum / own.weight, **Brought.values}


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
    executor._own_loss = own_loss
    return Executor(who, Settings(0, "float32", 1.0, 0), backend, data, progress, status, send)


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
    others = {"wandb": ("wandb offline", measure_wandb), "tensorboardX": ("tensorboardX", measure_tensorboardx)}
    for module, (name, measured) in others.items():
        if importlib.util.find_spec(module):
            peers[name] = measured
        else:
            print(f"{name}: not installed")
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
    ratios = measure_ratios()
    for name, ratio in ratios.items():
        print(f"{name}: {ratio.median:.2f}, 95 % within {ratio.low:.2f} and {ratio.high:.2f}, bar {BARS[name]:.0f}")
    passed = arrived == arguments.burst and all(ratio.median <= BARS[name] for name, ratio in ratios.items())
    told = {name: ratio._asdict() for name, ratio in ratios.items()}
    print(json.dumps({
        "reports": timed, "ratios": told, "burst": arguments.burst, "arrived": arrived, "passed": passed
    }))  # fmt: skip
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
