"""`python -m trainctl.trainer.calibration RUN.toml --node NODE --caches FOLDER`: calibrates this node for a run.

It measures in a process of its own, which may run out of memory: then another one measures what is left. Each line of
standard output is a `CalibrationLine`, the profile last. Exit status 0: done; 2: one line on standard error says what
is wrong. It ends when its standard input does.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from trainctl.protocol.calibration.calibration_lines import CalibrationLine, CalibrationProgress, CalibrationResult
from trainctl.protocol.calibration.profile import DeviceProfile
from trainctl.protocol.calibration.profile_key import key_of
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.machine.process_title import set_title
from trainctl.trainer.calibration.findings import Findings
from trainctl.trainer.calibration.measuring_process import measured
from trainctl.trainer.common.errors import first_line


def calibrate(config: RunFile, file: Path, node: str, caches: Path) -> DeviceProfile:
    """The profile of this node for a run file that lies in `file`. Raises TrainctlError if not even one sample fits,
    or if the model's files change meanwhile."""
    begun, model = time.monotonic(), Path(config.model.path)
    before = model_digests(model).whole
    found = measured(Findings(), [str(file), "--node", node, "--caches", str(caches)], _say)
    if model_digests(model).whole != before:
        raise InvalidInputError(str(model), "the model's files changed during the calibration; calibrate again")
    return DeviceProfile(
        key=key_of(config, node, backend=found.backend, device=found.device, model_digest=before),
        created_at=time.time(), duration_seconds=time.monotonic() - begun, passes=found.passes,
        out_of_memory_micro=found.out_of_memory_micro, grid=found.grid, optimizer_seconds=found.optimizer_seconds,
        matmul=found.matmul, memory_bytes_per_second=found.memory_bytes_per_second,
        memory_cap_bytes=found.memory_cap_bytes, disk=found.disk, data=found.data,
    )  # fmt: skip


def _say(text: str) -> None:
    _print(CalibrationProgress(text))


def _print(line: CalibrationLine) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)  # the measuring process then ends too, as its standard input has ended


def main() -> int:
    """Calibrate; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.calibration", description="Calibrate a node.")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--node", default="")
    parser.add_argument("--caches", type=Path, required=True)
    given: Any = parser.parse_args()
    set_title("calibration", given.node)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        config = run_file.on_this_machine(run_file.read(given.run_file), given.node)
        run_file.check_paths(config, str(given.run_file), given.node)
        given.caches.mkdir(parents=True, exist_ok=True)
        _print(CalibrationResult(calibrate(config, given.run_file, given.node, given.caches)))
    except (TrainctlError, OSError) as error:
        print(first_line(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
