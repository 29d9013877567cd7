"""Savers of small runs."""

from pathlib import Path
from typing import Any

from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.checkpoints.saver import Saver
from trainctl.trainer.collective.shared_buffer import layout_digest

STEPS, BREAK, MICRO = 4, 2, 5


def saver_of(rig: Any, paths: RunPaths) -> Saver:
    digest = model_digests(Path(rig.config.model.path)).whole
    return Saver(
        "r", rig.config, paths, rig.backend, rig.dataset, rig.progress, rig.rank.loss_scale,
        layout_digest(rig.backend.shapes), digest,
    )  # fmt: skip
