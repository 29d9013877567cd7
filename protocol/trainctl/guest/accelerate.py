"""A loop with accelerate: `Accelerator(log_with="trainctl")` after `guest.register()`.

A step is one of the optimizer, and its values are what the script logs by `accelerator.log`. Trackers exist on the main
process only, so a loop of several processes is only watched; to steer it, call `guest.attach()` on each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Final

import accelerate
from accelerate.tracking import GeneralTracker
from torch.optim import optimizer as torch_optimizer

from trainctl.guest.frameworks import is_known, owner_above, unknown, watch_only
from trainctl.guest.run import Run, attach
from trainctl.guest.scalars import numbers
from trainctl.guest.torch_loop import TorchLoop

KNOWN: Final = ((1, 14), (1, 15))
"""First and last minor version of accelerate that is steered; others are only watched."""
_SEVERAL: Final = "trackers are on the main process only: call guest.attach() on each process"
_UNNAMED: Final = (
    "pass project_config=ProjectConfiguration(FOLDER, automatic_checkpoint_naming=True) to the Accelerator, or offer a"
    " function: accelerator.get_tracker('trainctl', unwrap=True).offer('checkpoint', save)"
)


class Tracker(GeneralTracker):  # type: ignore[misc]
    """Hands over each step of the script's optimizer with what is logged for it."""

    name = "trainctl"
    requires_logging_directory = False

    def __init__(self, run_name: str, **_: object) -> None:
        super().__init__()
        self._name = run_name
        self._run: Run | None = None
        self._loop: TorchLoop | None = None
        self._hooks: list[Any] = []

    @property
    def tracker(self) -> Run | None:
        """The run, for functions that it is to offer."""
        return self._run

    def start(self) -> None:
        """Attach the run, and follow the optimizer."""
        accelerator = owner_above(sys._getframe(1), accelerate.Accelerator)
        run = self._run = attach(self._name)
        loop = self._loop = TorchLoop(run)
        self._hooks = [
            torch_optimizer.register_optimizer_step_pre_hook(loop.before),
            torch_optimizer.register_optimizer_step_post_hook(loop.after),
        ]
        several = accelerator is not None and accelerator.num_processes > 1
        if several or not is_known(accelerate.__version__, KNOWN):
            loop.steers = False
            watch_only(run, _SEVERAL if several else unknown("accelerate", accelerate.__version__))
        elif accelerator is None or not accelerator.project_configuration.automatic_checkpoint_naming:
            run.offer("checkpoint", why=_UNNAMED)
        else:
            run.offer("checkpoint", lambda: (None, accelerator.save_state()))

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: object) -> None:
        """Keep what is logged for the step that it belongs to."""
        if self._loop is not None:
            self._loop.hear(numbers(values))

    def finish(self) -> None:
        """End the run."""
        if self._run is not None and self._loop is not None:
            self._loop.finish()
            for hook in self._hooks:
                hook.remove()
            self._run.close()
            self._run = self._loop = None


def register() -> None:
    """Have accelerate know `log_with="trainctl"`."""
    enter(sys.modules["accelerate.tracking"])


def enter(module: ModuleType) -> None:
    """Have accelerate know `log_with="trainctl"`. `module`: accelerate.tracking."""
    if hasattr(module, "register_tracker_class") and Tracker.name not in module.LOGGER_TYPE_TO_CLASS:
        module.register_tracker_class(Tracker)
