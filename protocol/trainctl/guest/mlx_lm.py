"""Training by mlx-lm: `train(model, optimizer, data, **guest.mlx_lm.hooks(model, optimizer))`.

A step is an iteration. It is over when `train` asks for the next batch; orders are carried out there. Losses come at
`steps_per_report`, as means since the last one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tuner import callbacks, trainer

from trainctl.guest.frameworks import is_known, unknown, watch_only
from trainctl.guest.run import Run, attach

KNOWN: Final = ((0, 31), (0, 32))
"""First and last minor version of mlx-lm that is steered; others are only watched."""
_FACTOR, _CONSTANT = "trainctl_lr_factor", "trainctl_lr"


def hooks(
    model: Any,
    optimizer: Any,
    *,
    args: Any = None,
    val_dataset: Any = None,
    loss: Callable[..., Any] = trainer.default_loss,
    iterate_batches: Callable[..., Any] = trainer.iterate_batches,
    training_callback: Any = None,
) -> dict[str, Any]:
    """Return the arguments of `train` that attach it. What else it gets, as far as it is given here, is for the verbs
    checkpoint (`args`) and evaluate (`args`, `val_dataset`, `loss`)."""
    args = args if args is not None else trainer.TrainingArgs()
    run = attach(steps=args.iters, loss_unit="nats per token")
    loop = _Loop(run, optimizer, args, iterate_batches, training_callback)
    if is_known(mlx_lm.__version__, KNOWN):
        rate = _Rate(optimizer)
        run.offer("set-lr", None if rate.refusal else rate.set, why=rate.refusal)
        run.offer("checkpoint", lambda: _save(model, args, loop.step))
        if val_dataset is None:
            run.offer("evaluate", why="the loop has no validation set: pass val_dataset= to hooks()")
        else:
            run.offer("evaluate", lambda: loop.evaluate(model, val_dataset, loss))
    else:
        watch_only(run, unknown("mlx-lm", mlx_lm.__version__))
    return {"iterate_batches": loop.iterate, "training_callback": loop}


class _Loop(callbacks.TrainingCallback):
    """The iterations of one call of `train`."""

    def __init__(self, run: Run, optimizer: Any, args: Any, batches: Callable[..., Any], own: Any) -> None:
        self.step = 0
        """Iterations that are over."""
        self._run, self._optimizer, self._args = run, optimizer, args
        self._batches, self._own = batches, own
        self._report: dict[str, Any] = {}
        self._early: dict[str, Any] = {}  # evaluated before the first step

    def iterate(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield batches as the function in whose place it is; those of training close a step each."""
        batches = self._batches(*args, **kwargs)
        return self._follow(batches) if kwargs.get("loop") else batches

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        number = 0
        for number, batch in enumerate(batches, 1):
            samples, tokens = _count(batch)
            try:
                yield batch
            except GeneratorExit:
                if self._report.get("iteration") == number == self._args.iters:
                    self._close_step(number, samples, tokens)
                    self._run.close()
                raise
            if self._close_step(number, samples, tokens):
                self._run.close()
                return

    def _close_step(self, number: int, samples: int, tokens: int) -> bool:
        self.step = number
        report, self._report = self._report, {}
        values = {name: report[name] for name in ("peak_memory",) if name in report}
        values.update(self._early)
        self._early = {}
        rate = getattr(self._optimizer, "state", {}).get("learning_rate")
        upcoming, every = number + 1, self._args.steps_per_eval
        self._run.waits_for_values = upcoming % every == 0 or upcoming == self._args.iters
        return self._run.step(
            number,
            loss=report.get("train_loss"),
            samples=samples,
            tokens=tokens,
            lr=None if rate is None else rate.item(),
            **values,
        )

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        """Keep what is reported for the iteration that is about to be over."""
        self._report = dict(train_info)
        if self._own is not None:
            self._own.on_train_loss_report(train_info)

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        """Add to the newest step what was evaluated after it."""
        if self.step:
            self._run.step(self.step, eval_loss=val_info["val_loss"])
        else:
            self._early["eval_loss"] = val_info["val_loss"]
        if self._own is not None:
            self._own.on_val_loss_report(val_info)

    def evaluate(self, model: Any, dataset: Any, loss: Callable[..., Any]) -> tuple[None, str]:
        """Measure the held-out loss, and leave random numbers and modes as they were."""
        state: Any = mx.random.state
        shuffler = sys.modules["numpy"].random
        (high, low), shuffles = state[0].tolist(), shuffler.get_state()
        try:
            value = trainer.evaluate(
                model,
                dataset,
                self._args.batch_size,
                self._args.val_batches,
                self._args.max_seq_length,
                loss,
                self._batches,
            )
        finally:
            model.train()
            mx.random.seed((high << 32) | low)  # a key is made of its seed's halves
            shuffler.set_state(shuffles)
        self._run.step(self.step, eval_loss=value)
        return None, f"eval_loss {value:.6g}"


class _Rate:
    """The learning rate of an optimizer whose step is compiled: what changes must be in its state before that."""

    def __init__(self, optimizer: Any) -> None:
        self.refusal = ""
        """Why the rate can't be set; empty if it can."""
        self._optimizer, self._schedule = optimizer, None
        if "learning_rate" not in optimizer.state:
            self.refusal = f"{type(optimizer).__name__} has no single learning rate"
        elif (schedule := optimizer._schedulers.get("learning_rate")) is not None:
            self._schedule = schedule
            optimizer.state[_FACTOR], optimizer.state[_CONSTANT] = mx.array(1.0), mx.array(-1.0)
            optimizer._schedulers["learning_rate"] = self._scheduled

    def _scheduled(self, step: Any) -> Any:
        state = self._optimizer.state
        assert self._schedule is not None
        return mx.where(state[_CONSTANT] >= 0, state[_CONSTANT], self._schedule(step) * state[_FACTOR])

    def set(self, value: float, schedule: str = "scale") -> tuple[float, float]:
        """Have the next steps use a rate. Raises ValueError for a scale from a schedule that is at 0."""
        state = self._optimizer.state
        before = float(state["learning_rate"].item())
        if self._schedule is None:
            self._optimizer.learning_rate = value
        elif schedule == "set":
            state[_CONSTANT] = mx.array(value)
        else:
            due: Any = mx.array(self._schedule(self._optimizer.step))
            own = float(due.item())
            if own == 0 and value > 0:
                raise ValueError("the loop's own schedule is at 0 now, which no factor changes: use schedule=set")
            state[_CONSTANT], state[_FACTOR] = mx.array(-1.0), mx.array(value / own if own else 1.0)
        return before, value


def _save(model: Any, args: Any, step: int) -> tuple[None, str]:
    """Write the weights that are trained, as `train` does at `steps_per_save`."""
    weights = dict(tree_flatten(model.trainable_parameters()))
    file = Path(args.adapter_file)
    mx.save_safetensors(str(file), weights)
    numbered = file.parent / f"{step:07d}_adapters.safetensors"
    mx.save_safetensors(str(numbered), weights)
    return None, numbered.name


def _count(batch: Any) -> tuple[int, int]:
    """Return the samples and the tokens of a batch."""
    tokens, bounds = batch
    return tokens.shape[0], sum(end - begin for begin, end in bounds.tolist())


def register() -> None:
    """Have mlx-lm know `report_to="trainctl"`."""
    enter(importlib.import_module("mlx_lm.lora"))


def enter(module: Any) -> None:
    """Attach each training of `mlx_lm.lora`, which this module is."""
    train = module.train
    if hasattr(train, "__wrapped__"):
        return

    @functools.wraps(train)
    def attached(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(train).bind(*args, **kwargs)
        named = dict(given.arguments)
        names = ("args", "val_dataset", "loss", "iterate_batches", "training_callback")
        named.update(
            hooks(named["model"], named["optimizer"], **{name: named[name] for name in names if name in named})
        )
        return train(**named)

    module.train = attached
    known: dict[str, Any] = callbacks.SUPPORT_CALLBACK
    known["trainctl"] = _reported


def _reported(*, wrapped_callback: Any = None, **_: object) -> Any:
    return wrapped_callback
