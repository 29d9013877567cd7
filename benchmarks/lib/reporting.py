"""A training loop that reports real steps and computes next to nothing, and an agent's end that takes the reports."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self, cast

import numpy as np
import zmq
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import BatchTable, DataTable, ModelTable, OptimizerTable, RunFile, RunTable
from trainctl.protocol.messages import Form, FromTrainer, Generation, Range, RankWork, Report, StepPlan
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.protocol.wire import codec
from trainctl.protocol.wire.sockets import new_socket
from trainctl.trainer.backends.backend import Backend, CompileMeter, Device, TrainingRecipe
from trainctl.trainer.backends.memory import HostMemory, Memory, MemoryByPart
from trainctl.trainer.collective.group import Tail
from trainctl.trainer.control.thread import Control
from trainctl.trainer.data.batch import Batch, collate
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.loop import train
from trainctl.trainer.objectives.losses import NextToken
from trainctl.trainer.objectives.objective import Sums
from trainctl.trainer.step import observer
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank

Micros = NDArray[np.float64]
Context = AbstractContextManager[object]
OWN_VALUES = 7
"""The metrics of a step of this loop by name, without an objective's: clip scale, own loss, memory and its trend."""
SAMPLES = 8
GENERATION = Generation(1, 1)
IDENTITY = Identity("bench", "here", 0)
CONFIG = RunFile(
    run=RunTable(name="bench", steps=1),
    model=ModelTable(path="model"),
    data=DataTable(path="data", prefetch=0),
    batch=BatchTable(global_=SAMPLES),
    optimizer=OptimizerTable(learning_rate=1e-3),
)


class TimedProgress(Progress):
    """Counts as spent the time from a step's commit to the progress's taking its report."""

    def __init__(self) -> None:
        super().__init__()
        self.spent_seconds, self._committed_at = 0.0, 0.0

    def commit(self, plan: StepPlan) -> None:
        super().commit(plan)
        self._committed_at = time.perf_counter()

    def remember(self, report: Report) -> None:
        super().remember(report)
        self.spent_seconds += time.perf_counter() - self._committed_at


class TimedMemory(HostMemory):
    """Counts as spent the time to begin a new peak."""

    def __init__(self, progress: TimedProgress) -> None:
        super().__init__(None)
        self._progress = progress

    def reset(self) -> None:
        begun = time.perf_counter()
        super().reset()
        self._progress.spent_seconds += time.perf_counter() - begun


class NoParts(MemoryByPart):
    def values(self, memory: Memory) -> dict[str, float]:
        return {}


class Work:
    """A backend whose arithmetic is one matrix product; what it says about memory is true."""

    recipe = TrainingRecipe(NextToken("pretrain"), None)
    compile_meter = CompileMeter()
    memory_by_part = NoParts(0, 0, 0)

    def __init__(self, side: int, progress: TimedProgress) -> None:
        self._matrix = np.ones((side, side), np.float32)
        self.device = Device("cpu", TimedMemory(progress))

    def loss_and_gradient(
        self, batch: Batch, scales: Mapping[str, float], *, adding: Context, phase: Callable[[str], Context]
    ) -> None:
        with phase("forward"):
            self._matrix @ self._matrix
        with phase("backward"), adding:
            pass

    def clear(self) -> None: ...

    def sums(self) -> Sums:
        return Sums({"tokens": 100.0}, {})

    def gradient_norm(self) -> float:
        return 1.0

    def update(self, learning_rate: float, factor: float) -> None: ...


class Samples:
    """Data that cost nothing to read."""

    samples = 1000
    _batch = collate([(np.zeros(9, np.int32), np.ones(8, np.bool_))] * SAMPLES)

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


class Loop:
    """The trainer's own loop at step 0 of a generation of one rank, on the work above."""

    def __init__(self, work: int, status: StatusWriter, send: Callable[[FromTrainer], None], values: int) -> None:
        self.progress, self._values, self._step = TimedProgress(), values, 0
        self.progress.load(0, 0)
        self.progress.form(Form(run=IDENTITY.run, generation=GENERATION, engine="none", ranks=(0,)))
        backend, data = cast(Backend, Work(work, self.progress)), cast(Dataset, Samples())
        self._rank = Rank(IDENTITY, CONFIG, backend, data, self.progress, status, send=send)

    def step(self) -> Report:
        brought = {f"user:metric_{place}": 0.125 * place for place in range(self._values - OWN_VALUES)}

        def step_values(_: object, own: Tail, *__: object) -> dict[str, float]:
            return {"own_loss": own.loss_sum / own.weight, **brought}

        observer._step_values = step_values  # type: ignore[assignment]
        self._step += 1
        cursor = (self._step - 1) * SAMPLES
        plan = StepPlan(
            run=IDENTITY.run,
            generation=GENERATION,
            seq=self._step,
            kind="train",
            step=self._step,
            plan_version=1,
            cursor=cursor,
            global_batch=SAMPLES,
            work=(RankWork(0, (Range(cursor, SAMPLES),), SAMPLES),),
            learning_rate=1e-3,
            divisor=64.0,
        )
        return train(self._rank, plan, time.perf_counter())


class Reporter:
    """A training loop whose steps bring `count` values by name, and a peer that takes what is sent."""

    def __init__(self, folder: Path, work: int, count: int) -> None:
        endpoint = f"ipc://{folder / 's'}"
        self._peer = subprocess.Popen(
            [sys.executable, __file__, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._peer.stdout is not None
        self._peer.stdout.readline()  # it listens
        self._status = StatusWriter(folder / "rank-0.status", os.getpid())
        self._writer = MetricsWriter(folder / "rank-0.db", "here")
        self._loop = Loop(work, self._status, self._send_soon, count)
        self._control = Control(IDENTITY, endpoint, self._loop.progress, self._status)
        self._control.__enter__()
        self.measure(observer.TREND_STEPS)
        assert len(self.report.values) == count, sorted(self.report.values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._control.__exit__(*error)
        self._writer.close()
        self._status.close()
        taken, _ = self._peer.communicate("", timeout=60)
        if int(taken) < self.report.step:
            raise SystemExit(f"only {taken} of {self.report.step} reports reached the agent's end")

    def _send_soon(self, message: FromTrainer) -> None:
        begun = time.perf_counter()
        self._control.send(message)
        self._loop.progress.spent_seconds += time.perf_counter() - begun

    def measure(self, count: int) -> Micros:
        """Return the microseconds that each of so many steps of the training loop spends on reporting."""
        spent = np.empty(count)
        for place in range(count):
            self._loop.progress.spent_seconds = 0.0
            self.report = self._loop.step()
            begun = time.perf_counter()
            self._control.send(self.report)
            self._writer.append(self.report)
            spent[place] = self._loop.progress.spent_seconds + time.perf_counter() - begun
        return spent * 1e6


def drain(endpoint: str) -> None:
    """Be the agent's end: take reports until standard input closes and nothing more is waiting, and print how many."""
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
            taken += isinstance(codec.decode_answer(listening.recv_multipart()[1]), Report)
    print(taken)
    listening.close()
    context.term()


if __name__ == "__main__":
    drain(sys.argv[1])
