"""`python -m trainctl.trainer.calibration RUN.toml --node NODE --caches FOLDER [--together]`: calibrates this node.

Each line of standard output is a `CalibrationLine`, with the profile so far after each measurement: if memory runs out
and the system ends this process, only what it hasn't printed is lost. Exit status 0: all is measured; 1: an error ended
it; 2: the run file or the model is wrong, and no profile counts. The last line on standard error says why. It ends when
its standard input does.

`--together`: other nodes of the machine are calibrated at the same time, and each line of standard input is the number
of a stage that may begin, which is once all of them are ready for it. They measure passes at the same time, as they
would train. A node that is done with that continues with passes until the others are done too; then each measures the
other parts alone.
"""

import argparse
import contextlib
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from trainctl.protocol.calibration.profile import (
    CalibrationLine,
    CalibrationPoint,
    CalibrationProgress,
    CalibrationTrying,
    CalibrationWaits,
    DeviceProfile,
    DiskRate,
    Pass,
    key_of,
)
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.machine import speeds
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.machine.process_title import set_title
from trainctl.trainer.backends.load import import_library, load
from trainctl.trainer.calibration.sweep import (
    GRID_SECONDS,
    MATMUL_SECONDS,
    SWEEP_SECONDS,
    StepRunner,
    Sweep,
    matmul_rates,
)
from trainctl.trainer.common import logs
from trainctl.trainer.common.errors import DeviceMemoryError, first_line
from trainctl.trainer.data.dataset import Dataset, open_dataset

MIN_SWEPT: Final = 64
"""Micro-batch up to which the sweep goes at least, even if the global batch is smaller: it may grow."""
FORWARD_SECONDS: Final = 4.0
"""Time for forward passes of a calibration of 60 s; a size that would take longer isn't begun, but for the smallest."""
MIN_PART: Final = 0.5
"""Part of calibration.seconds for measuring, however long loading and tokenizing took."""
WAIT_SECONDS: Final = 10.0
"""Time between two lines of a process that waits."""
PASSES, QUIET, REST = 1, 2, 3
"""Stages: passes and steps are measured; passes that only keep the machine busy end; the other parts are measured."""
_FAILED: Final = (TrainctlError, DeviceMemoryError, OSError, RuntimeError, MemoryError)


class Calibration:
    """Measures one part after another; only passes must succeed."""

    def __init__(
        self, config: RunFile, arguments: argparse.Namespace, stages: queue.SimpleQueue[int], folder: Path
    ) -> None:
        """Load data and model. Raises TrainctlError or OSError."""
        self._config, self._node, self._caches = config, arguments.node, arguments.caches
        self._table = config.nodes.get(self._node, NodeTable())
        self._begun, self._trying = time.monotonic(), cast(int | None, None)
        self._stages, self._stage = stages, 0 if arguments.together else REST
        where, self._model = str(arguments.run_file), Path(config.model.path)
        self._stamps, self._digest = _stamps(self._model), model_digests(self._model).whole
        self._caches.mkdir(parents=True, exist_ok=True)
        _say("loading the model and its data")
        self._dataset: Dataset = open_dataset(config, self._caches, where)
        self._backend = load(config, self._table, where)
        seconds, now = config.calibration.seconds, time.monotonic()
        self._ends = max(self._begun + seconds, now + MIN_PART * seconds)
        self._runner = StepRunner(config, self._node, self._backend, self._dataset, folder, self._try)
        self._sweep = Sweep(self._runner, self._take_passes)
        key = key_of(
            config, self._node, backend=self._backend.name, device=self._backend.device.name, model_digest=self._digest
        )
        self._profile = DeviceProfile(
            key=key, created_at=time.time(), passes=(), memory_cap_bytes=self._backend.device.memory.read().cap_bytes
        )

    def close(self) -> None:
        self._runner.close()
        self._dataset.close()

    def run(self) -> None:
        """Measure everything. Raises TrainctlError if not even one sample fits, or the model's files change."""
        with contextlib.suppress(DeviceMemoryError):
            # Afterwards gradients and optimizer hold the memory that they hold during training.
            self._take(optimizer_seconds=self._runner.step(1, 2).optimizer_seconds)
            self._wait_for(PASSES)
            self._sweep.measure_passes(max(self._config.batch.global_, MIN_SWEPT), self._part_of(SWEEP_SECONDS))
        if not self._sweep.passes:
            raise TrainctlError(
                "out of memory with a micro-batch of one sample; use a smaller model or shorter samples"
            )
        effective = self._table.share or self._config.batch.global_
        self._measure("steps", lambda: self._sweep.measure_steps(effective, self._part_of(GRID_SECONDS)))
        self._measure("forward passes", self._forward)
        self._wait_for(QUIET, self._keep_busy)
        self._wait_for(REST)
        self._measure("matrix products", self._matmul)
        self._measure("disk", self._disk)
        if _stamps(self._model) != self._stamps and model_digests(self._model).whole != self._digest:
            raise InvalidInputError(
                str(self._model), "the model's files changed during the calibration; calibrate again"
            )

    def _measure(self, part: str, measure: Callable[[], None]) -> None:
        if time.monotonic() > self._ends:
            _say(f"{part}: not measured: calibration.seconds have passed")
            return
        self._try(None)
        _say(part)
        try:
            measure()
        except _FAILED as error:
            why = "out of memory" if isinstance(error, DeviceMemoryError) else first_line(error)
            _say(f"{part}: not measured: {why}")

    def _wait_for(self, stage: int, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until a stage may begin. The time doesn't count."""
        begun = time.monotonic()
        while self._stage < stage:
            _print(CalibrationWaits(stage))
            if meanwhile is not None:
                meanwhile()
            with contextlib.suppress(queue.Empty):
                self._stage = max(self._stage, self._stages.get(timeout=0 if meanwhile is not None else WAIT_SECONDS))
        self._ends += time.monotonic() - begun

    def _keep_busy(self) -> None:
        """Run a pass: others may still be timing theirs, and should find the machine as busy as it was."""
        with contextlib.suppress(DeviceMemoryError):  # another node may need the memory now
            self._runner.time_again(max(self._sweep.passes, key=lambda timed: timed.rate))

    def _forward(self) -> None:
        """Sizes whose training passes fit, the smallest first, until the time for them has passed."""
        passes, deadline = list[Pass](), time.monotonic() + self._part_of(FORWARD_SECONDS)
        for timed in self._sweep.passes:
            if not passes or time.monotonic() + timed.seconds < deadline:
                passes.append(self._runner.time_forward(timed.micro))
                self._take(forward=tuple(passes))

    def _matmul(self) -> None:
        self._runner.give_back_memory()
        for rate in matmul_rates(self._backend, self._part_of(MATMUL_SECONDS)):
            self._take(matmul=(*self._profile.matmul, rate))

    def _disk(self) -> None:
        speed = speeds.measure_disk(self._caches)
        self._take(disk=DiskRate(speed.write, speed.read))

    def _part_of(self, seconds: float) -> float:
        """Return the time of a part that has `seconds` in a calibration of 60 s, but half of what is left at most."""
        left = max(0.0, self._ends - time.monotonic())
        return min(seconds * self._config.calibration.seconds / 60, left / 2)

    def _take_passes(self, line: str) -> None:
        sweep, update = self._sweep, self._sweep.update_seconds
        self._take(
            passes=sweep.passes,
            grid=sweep.grid,
            out_of_memory_micro=sweep.out_of_memory_micro,
            optimizer_seconds=update or self._profile.optimizer_seconds,
        )
        if line:
            _say(line)

    def _try(self, micro: int | None) -> None:
        if micro != self._trying:
            self._trying = micro
            _print(CalibrationTrying(micro))

    def _take(self, **parts: Any) -> None:
        """Print the profile with these parts, once it has a pass."""
        now, seconds = time.time(), time.monotonic() - self._begun
        self._profile = msgspec.structs.replace(self._profile, created_at=now, duration_seconds=seconds, **parts)
        if self._profile.passes:
            _print(CalibrationPoint(self._profile))


def _stamps(model: Path) -> dict[Path, tuple[int, int]]:
    """Size in bytes and time of change in ns of each of the model's files."""
    stats = {file: file.stat() for file in sorted(model.rglob("*"))}
    return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()}


def _say(text: str) -> None:
    _print(CalibrationProgress(text))


def _print(line: CalibrationLine) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def _listen(stages: queue.SimpleQueue[int]) -> None:
    """Take the numbers of stages. At the end of standard input, end this process, whatever it is doing."""
    for line in sys.stdin:
        stages.put(int(line))
    os._exit(1)


def main() -> int:
    """Calibrate; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.calibration", description="Calibrate a node.")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--node", default="")
    parser.add_argument("--caches", type=Path, required=True)
    parser.add_argument("--together", action="store_true")
    arguments = parser.parse_args()
    set_title("calibration", arguments.node)
    stages = queue.SimpleQueue[int]()
    threading.Thread(target=_listen, args=(stages,), daemon=True).start()
    with contextlib.suppress(OSError):  # where memory runs out, Linux ends this process and not the agent
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")
    logs.configure()
    try:
        config = run_file.on_this_machine(run_file.read(arguments.run_file), arguments.node)
        run_file.check_paths(config, str(arguments.run_file), arguments.node)
        import_library(config, arguments.node, str(arguments.run_file))
        with tempfile.TemporaryDirectory() as folder:
            calibration = Calibration(config, arguments, stages, Path(folder))
            try:
                calibration.run()
            finally:
                calibration.close()
    except _FAILED as error:
        print(first_line(error), file=sys.stderr)
        return 2 if isinstance(error, InvalidInputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
