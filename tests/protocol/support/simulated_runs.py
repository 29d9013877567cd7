"""Simulated runs of one to 24 hours: how long each step takes, and what happens between steps.

A run's speed drifts as a random walk, by 1 to 5 % (standard deviation) from start to end. Its first steps are slow.
Faults are a Poisson process: each takes 20 to 120 seconds, and some also undo the steps since the last checkpoint.
"""

import math
import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

from trainctl.protocol.batch.eta import Schedule

NOISE = 0.05
"""Standard deviation of a step's seconds, relative."""
LONG_STEPS = 0.01
"""Part of the steps that take much longer."""
FAULTS = 3.0
"""Mean number of faults in a run."""
BACK = 0.05
"""Part of the faults after which the run goes back to its last checkpoint."""


class Happening(NamedTuple):
    """One step, or what happens after it."""

    kind: Literal["train", "evaluate", "checkpoint", "fault"]
    step: int  # last committed step, after this
    seconds: float


class SimulatedRun(NamedTuple):
    """All that happens in a run, in order, and what is known of it beforehand."""

    steps: int
    schedules: dict[str, Schedule]
    happenings: tuple[Happening, ...]

    def at(self, part: float) -> int:
        """Count the happenings until this part of the steps is first committed."""
        return next(count for count, one in enumerate(self.happenings, 1) if one.step >= part * self.steps)


def simulated(seed: int) -> SimulatedRun:
    chance = random.Random(seed)
    steps = round(2000 * 10 ** chance.random())
    usual = 3600 * 24 ** chance.random() / steps
    evaluation, checkpoint = usual * chance.uniform(5, 40), chance.uniform(2, 20)
    schedules = {
        # Before the first one, an evaluation's time is guessed within a factor of 2, a checkpoint's not at all.
        "evaluate": Schedule(chance.randint(100, 500), True, evaluation * 2 ** chance.uniform(-1, 1)),
        "checkpoint": Schedule(chance.randint(250, 1000), True),
    }
    durations = {"evaluate": evaluation, "checkpoint": checkpoint}
    return SimulatedRun(steps, schedules, tuple(_happenings(chance, steps, usual, schedules, durations)))


def _happenings(
    chance: random.Random, steps: int, usual: float, schedules: dict[str, Schedule], durations: dict[str, float]
) -> Iterator[Happening]:
    drift, wander = 0.0, chance.uniform(0.01, 0.05) / math.sqrt(steps)
    step, checkpoint_step, highest = 0, 0, 0
    while step < steps:
        step += 1
        drift += chance.gauss(0, wander)
        seconds = usual * math.exp(drift) * max(chance.gauss(1, NOISE), 0.5)
        if chance.random() < LONG_STEPS:
            seconds *= chance.uniform(2, 10)
        yield Happening("train", step, seconds * _warm_up(step, highest))
        for kind, schedule in schedules.items():
            if step % schedule.every_steps == 0 or step == steps:
                yield Happening(kind, step, durations[kind] * max(chance.gauss(1, 0.1), 0.3))
                checkpoint_step = step if kind == "checkpoint" else checkpoint_step
        is_new, highest = step > highest, max(step, highest)
        if is_new and chance.random() < FAULTS / steps:
            step = checkpoint_step if chance.random() < BACK else step
            yield Happening("fault", step, chance.uniform(20, 120))


def _warm_up(step: int, highest: int) -> float:
    """Factor of a run's first steps: devices compile and warm up."""
    return 1.0 if highest >= step or step > 10 else 20.0 if step == 1 else 1.5
