"""The record that a checkpoint needs to be resumed from: on its disk before the checkpoint has its final name."""

import threading
import time
from collections.abc import Callable

from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.schema import sync_commits
from trainctl.trainer.common.logs import log
from trainctl.trainer.step.progress import Progress

RECORD_SECONDS = 10.0
"""Longest wait for the lead's disk. A lead that is gone for longer costs no checkpoint."""
_LOOK_SECONDS = 0.05


class RecordSync:
    """`plan` is for the control thread, `wait` for the one that writes a checkpoint."""

    def __init__(
        self, paths: RunPaths, metrics: MetricsWriter, progress: Progress, is_away: Callable[[], bool]
    ) -> None:
        """`is_away`: whether this node's agent can't be reached."""
        self._paths, self._metrics, self._progress, self._is_away = paths, metrics, progress, is_away
        self._recorded = threading.Condition()
        self._newest: tuple[m.Generation, int] | None = None  # of the plans whose step the lead's disk has

    def plan(self, plan: m.StepPlan) -> None:
        """Take a checkpoint's plan that was sent again, since the lead's disk has its record up to that step."""
        with self._recorded:
            self._newest = plan.generation, plan.seq
            self._recorded.notify_all()

    def wait(self, plan: m.StepPlan | None) -> None:
        """Wait until the lead's disk has the record up to the checkpoint's step. Without an agent, or a plan that
        announces the lead's word, and where this rank leaves or the plan's generation is left, have this node's disk
        keep the record as its agent has written it, and this rank's own. Raises OSError."""
        if plan is None or plan.recorded is not False or not self._is_recorded(plan):
            sync_commits(self._paths.record)
            self._metrics.sync()

    def _is_recorded(self, plan: m.StepPlan) -> bool:
        until = time.monotonic() + RECORD_SECONDS
        with self._recorded:
            while self._newest is None or self._newest < (plan.generation, plan.seq):
                if self._is_given_up(plan) or time.monotonic() >= until:
                    log.warning("step %s: checkpoint without the lead's word on its record", f"{plan.step:,}")
                    return False
                self._recorded.wait(_LOOK_SECONDS)
        return True

    def _is_given_up(self, plan: m.StepPlan) -> bool:
        """Whether no word comes: the lead gives it only in the plan's generation."""
        highest = self._progress.highest
        return self._is_away() or bool(self._progress.leaving) or (highest is not None and highest > plan.generation)
