"""`python -m trainctl.trainer.calibration.measure_node RUN.toml --node NODE --caches FOLDER`: measures what is left.

Standard input has one line, what has been found before, and then a line with the number of each stage that may begin
(stages.py); it stays open as long as the parent lives. Each line of standard output is a `Line` of findings.py. Exit
status 0: all is measured, or a micro-batch ran out of memory, which the last line says; 2: one line on standard error
says what is wrong.
"""

import argparse
import contextlib
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from trainctl.protocol.calibration.profile import DiskRate, Pass
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine import speeds
from trainctl.protocol.machine.process_title import set_title
from trainctl.trainer.backends.load import import_library, load
from trainctl.trainer.calibration import device_speed
from trainctl.trainer.calibration.data_rate import data_rate
from trainctl.trainer.calibration.findings import (
    PARTS,
    Findings,
    Found,
    Line,
    OutOfMemory,
    Part,
    Said,
    Trying,
    Waits,
)
from trainctl.trainer.calibration.pass_sweep import SWEEP_SECONDS, Sweep
from trainctl.trainer.calibration.stages import BEGINS, QUIET, REST, Stages
from trainctl.trainer.calibration.step_grid import GRID_SECONDS, grid
from trainctl.trainer.calibration.step_runner import StepRunner, give_back_memory
from trainctl.trainer.common import logs
from trainctl.trainer.common.errors import DeviceMemoryError, first_line
from trainctl.trainer.data.dataset import open_dataset

LEAST_SWEPT: Final = 64
"""Micro-batch up to which the sweep goes at least, even if the global batch is smaller: it may grow."""
FORWARD_SECONDS: Final = 4.0
"""Time for forward passes of a calibration of 60 s; a size that would take longer isn't begun, but for the smallest."""
MIN_PART: Final = 0.5
"""Part of calibration.seconds for measuring, however long loading and tokenizing took."""
WAIT_SECONDS: Final = 10.0
"""Time between two lines of a process that waits."""
_FAILED: Final = (TrainctlError, OSError, RuntimeError, MemoryError)


class _Measuring:
    """One process's work: parts in order, each reported before it begins."""

    def __init__(
        self, config: RunFile, node: str, caches: Path, known: Findings, stages: Stages, where: str, folder: Path,
        ends: float,
    ) -> None:  # fmt: skip
        """Load data and model. `ends`: monotonic time at which the calibration is to be over. Raises TrainctlError."""
        self._config, self._node, self._caches, self._found, self._stages = config, node, caches, known, stages
        self._trying: Trying = Trying()
        _tell(self._trying)
        self._dataset = open_dataset(config, caches, where)
        self._backend = load(config, config.nodes.get(node, NodeTable()), where)
        self._ends = max(ends, time.monotonic() + MIN_PART * config.calibration.seconds)
        self._runner = StepRunner(config, node, self._backend, self._dataset, folder)
        self._found = msgspec.structs.replace(
            known, backend=self._backend.name, device=self._backend.device,
            memory_cap_bytes=self._backend.memory().cap_bytes,
        )  # fmt: skip

    def close(self) -> None:
        self._runner.close()
        self._dataset.close()

    def run(self) -> None:
        """Measure what isn't done. A micro-batch that runs out of memory ends it early."""
        work: dict[Part, Callable[[], dict[str, Any]]] = {
            "data": self._data, "passes": self._passes, "grid": self._grid, "forward": self._forward,
            "matmul": self._matmul, "memory": self._memory, "disk": self._disk,
        }  # fmt: skip
        try:
            self._try(None, 1)
            self._runner.settle()
            for part in PARTS:
                if part not in self._found.done:
                    if part != "passes" and time.monotonic() > self._ends:
                        _tell(Said(f"{part}: not measured: calibration.seconds have passed"))
                        self._found = self._found.with_done(part)
                        continue
                    self._try(part)
                    self._wait_for(BEGINS[part])
                    self._take(msgspec.structs.replace(self._found, **work[part]()).with_done(part))
        except DeviceMemoryError:
            assert self._trying.micro is not None, "only passes and steps have a micro-batch"
            _tell(OutOfMemory(self._trying.micro))

    def _wait_for(self, stage: int) -> None:
        """Until it may begin. Others may still be timing passes: they should find the machine as busy as it was."""
        if stage == REST and not self._stages.has(REST):
            fastest = max(self._found.passes, key=lambda one: one.rate)
            while not self._stages.has(QUIET):
                _tell(Waits(QUIET))
                with contextlib.suppress(DeviceMemoryError):  # another node may need the memory now
                    self._runner.time_again(fastest)
        while not self._stages.has(stage):
            _tell(Waits(stage))
            self._stages.has(stage, WAIT_SECONDS)

    def _data(self) -> dict[str, Any]:
        _tell(Said("reading the data without training"))
        return {"data": data_rate(self._config, self._node, self._dataset, self._caches)}

    def _passes(self) -> dict[str, Any]:
        most = max(self._config.batch.global_, LEAST_SWEPT)
        sweep = Sweep(
            self._runner, most, lambda micro: self._try("passes", micro), self._take_pass,
            seconds=self._part_of(SWEEP_SECONDS),
        )  # fmt: skip
        return {"passes": sweep.run(self._found).passes}

    def _grid(self) -> dict[str, Any]:
        _tell(Said("steps of one effective batch"))
        own = self._config.nodes.get(self._node, NodeTable()).share
        effective = own or self._config.batch.global_
        found = grid(
            self._runner, self._found.passes, effective, lambda micro: self._try("grid", micro),
            self._part_of(GRID_SECONDS),
        )  # fmt: skip
        return {"grid": found.points, "optimizer_seconds": found.update_seconds, "passes": found.passes}

    def _forward(self) -> dict[str, Any]:
        """Sizes whose training passes fit, the smallest first, until the time for them has passed."""
        _tell(Said("forward passes"))
        found, deadline = list[Pass](), time.monotonic() + self._part_of(FORWARD_SECONDS)
        for one in self._found.passes:
            if not found or time.monotonic() + one.seconds < deadline:
                self._try("forward", one.micro)
                found.append(self._runner.time_forward(one.micro))
        return {"forward": tuple(found)}

    def _matmul(self) -> dict[str, Any]:
        _tell(Said("matrix products"))
        self._give_back()
        work = device_speed.work_of(self._backend)
        return {
            "matmul": tuple(
                device_speed.matmul_rates(
                    work, self._backend.is_out_of_memory, self._part_of(device_speed.MATMUL_SECONDS)
                )
            )
        }

    def _memory(self) -> dict[str, Any]:
        self._give_back()
        work = device_speed.work_of(self._backend)
        return {
            "memory_bytes_per_second": device_speed.copy_rate(
                work, self._backend.is_out_of_memory, device_speed.copy_bytes(self._backend)
            )
        }

    def _disk(self) -> dict[str, Any]:
        _tell(Said("the disk"))
        try:
            speed = speeds.measure_disk(self._caches)
        except OSError:
            return {}
        return {"disk": DiskRate(speed.write, speed.read)}

    def _part_of(self, seconds: float) -> float:
        """Return the time of a part that has `seconds` in a calibration of 60 s, but half of what is left at most."""
        left = max(0.0, self._ends - time.monotonic())
        return min(seconds * self._config.calibration.seconds / 60, left / 2)

    def _give_back(self) -> None:
        self._backend.discard()
        give_back_memory()

    def _try(self, part: Part | None, micro: int | None = None) -> None:
        self._trying = Trying(part, micro)
        _tell(self._trying)

    def _take_pass(self, findings: Findings, newest: Pass) -> None:
        self._take(findings)
        _tell(Said(f"micro-batch {newest.micro}: {newest.rate:.4g} samples/s"))

    def _take(self, findings: Findings) -> None:
        self._found = findings
        _tell(Found(findings))


def _tell(line: Line) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def _listen(stages: Stages) -> None:
    """Take the numbers of stages. At the end of standard input, end this process, whatever it is doing."""
    for line in sys.stdin:
        stages.raise_to(int(line))
    os._exit(1)


def _first_to_go() -> None:
    """Where memory runs out, Linux ends this process and not the agent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", "ascii")


def main() -> int:
    """Measure; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.calibration.measure_node")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--node", default="")
    parser.add_argument("--caches", type=Path, required=True)
    parser.add_argument("--ends", type=float, default=math.inf, help="monotonic time of the calibration's end")
    given: Any = parser.parse_args()
    set_title("calibration", given.node)
    _first_to_go()
    known = msgspec.json.decode(sys.stdin.readline(), type=Findings)
    stages = Stages()
    threading.Thread(target=_listen, args=(stages,), daemon=True).start()
    logs.configure()
    try:
        config = run_file.on_this_machine(run_file.read(given.run_file), given.node)
        import_library(config, given.node, str(given.run_file))
        with tempfile.TemporaryDirectory(prefix="trainctl-calibration-") as folder:
            measuring = _Measuring(
                config, given.node, given.caches, known, stages, str(given.run_file), Path(folder), given.ends
            )
            try:
                measuring.run()
            finally:
                measuring.close()
    except _FAILED as error:
        print(first_line(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
