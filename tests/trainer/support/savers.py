"""Savers of small runs."""

from pathlib import Path
from typing import Any

from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.checkpoints.saver import Saver

STEPS, BREAK, MICRO = 4, 2, 5


def saver_of(rig: Any, paths: RunPaths) -> Saver:
    return Saver(rig.rank, rig.config, paths, model_digests(Path(rig.config.model.path)).whole)
