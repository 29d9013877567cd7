"""The Trainer of transformers, and those of TRL: `Trainer(..., callbacks=[guest.hf.Callback()])`.

Each step's row has the loss that the Trainer would log with `logging_steps=1`: the sum of what its `training_step`
returned. Orders are carried out in `on_step_end`. An ordered evaluation changes nothing that training depends on.
"""

import contextlib
import copy
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import transformers
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainctl.guest.frameworks import count, is_known, owner_above, undisturbed, unknown, watch_only
from trainctl.guest.learning_rate import LearningRate
from trainctl.guest.run import Run, attach

KNOWN: Final = ((5, 23), (5, 24))
"""First and last minor version of transformers that is steered; others are only watched."""
_NOT_METRICS: Final = frozenset(
    {"loss", "learning_rate", "grad_norm", "epoch", "step", "num_input_tokens_seen", "total_flos", "train_loss"}
)
_NO_METRIC_ENDS: Final = ("_runtime", "_per_second")
_TRL_STATE: Final = ("_metrics", "_logs", "_pending_metrics", "_pending_extra_logs")
"""Values that TRL's trainers gather of each batch, also of an evaluation's, until they log it."""


class Callback(TrainerCallback):
    """Hands over each step of the Trainer that it is given to, and carries out orders between two steps."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._trainer: Any = None
        self._rate: LearningRate | None = None
        self._replaced: list[str] = []  # attributes of the Trainer that are ours
        self._losses: list[Any] = []
        self._samples: int | None = 0
        self._tokens: Any = 0
        self._tokens_seen = 0
        self._used_rate: Any = None
        self._grad_norm: Any = None
        self._early: dict[str, float] = {}  # logged before the first step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the run, and follow the Trainer."""
        self._leave()
        trainer = owner_above(sys._getframe(1), Trainer)
        if (
            trainer is None
            or next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Callback))
            is not self
        ):
            return
        name = args.run_name if args.run_name != args.output_dir else None
        self._trainer, self._run = trainer, attach(name, steps=state.max_steps)
        self._tokens_seen = state.num_input_tokens_seen
        self._reset()
        self._follow(trainer)
        if is_known(transformers.__version__, KNOWN):
            self._offer(self._run)
        else:
            watch_only(self._run, unknown("transformers", transformers.__version__))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the rate that the optimizer has just used, before the scheduler moves it."""
        if self._rate is not None and self._rate.used is not None:
            self._used_rate = self._rate.used
        else:
            self._used_rate = kwargs["optimizer"].param_groups[0].get("lr")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Hand over the step, and carry out orders."""
        if self._run is None:
            return control
        values, self._early = self._early, {}
        if self._grad_norm is not None:
            values["grad_norm"] = self._grad_norm
        tokens = self._tokens
        if args.world_size == 1:  # else it's a sum over the ranks, each of which gives its own
            tokens = (state.num_input_tokens_seen - self._tokens_seen) or tokens
        self._tokens_seen = state.num_input_tokens_seen
        loss = sum(self._losses[1:], self._losses[0]) if self._losses else None
        rate, samples = self._used_rate, self._samples
        self._reset()
        # What is logged and evaluated for this step comes after this event.
        self._run.waits_for_values = control.should_log or control.should_evaluate or state.epoch == int(state.epoch)
        if self._run.step(state.global_step, loss=loss, samples=samples, tokens=tokens, lr=rate, **values):
            control.should_training_stop = True
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add to the newest step what the Trainer logs of it."""
        if self._run is not None and (metrics := _metrics(logs or {})):
            if state.global_step:
                self._run.step(state.global_step, **metrics)
            else:
                self._early.update(metrics)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the Trainer as it was, and end the run."""
        run = self._run
        self._leave()
        if run is not None:
            run.close()

    # What is read.

    def _follow(self, trainer: Any) -> None:
        """Read along with the Trainer, by methods in place of its own that call them."""
        train, read = trainer.training_step, trainer.get_batch_samples

        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._count(inputs)
            loss = train(model, inputs, *args, **kwargs)
            self._losses.append(loss.detach().float())
            return loss

        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            assert self._run is not None
            self._run.phase("data")
            batches = read(*args, **kwargs)
            self._run.phase("")
            return batches

        self._replace("training_step", training_step)
        self._replace("get_batch_samples", get_batch_samples)
        if (norm := getattr(trainer, "_get_grad_norm", None)) is not None:

            def get_grad_norm(*args: Any, **kwargs: Any) -> Any:
                self._grad_norm = norm(*args, **kwargs)
                return self._grad_norm

            self._replace("_get_grad_norm", get_grad_norm)

    def _count(self, inputs: Any) -> None:
        samples, tokens = count(inputs)
        if samples == 1 < self._trainer.args.per_device_train_batch_size:
            samples = None  # several are packed into one row
        self._samples = None if samples is None or self._samples is None else self._samples + samples
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens

    def _reset(self) -> None:
        self._losses, self._samples, self._tokens, self._grad_norm = [], 0, 0, None

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        if name not in vars(self._trainer):
            self._replaced.append(name)
            setattr(self._trainer, name, function)

    def _leave(self) -> None:
        for name in self._replaced:
            delattr(self._trainer, name)
        if self._rate is not None:
            self._rate.remove()
        self._replaced, self._trainer, self._run, self._rate = [], None, None, None

    # What is ordered.

    def _offer(self, run: Run) -> None:
        trainer = self._trainer
        rate = self._rate = LearningRate(trainer.optimizer)
        run.offer("set-lr", None if rate.refusal else rate.set, why=rate.refusal)
        own = trainer._get_learning_rate
        self._replace("_get_learning_rate", lambda: float(rate.used) if rate.is_changed else own())  # what is logged
        run.offer("checkpoint", self._checkpoint)
        if trainer.eval_dataset is None:
            run.offer("evaluate", why="the Trainer has no eval_dataset")
        else:
            run.offer("evaluate", self._evaluate)

    def _checkpoint(self) -> tuple[None, str]:
        """Write the Trainer's checkpoint of this step; a limit on the number of checkpoints does not delete it."""
        trainer, trial = self._trainer, getattr(self._trainer, "_trial", None)
        folder = Path(trainer._get_output_dir(trial)) / f"checkpoint-{trainer.state.global_step}"
        is_whole = folder.exists()
        try:
            trainer._save_checkpoint(trainer.model_wrapped, trial)
            is_whole = True
        finally:
            if not is_whole:  # else half a checkpoint would be the one to resume from
                shutil.rmtree(folder, ignore_errors=True)
        control = trainer.control
        is_due = control.should_save
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, control)
        trainer.control.should_save = is_due
        if trainer.args.save_total_limit and trainer.args.should_save:
            kept = folder.with_name(f"kept-{folder.name}")
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept, copy_function=_link)
            folder = kept
        return None, folder.name

    def _evaluate(self) -> tuple[None, str]:
        """Measure the held-out loss, and leave all as it was."""
        trainer = self._trainer
        held_out = trainer.eval_dataset
        values: dict[str, float] = {}
        with _untouched(trainer):
            for name in held_out if isinstance(held_out, dict) else (None,):
                batches = trainer.get_eval_dataloader(name)
                prefix = f"eval_{name}" if name is not None else "eval"
                done = trainer.evaluation_loop(batches, "Evaluation", True, metric_key_prefix=prefix)
                values.update(_metrics({f"{prefix}_loss": done.metrics.get(f"{prefix}_loss")}))
        assert self._run is not None
        self._run.step(trainer.state.global_step, **values)
        return None, ", ".join(f"{name} {value:.6g}" for name, value in values.items())


def register() -> None:
    """Have transformers know `report_to="trainctl"`."""
    from transformers.integrations import integration_utils

    integration_utils.INTEGRATION_TO_CALLBACK["trainctl"] = Callback


def enter(module: ModuleType) -> None:
    """Give each Trainer a Callback. `module`: transformers.trainer."""
    module.DEFAULT_CALLBACKS.append(Callback)


def _metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among what is logged that a row does not have already."""
    return {
        name if name not in ("samples", "tokens", "lr") else f"logged_{name}": value
        for name, value in logs.items()
        if isinstance(value, (int, float)) and name not in _NOT_METRICS and not name.endswith(_NO_METRIC_ENDS)
    }


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


@contextlib.contextmanager
def _untouched(trainer: Any) -> Iterator[None]:
    """Evaluate without callbacks, and restore what an evaluation changes."""
    handler, accelerator = trainer.callback_handler, trainer.accelerator
    kept = {name: copy.deepcopy(getattr(trainer, name)) for name in _TRL_STATE if hasattr(trainer, name)}
    callbacks, loader, loaders = handler.callbacks, handler.eval_dataloader, len(accelerator._dataloaders)
    handler.callbacks = []
    try:
        with undisturbed(trainer.model_wrapped.modules()):
            yield
    finally:
        handler.callbacks, handler.eval_dataloader = callbacks, loader
        del accelerator._dataloaders[loaders:]
        for name, value in kept.items():
            setattr(trainer, name, value)
