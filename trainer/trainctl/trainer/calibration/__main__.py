"""`python -m trainctl.trainer.calibration RUN.toml --node NODE --caches FOLDER [--together]`: calibrates this node.

It measures in a process of its own, which may run out of memory: then another one measures what is left. Each line of
standard output is a `CalibrationLine`, the profile last. Exit status 0: done; 2: one line on standard error says what
is wrong. It ends when its standard input does. `--together`: others of the machine are calibrated at the same time, and
each line of standard input is the number of a stage that may begin (stages.py).
"""

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from trainctl.protocol.calibration.profile import (
    CalibrationLine,
    CalibrationProgress,
    CalibrationResult,
    CalibrationWaits,
)
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine.process_title import set_title
from trainctl.trainer.calibration.node_profile import node_profile
from trainctl.trainer.calibration.stages import StageRelay
from trainctl.trainer.common.errors import first_line


def _say(text: str) -> None:
    _print(CalibrationProgress(text))


def _print(line: CalibrationLine) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


def _listen(stages: StageRelay) -> None:
    for line in sys.stdin:
        stages.raise_to(int(line))
    os._exit(1)  # the measuring process then ends too, as its standard input has ended


def main() -> int:
    """Calibrate; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.calibration", description="Calibrate a node.")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--node", default="")
    parser.add_argument("--caches", type=Path, required=True)
    parser.add_argument("--together", action="store_true")
    given: Any = parser.parse_args()
    set_title("calibration", given.node)
    stages = StageRelay(0, lambda stage: _print(CalibrationWaits(stage))) if given.together else StageRelay.alone()
    threading.Thread(target=_listen, args=(stages,), daemon=True).start()
    try:
        config = run_file.on_this_machine(run_file.read(given.run_file), given.node)
        run_file.check_paths(config, str(given.run_file), given.node)
        _print(CalibrationResult(node_profile(config, given.run_file, given.node, given.caches, _say, stages)))
    except (TrainctlError, OSError) as error:
        print(first_line(error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
