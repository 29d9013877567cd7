"""Models of a simulated run: its time, each rank's device, the links between ranks, and the loss.

All chance is of the seed, the node and the step, so that the same seed gives the same run.

The loss is a power law of the samples trained on, with noise. It says nothing about a real model.

    loss(n) = E + (L0 - E) (1 + n / n0)^-0.3

n is the number of samples trained on, L0 the first loss (the logarithm of the vocabulary, if that is known), E = 1.7
and n0 = 20 global batches. Losses of language models fall as a power of the data (Hestness et al., 2017; Kaplan et
al., 2020). A step's loss differs from the curve by 1.5 % (standard deviation).
"""

import asyncio
import dataclasses
import heapq
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Protocol

from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.batch.pass_curve import PassCurve, bandwidth, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate, ProfileSummary
from trainctl.protocol.config.cluster_file import SimulatedNode


class Clock(Protocol):
    """The time that simulated ranks and groups see."""

    @property
    def now(self) -> float: ...
    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something so many seconds from now."""


class RealTime:
    """Time that passes by itself: the running event loop does things when they are due."""

    def __init__(self) -> None:
        self.began_at, self._began_monotonic = time.time(), time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the simulation began."""
        return time.monotonic() - self._began_monotonic

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, what)


class EventQueue:
    """Things to be done at their times; those of the same time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the simulation began
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._added = 0

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self._added += 1
        heapq.heappush(self._waiting, (self.now + seconds, self._added, what))

    def step(self) -> bool:
        """Do the next thing; False if there is none."""
        if not self._waiting:
            return False
        self.now, _, what = heapq.heappop(self._waiting)
        what()
        return True


FORWARD_PART: Final = 1 / 3
"""Part of a pass: a backward pass takes twice as long as a forward pass."""
PEAK_NOISE: Final = 0.005
"""Standard deviation of a step's peak memory, relative."""


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """Device of a node by its settings, its profile and the model."""

    name: str  # with the word simulated
    curve: PassCurve  # seconds of a pass by micro-batch
    step_seconds: float  # of each step beside passes and sum
    memory: MemoryModel | None  # None: nothing is known, and nothing is reported
    cap_bytes: float | None  # None: no limit
    profile: ProfileSummary | None  # that the rank says it has

    def out_of_memory(self, micro: int) -> bool:
        """Return whether a pass of so many samples needs more than there is."""
        if self.memory is None or self.cap_bytes is None:
            return False
        return self.memory.peak(micro) > self.cap_bytes


@dataclasses.dataclass(frozen=True)
class SimulatedPart:
    """A rank's part of a step."""

    forward: float  # seconds
    backward: float
    optimizer: float
    micro: int  # that memory has left
    replays: int  # passes that were made again for lack of memory
    peak_bytes: float | None

    @property
    def busy(self) -> float:
        """Seconds until its gradients are there."""
        return self.forward + self.backward


class DeviceModel:
    """One node's device over a run."""

    def __init__(self, spec: DeviceSpec, settings: SimulatedNode, seed: int, node: str) -> None:
        self.spec, self._settings, self._key = spec, settings, f"{seed} {node}"
        self._wander = random.Random(f"{self._key} drift")
        self._failures = random.Random(f"{self._key} failures")
        self._noise = random.Random(f"{self._key} noise")
        self._drifted, self._drifted_at = 0.0, 0.0
        self._fits: dict[int, tuple[int, int]] = {}  # what memory leaves of a micro-batch, and the passes made again

    def part(self, step: int, samples: int, micro: int, now: float) -> SimulatedPart:
        """Return the part of a step that begins `now` (seconds since the run began)."""
        settings, curve = self._settings, self.spec.curve
        micro, replays = self._fitting(min(micro, max(samples, 1)))
        seconds = curve.share_seconds(samples, micro) * self._chance(settings.noise)
        if settings.drift or settings.speeds:
            speed = next((change.speed for change in reversed(settings.speeds) if change.step <= step), 1.0)
            seconds *= math.exp(self._drift(now)) / speed
        if replays:
            seconds += replays * curve.seconds(micro)
        peak = None
        if self.spec.memory is not None:
            peak = self.spec.memory.peak(micro) * self._chance(PEAK_NOISE)
            peak = peak if self.spec.cap_bytes is None else min(peak, self.spec.cap_bytes)
        forward = FORWARD_PART * seconds
        return SimulatedPart(forward, seconds - forward, self.spec.step_seconds, micro, replays, peak)

    def _fitting(self, micro: int) -> tuple[int, int]:
        """Return the micro-batch that fits and the passes made again: a pass that runs out of memory is halved."""
        if micro not in self._fits:
            fitting, replays = micro, 0
            while fitting > 1 and self.spec.out_of_memory(fitting):
                fitting, replays = math.ceil(fitting / 2), replays + 1
            self._fits[micro] = fitting, replays
        return self._fits[micro]

    def _chance(self, deviation: float) -> float:
        return math.exp(self._noise.gauss(0.0, deviation)) if deviation else 1.0

    def _drift(self, now: float) -> float:
        """A random walk of the speed's logarithm."""
        hours = max(now - self._drifted_at, 0.0) / 3600
        if self._settings.drift and hours:
            self._drifted += self._wander.gauss(0.0, self._settings.drift * math.sqrt(hours))
            self._drifted_at = now
        return self._drifted

    def forward_seconds(self, samples: int, micro: int) -> float:
        """Return the seconds of samples that are only evaluated."""
        return FORWARD_PART * self.spec.curve.share_seconds(samples, self._fitting(max(micro, 1))[0])

    def seconds_to_failure(self) -> float:
        """Until a trainer that begins now dies; infinite if the node has no such failures."""
        hours = self._settings.mtbf_hours
        return self._failures.expovariate(1.0) * 3600 * hours if hours else math.inf

    def fails_at(self, step: int) -> bool:
        """Return whether its trainer dies in the step."""
        return step in self._settings.fails_at


JOIN_SECONDS: Final = 0.3
"""Until the reducers of a group have started and connected."""
NOTICE_SECONDS: Final = 0.1
"""Until a broken connection, or the end of a process, is noticed."""
WORD_SECONDS: Final = 0.001
"""From a rank to the lead and back."""


@dataclasses.dataclass(frozen=True)
class SimulatedLinks:
    """Links of all ranks; each has one, into a network that isn't the bottleneck."""

    of: Mapping[int, LinkRate]
    gradient_bytes: int
    state_bytes: int

    def sum_seconds(self, ranks: Sequence[int]) -> float:
        """Return the seconds of a sum of all gradients over these ranks, in a ring; 0 for one alone."""
        if len(ranks) < 2:
            return 0.0
        return sum_seconds(self.gradient_bytes, len(ranks), [self.of[rank] for rank in ranks])

    def transfer_seconds(self, ranks: Sequence[int]) -> float:
        """Return the seconds of the whole state to the ranks that are behind, over the slowest of these links."""
        slowest = min(bandwidth(self.of[rank]) for rank in ranks)
        return self.state_bytes / slowest


FIRST_LOSS: Final = 9.0
"""First loss where no vocabulary is known, in nats per token."""
LEAST_LOSS: Final = 1.7
EXPONENT: Final = 0.3
HALF_BATCHES: Final = 20
NOISE: Final = 0.015
HELD_OUT_GAP: Final = 0.02
"""Nats by which the held-out loss is above the curve."""


@dataclasses.dataclass(frozen=True)
class LossModel:
    """Losses of one run."""

    seed: int
    first: float  # nats per unit of weight
    scale: float  # samples

    @classmethod
    def of(cls, seed: int, global_batch: int, vocabulary: int | None) -> "LossModel":
        """`vocabulary`: number of tokens; None: not known."""
        first = math.log(vocabulary) if vocabulary and vocabulary > math.exp(LEAST_LOSS) else FIRST_LOSS
        return cls(seed, first, float(HALF_BATCHES * global_batch))

    def curve(self, samples: float) -> float:
        """After training on so many samples, without noise."""
        return LEAST_LOSS + (self.first - LEAST_LOSS) * math.pow(1 + samples / self.scale, -EXPONENT)

    @lru_cache(maxsize=64)  # noqa: B019  the key is a small tuple; each rank asks for the same
    def at_step(self, step: int, samples: int) -> tuple[float, float]:
        """(loss, gradient norm) of a step that begins after `samples`. A step that is made again is the same."""
        chance = random.Random(f"{self.seed} loss {step} {samples}")
        loss = self.curve(samples) * max(1 + NOISE * chance.gauss(0, 1), 0.5)
        return loss, (0.5 + 0.2 * loss) * chance.lognormvariate(0, 0.1)

    def held_out(self, samples: int) -> float:
        """Return the loss of an evaluation after `samples`."""
        return self.curve(samples) + HELD_OUT_GAP
