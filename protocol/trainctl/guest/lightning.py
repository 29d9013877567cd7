"""The Trainer of Lightning, of both its packages: `Trainer(callbacks=[guest.lightning.Callback()])`.

A step is one of the optimizer. Its loss is what was trained on: the sum of the losses of its batches, which Lightning
has divided by their number. Orders are carried out in `on_train_batch_end`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trainctl.guest.frameworks import count, is_known, undisturbed, unknown, watch_only
from trainctl.guest.learning_rate import LearningRate
from trainctl.guest.run import Run, attach
from trainctl.guest.scalars import field_of

KNOWN: Final = ((2, 5), (2, 6))
"""First and last minor version of Lightning that is steered; others are only watched."""
_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
_SHOWN: Final = ("_callback_metrics", "_progress_bar_metrics", "_logged_metrics", "_first_loop_iter")
"""Attributes of Lightning's logger connector that an evaluation changes."""


def _package() -> Any:
    """Return the package that is in use, or else the first one that is installed; their callbacks are alike."""
    for name in _PACKAGES:
        if name in sys.modules:
            return sys.modules[name]
    with contextlib.suppress(ImportError):
        return importlib.import_module(_PACKAGES[0])
    return importlib.import_module(_PACKAGES[1])


class Callback(_package().Callback):  # type: ignore[misc]
    """Hands over each step of the Trainer that it is given to, and carries out orders between two steps."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._rate: LearningRate | None = None
        self._step = 0
        self._losses: list[Any] = []
        self._samples: Any = 0
        self._tokens: Any = 0
        self._seen: dict[str, Any] = {}  # values of the Trainer's metrics that a row has

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the run."""
        if next(callback for callback in trainer.callbacks if isinstance(callback, Callback)) is not self:
            return
        steps = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
        run = self._run = attach(steps=int(steps) if 0 < steps < float("inf") else None)
        self._step, self._seen = trainer.global_step, dict(trainer.callback_metrics)
        self._reset()
        version = sys.modules[type(trainer).__module__.partition(".")[0]].__version__
        if is_known(version, KNOWN):
            self._offer(run, trainer)
        else:
            watch_only(run, unknown("Lightning", version))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Keep the loss of a batch."""
        self._losses.append(loss.detach().float())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Hand over the step if the optimizer has made one, and carry out orders."""
        run = self._run
        if run is None:
            return
        samples, tokens = count(batch)
        self._samples = None if samples is None or self._samples is None else self._samples + samples
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens
        if trainer.global_step <= self._step:
            return
        self._step = trainer.global_step
        loss = sum(self._losses[1:], self._losses[0]) if self._losses else None
        rate = self._rate.used if self._rate is not None else None
        if rate is None and trainer.optimizers:
            rate = trainer.optimizers[0].param_groups[0].get("lr")
        samples, tokens = self._samples, self._tokens
        self._reset()
        run.waits_for_values = self._rate is not None and _is_validation_due(trainer)
        values = self._new_metrics(trainer)
        if run.step(self._step, loss=loss, samples=samples, tokens=tokens, lr=rate, **values):
            fit = trainer.fit_loop
            fit.min_epochs = fit.epoch_loop.min_steps = None  # Lightning would train on until they are reached
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Add to the newest step what the Trainer has evaluated."""
        if self._run is not None and not trainer.sanity_checking:
            values = self._new_metrics(trainer)
            if self._step and values:
                self._run.step(self._step, **values)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run."""
        self._leave("finished", "")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the run with the error."""
        if isinstance(exception, KeyboardInterrupt):
            self._leave("stopped", "interrupted")
        else:
            self._leave("failed", f"{type(exception).__name__}: {exception}")

    def _reset(self) -> None:
        self._losses, self._samples, self._tokens = [], 0, 0

    def _leave(self, state: Any, reason: str) -> None:
        run, self._run = self._run, None
        if self._rate is not None:
            self._rate.remove()
            self._rate = None
        if run is not None:
            run.close(state, reason)

    def _new_metrics(self, trainer: Any) -> dict[str, Any]:
        """Return what was logged since the last row."""
        metrics = trainer.callback_metrics
        values = {field_of(name): value for name, value in metrics.items() if self._seen.get(name) is not value}
        self._seen = dict(metrics)
        values.pop("loss", None)
        return values

    # What is ordered.

    def _offer(self, run: Run, trainer: Any) -> None:
        if len(trainer.optimizers) == 1:
            rate = self._rate = LearningRate(trainer.optimizers[0])
            run.offer("set-lr", None if rate.refusal else rate.set, why=rate.refusal)
        else:
            run.offer("set-lr", why=f"the module has {len(trainer.optimizers)} optimizers")
        run.offer("checkpoint", lambda: self._checkpoint(trainer))
        if trainer.enable_validation:
            run.offer("evaluate", lambda: self._evaluate(trainer))
        else:
            run.offer("evaluate", why="the module has no validation")

    def _checkpoint(self, trainer: Any) -> tuple[None, str]:
        """Write a checkpoint beside those of the Trainer, which deletes only its own."""
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or Path(trainer.default_root_dir, "checkpoints")
        path = Path(folder, f"ordered-step={self._step}.ckpt")
        trainer.save_checkpoint(path)
        return None, str(path)

    def _evaluate(self, trainer: Any) -> tuple[None, str]:
        """Run the validation, and leave all as it was."""
        assert self._run is not None
        before = dict(trainer.callback_metrics)
        with _untouched(trainer):
            trainer.fit_loop.epoch_loop.val_loop.run()
            after = dict(trainer.callback_metrics)
        values = {field_of(name): float(value) for name, value in after.items() if before.get(name) is not value}
        values.pop("loss", None)
        self._run.step(self._step, **values)
        return None, ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def callbacks() -> list[Callback]:
    """Return the callbacks that each Trainer gets by the entry point `callbacks_factory`."""
    return [Callback()]


def _is_validation_due(trainer: Any) -> bool:
    return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))


@contextlib.contextmanager
def _untouched(trainer: Any) -> Iterator[None]:
    """Validate without callbacks and loggers, and restore what it changes."""
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop.val_loop
    shown = {name: copy.copy(getattr(connector, name)) for name in _SHOWN}
    progress, has_run, last = copy.deepcopy(loop.batch_progress), loop._has_run, getattr(trainer, "_last_val_time", 0.0)
    callbacks, loggers = trainer.callbacks, trainer.loggers
    trainer.callbacks, trainer.loggers = [], []
    trainer.validating = True
    try:
        with undisturbed(trainer.lightning_module.modules()):
            yield
    finally:
        trainer.training = True
        trainer.callbacks, trainer.loggers = callbacks, loggers
        loop.batch_progress, loop._has_run, trainer._last_val_time = progress, has_run, last
        for name, value in shown.items():
            setattr(connector, name, value)
