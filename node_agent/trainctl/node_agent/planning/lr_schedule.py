"""The learning rate of each step: warm-up and decay from the run file, and later changes by commands."""

import math
from typing import Literal

import msgspec

from trainctl.protocol.config.run_tables import OptimizerTable
from trainctl.protocol.errors import InvalidInputError


class LrRule(msgspec.Struct, frozen=True):
    """`schedule`: `number` times the run file's curve; `constant`: `number` itself, a learning rate."""

    kind: Literal["schedule", "constant"] = "schedule"
    number: float = 1.0

    def scaled(self, factor: float) -> "LrRule":
        return LrRule(self.kind, self.number * factor)


def base_rate(optimizer: OptimizerTable, steps: int, step: int) -> float:
    """The run file's learning rate at `step` (from 1) of `steps`.

    Linear warm-up to the peak at the last warm-up step, then to `final_fraction` of it at the last step, by a half
    cosine (Loshchilov and Hutter 2017, without restarts), a straight line, or not at all.
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup(steps)
    if step <= warmup:
        return peak * step / warmup
    if optimizer.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if optimizer.schedule == "cosine" else 1 - progress
    return peak * (optimizer.final_fraction + (1 - optimizer.final_fraction) * left)


def check_extension(run: str, optimizer: OptimizerTable, before: int, after: int, done: int) -> None:
    """Check that the steps that a run has done, up to `done`, would have been the same with `after` steps in all in
    place of `before`. Raises InvalidInputError with the command that branches off."""
    changed = next(
        (
            step
            for step in range(1, done + 1)
            if base_rate(optimizer, before, step) != base_rate(optimizer, after, step)
        ),
        None,
    )
    if changed is None:
        return
    why = f"the {optimizer.schedule} schedule" if optimizer.schedule != "constant" else "warmup_ratio"
    problem = f"{why} of {before:,} steps has other learning rates from step {changed:,} on than one of {after:,} steps"
    remedy = f"trainctl run --branch {run}@{done} --set run.steps={after}"
    raise InvalidInputError("steps", f"{problem}; to train on with another schedule, branch off: {remedy}")


def rate(rule: LrRule, optimizer: OptimizerTable, steps: int, step: int) -> float:
    """The learning rate that `step` is planned with."""
    return rule.number if rule.kind == "constant" else rule.number * base_rate(optimizer, steps, step)
