"""Wall times of MLX on Metal, and a capture of the first recorded step for Xcode."""

import os
from pathlib import Path
from typing import Any

from trainctl.trainer.common.errors import first_line
from trainctl.trainer.profiling.phase_recorder import PhaseRecorder

VARIABLE = "MTL_CAPTURE_ENABLED"
"""Environment variable of the trainer that Metal needs at its start to capture anything."""
NO_CAPTURE = (
    f"no Metal capture: {VARIABLE}=1 isn't set; give it to the node's agent (trainctl-agent install --env"
    f" {VARIABLE}=1), restart the agent and the run's trainer, and profile again"
)
CAPTURE = "capture.gputrace"
_ONE_STEP = "the Metal capture has the first step only, because it keeps all buffers"


class MetalRecorder(PhaseRecorder):
    """`metal` is `mlx.core.metal`."""

    def __init__(self, metal: Any, folder: Path) -> None:
        """`folder` gets the capture; it must not be there already."""
        super().__init__()
        self._metal, self._path = metal, folder / CAPTURE
        self._is_capturing = False
        self._is_possible = os.environ.get(VARIABLE) == "1"
        self.lacks = f"{self.lacks}; {_ONE_STEP if self._is_possible else NO_CAPTURE}"

    def step_ended(self) -> None:
        super().step_ended()
        if self._is_capturing:
            self._end()
        elif self._is_possible:
            self._begin()

    def stop(self) -> None:
        super().stop()
        self._end()

    def _begin(self) -> None:
        self._is_possible = False  # of further steps
        try:
            self._metal.start_capture(str(self._path))
            self._is_capturing = True
        except (RuntimeError, ValueError) as error:
            self.lacks += f"; the capture failed: {first_line(error)}"

    def _end(self) -> None:
        if self._is_capturing:
            self._is_capturing = False
            try:
                self._metal.stop_capture()
            except (RuntimeError, ValueError) as error:
                self.lacks += f"; the capture failed: {first_line(error)}"
