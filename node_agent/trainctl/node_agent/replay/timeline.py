"""A recording as the messages of any number of nodes, step after step: pure, the same for the same seed.

The first ranks are those recorded; further ones repeat them, each a little faster or slower by the seed. Past the
recording's end its last third comes again. What a step's slowest rank takes, the others wait for.
"""

import itertools
import random
from typing import NamedTuple

import msgspec

from trainctl.node_agent.replay.faults import ScriptedFaults
from trainctl.node_agent.replay.format import Part, RecordedEvent, Recording, Step
from trainctl.protocol import messages as m

SPREAD = 0.15
"""Largest fraction by which a repeated rank is faster or slower than the recorded one."""


class Work(NamedTuple):
    """A rank's part in seconds, before it waits for the others."""

    samples: int
    micro_batch: int
    tokens: float
    data: float
    forward: float
    backward: float
    optimizer: float
    wait: float
    memory_bytes: int | None

    @property
    def alone(self) -> float:
        return self.data + self.forward + self.backward + self.optimizer + self.wait


class PlayedStep(NamedTuple):
    """One step: what is published of it."""

    step: m.StepCommitted
    parts: tuple[m.RankStep, ...]
    events: tuple[RecordedEvent, ...]
    held_out: float | None  # the loss of an evaluation after it


class Timeline:
    """`run` is the run's id, `nodes` how many play."""

    def __init__(self, recording: Recording, run: str, nodes: int, *, seed: int = 0, faults: bool = True) -> None:
        self.recording, self.run, self._seed = recording, run, seed
        self.length = len(recording.steps)
        known = len(recording.ranks)
        self.nodes = tuple(_name(recording.ranks[rank % known].node, rank // known) for rank in range(nodes))
        self.script = ScriptedFaults(self.nodes, self.length, faults=faults)
        self._paces = [1.0 if rank < known else 1 + SPREAD * (2 * self._chance(rank) - 1) for rank in range(nodes)]
        self._held = dict(recording.evaluations)
        self._totals = [(0.0, 0.0)]
        for number in range(1, self.length + 1):
            works, (tokens, seconds) = self._works(number), self._totals[-1]
            tokens += sum(work.tokens for work in works.values())
            self._totals.append((tokens, seconds + self._step_seconds(number, works)))

    def _chance(self, *keys: int) -> float:
        """A number from 0 to 1 that these keys always give."""
        return random.Random(hash((self._seed, *keys))).random()

    def recorded(self, step: int) -> Step:
        """The step of the recording that is played as `step`, from 1."""
        last_third = max(self.length // 3, 1)
        index = step if step <= self.length else self.length - last_third + 1 + (step - self.length - 1) % last_third
        return self.recording.steps[index - 1]

    @property
    def global_batch(self) -> int:
        """The recorded samples a rank, for these."""
        return round(self.recording.global_batch * len(self.nodes) / len(self.recording.ranks))

    def shares(self, step: int) -> dict[int, tuple[int, int]]:
        """(samples, micro-batch) of each live rank; what is left open of the global batch is dealt in turn."""
        live = [rank for rank in range(len(self.nodes)) if not self.script.is_lost(rank, step)]
        base = {rank: self._base(rank, step) for rank in live}
        samples = {rank: part.samples for rank, part in base.items()}
        for rank in itertools.cycle(live):
            left = self.global_batch - sum(samples.values())
            if left == 0:
                break
            samples[rank] = max(samples[rank] + (1 if left > 0 else -1), 1)
        return {rank: (samples[rank], part.micro_batch) for rank, part in base.items()}

    def _base(self, rank: int, step: int) -> Part:
        parts = self.recorded(step).parts
        return parts[rank % len(parts)]

    def _works(self, step: int) -> dict[int, Work]:
        return {rank: self._work(rank, step, *had) for rank, had in self.shares(step).items()}

    def _work(self, rank: int, step: int, samples: int, micro_batch: int) -> Work:
        part, pace = self._base(rank, step), self._paces[rank]
        if rank >= len(self.recording.ranks):
            pace *= 0.98 + 0.04 * self._chance(rank, step)
        more = samples / part.samples * pace * 1e-6
        slower = self.script.heat(rank, step).slowdown
        return Work(
            samples, micro_batch, part.tokens * samples / part.samples, part.data * more, part.forward * more,
            part.backward * more * slower, part.optimizer * 1e-6, part.wait * 1e-6, part.memory_bytes,
        )  # fmt: skip

    def step_seconds(self, step: int) -> float:
        return self._step_seconds(step, self._works(step))

    def _step_seconds(self, step: int, works: dict[int, Work]) -> float:
        """Those of the slowest rank, and the sum that no one waits in."""
        sync = min(part.sync for part in self.recorded(step).parts) * 1e-6
        return max(work.alone for work in works.values()) + sync

    def totals(self, step: int) -> tuple[float, float]:
        """Tokens and seconds of the steps up to this one."""
        tokens, seconds = self._totals[min(step, self.length)]
        further = max(step / self.length, 1.0)
        return tokens * further, seconds * further

    def generation(self, step: int) -> m.Generation:
        return m.Generation(1, self.script.generation(step))

    def played_step(self, step: int, committed_at: float) -> PlayedStep:
        """The step as committed at that time, in Unix seconds."""
        works, recorded = self._works(step), self.recorded(step)
        seconds, generation = self._step_seconds(step, works), self.generation(step)
        batch = self.global_batch
        tokens, (tokens_total, seconds_total) = sum(work.tokens for work in works.values()), self.totals(step)
        much = self.script.loss_factor(step)
        committed = m.StepCommitted(
            run=self.run, generation=generation, step=step, committed_at=committed_at, loss=recorded.loss * much,
            weight=tokens, tokens=round(tokens), samples=batch, learning_rate=recorded.learning_rate,
            grad_norm=recorded.grad_norm * much * much, cursor=step * batch, global_batch=batch,
            plan_version=recorded.plan_version, step_seconds=seconds, weight_total=tokens_total,
            tokens_total=tokens_total, seconds_total=seconds_total,
        )  # fmt: skip
        parts = tuple(self._part(rank, work, committed) for rank, work in works.items())
        return PlayedStep(committed, parts, self.events(step), self._held.get(step))

    def _part(self, rank: int, work: Work, step: m.StepCommitted) -> m.RankStep:
        phases = m.Phases(
            data=work.data, forward=work.forward, backward=work.backward, sync=step.step_seconds - work.alone,
            optimizer=work.optimizer, wait=work.wait,
        )  # fmt: skip
        return m.RankStep(
            run=self.run, generation=step.generation, step=step.step, rank=rank, node=self.nodes[rank],
            tokens=work.tokens, samples=work.samples, micro_batch=work.micro_batch, replays=0,
            step_seconds=step.step_seconds, phases=phases, weight=work.tokens, values=self._memory(work),
        )  # fmt: skip

    def _memory(self, work: Work) -> dict[str, float]:
        """A recording has one figure: the peak, or what was held where no peak was known."""
        found = (work.memory_bytes, work.memory_bytes, self.recording.memory_cap_bytes)
        return {name: value for name, value in zip(m.RANK_COLUMNS, found, strict=True) if value is not None}

    def events(self, step: int) -> tuple[RecordedEvent, ...]:
        """Those of the recording and those of the script; what came before the first step comes with it."""
        own = (event for event in self.recording.events if max(event.step, 1) == step and step <= self.length)
        return (*own, *self.script.happenings(step))

    def held_out(self, step: int) -> tuple[int, float] | None:
        """The newest evaluation up to a step: (its step, loss)."""
        known = [number for number in self._held if number <= step]
        return (max(known), self._held[max(known)]) if known else None

    def ranks(self, step: int, since_at: float) -> tuple[m.RankView, ...]:
        """All ranks after a step; `since_at`: when they came to their states."""
        shares = self.shares(max(step, 1))
        return tuple(self._rank(rank, step, shares.get(rank), since_at) for rank in range(len(self.nodes)))

    def _rank(self, rank: int, step: int, share: tuple[int, int] | None, since_at: float) -> m.RankView:
        recorded = self.recording.ranks[rank % len(self.recording.ranks)]
        view = m.RankView(
            rank=rank, node=self.nodes[rank], state="run", since_at=since_at, share=0, micro_batch=0,
            backend=recorded.backend, device=_device(recorded.device),
        )  # fmt: skip
        if share is not None:
            return msgspec.structs.replace(view, share=share[0], micro_batch=share[1])
        if self.script.is_coming_back(rank, step):
            return msgspec.structs.replace(view, state="rejoining", why="scripted: receiving the state")
        return msgspec.structs.replace(view, state="lost", why="scripted: its node is unreachable")


def _device(recorded: str | None) -> str:
    """What a rank ran on, as the one whose readings the script makes up: `scripted cpu`."""
    kind, _, name = (recorded or "").partition(" ")
    return f"{m.SCRIPTED_DEVICE} {name or kind}".strip()


def _name(node: str, repeat: int) -> str:
    """Of a node that repeats a recorded one: short, for a table of many."""
    return f"{node.rsplit('-', 1)[-1]}{repeat + 1}" if repeat else node
