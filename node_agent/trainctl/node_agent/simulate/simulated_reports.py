"""Reports of a simulated rank: made up from its device, the plan and the loss model; the text says so. Pure."""

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import Any

from trainctl.node_agent.simulate.models import JOIN_SECONDS, DeviceModel, DeviceSpec, SimulatedPart
from trainctl.node_agent.simulate.scenario import Scenario, held_out_of
from trainctl.protocol import messages
from trainctl.protocol.batch.eta import loop_seconds

PROBE_SECONDS = 0.2
ANSWER = "(simulated: no model answered)"
SAMPLES = 100_000
"""Samples of an epoch: a simulated run reads no data."""
_DIGEST = "simulated"


@dataclasses.dataclass(frozen=True)
class InStep:
    """A rank's part of the step in progress."""

    plan: messages.StepPlan
    mine: messages.RankWork
    left: tuple[messages.Range, ...]  # positions that weren't in its accumulators
    part: SimulatedPart
    began: float
    waited: float  # for the plan


class RankReports:
    """Messages of one rank of a run, and the seconds that what they tell takes."""

    def __init__(self, scenario: Scenario, run: str, rank: int, started_at: float) -> None:
        """`started_at`: the simulation's beginning, in Unix seconds."""
        self.run, self.rank, self._scenario, self._started_at = run, rank, scenario, started_at
        self.spec, self._node, self._config = scenario.devices[rank], scenario.nodes[rank], scenario.config
        self._tokens = scenario.config.data.sequence_length  # of a sample
        self.writes_in_background = scenario.config.checkpoint.background

    def ready(self, step: int, cursor: int) -> messages.Ready:
        """Say that the rank has loaded the state of a step."""
        return messages.Ready(
            run=self.run,
            rank=self.rank,
            pid=0,
            backend=self._node.backend,
            device=self.spec.name,
            parameters=self._scenario.parameters,
            samples=SAMPLES,
            held_out=held_out_of(self._config, SAMPLES),
            mean_weight=float(self._tokens),
            layout_digest=_DIGEST,
            model_digest=_DIGEST,
            data_digest=_DIGEST,
            last_step=step,
            cursor=cursor,
            system="Linux",
            engines=("gloo", "ring"),
            profile=self.spec.profile,
            memory_cap_bytes=None if self.spec.cap_bytes is None else int(self.spec.cap_bytes),
        )

    def formed(self, form: messages.Form, level_seconds: float) -> messages.Formed:
        """Say that it has joined the group; `level_seconds`: of the transfer of the state."""
        join = JOIN_SECONDS if form.engine != "none" else 0.0
        same: dict[str, Any] = {"run": self.run, "rank": self.rank, "generation": form.generation}
        return messages.Formed(**same, join_seconds=join, level_seconds=level_seconds)

    def of_step(self, step: InStep, held: Sequence[messages.Range], now: float) -> messages.Report:
        """Report a step that was updated `now`, with the positions that the rank had accumulated."""
        plan, part, spec = step.plan, step.part, self.spec
        loss, norm = self._scenario.loss.at_step(plan.step, plan.cursor)
        count, took = sum(piece.count for piece in held), now - step.began
        phases = messages.Phases(
            forward=part.forward,
            backward=part.backward,
            sync=max(took - part.busy - part.optimizer, 0.0),
            optimizer=part.optimizer,
            wait=step.waited,
        )
        memory = None if spec.memory is None else spec.memory.base_bytes, part.peak_bytes, spec.cap_bytes
        named = zip(messages.RANK_COLUMNS, memory, strict=True)
        weight = float(plan.global_batch * self._tokens)
        return messages.Report(
            **self._same(plan, now),
            loss_sum=loss * weight,
            weight=weight,
            own_weight=float(count * self._tokens),
            own_samples=count,
            tokens=plan.global_batch * self._tokens,
            own_tokens=count * self._tokens,
            grad_norm=norm,
            micro_batch=part.micro,
            replays=part.replays,
            phases=phases,
            step_seconds=took + step.waited,
            values={name: float(int(value)) for name, value in named if value is not None},
        )

    def _same(self, plan: messages.StepPlan, now: float) -> dict[str, Any]:
        return {
            "run": self.run,
            "rank": self.rank,
            "generation": plan.generation,
            "seq": plan.seq,
            "kind": plan.kind,
            "step": plan.step,
            "finished_at": self._started_at + now,
        }

    # ------------------------------------------------------------ plans beside training

    def side_seconds(self, device: DeviceModel, plan: messages.StepPlan, mine: messages.RankWork) -> float:
        """Return what a plan beside training takes the rank."""
        count = sum(piece.count for piece in mine.ranges)
        match plan.kind:
            case "evaluate":
                return device.forward_seconds(count, mine.micro_batch)
            case "measure":
                return device.part(plan.step, count, mine.micro_batch, 0.0).busy
            case "checkpoint":
                return self._loop_seconds if self.rank in plan.writers else 0.0
            case "sample":
                return len(_prompts(plan)) * device.forward_seconds(1, 1)
            case "probe":
                return PROBE_SECONDS
            case "train" | "sync" | "defragment" | "profile":
                return 0.0

    def of_side(self, plan: messages.StepPlan, mine: messages.RankWork, seconds: float, now: float) -> messages.Report:
        """Report a plan beside training that is done `now`."""
        count = sum(piece.count for piece in mine.ranges)
        weight = float(count * self._tokens)
        same = self._same(plan, now) | {
            "loss_sum": self._scenario.loss.held_out(plan.cursor) * weight,
            "weight": weight,
            "own_weight": weight,
            "own_samples": count,
            "micro_batch": mine.micro_batch,
            "step_seconds": seconds,
        }
        match plan.kind:
            case "probe":
                alike: dict[str, Any] = {"family": _DIGEST, "tokens_digest": _DIGEST, "lengths": (1,), "noise": 0.0}
                norms, said = struct.pack("<f", 1.0), struct.pack("<f", -1.0)
                return messages.Probed(**same, **alike, weight_norms=norms, log_probabilities=said)
            case "measure":
                return messages.Report(**same, samples_per_second=count / seconds if seconds > 0 else 0.0)
            case "checkpoint" if self.rank in plan.writers and not self.writes_in_background:
                return messages.Report(**same, checkpoint=self._written(plan.step))
            case "sync":
                return messages.Report(**same, drift=0.0)
            case "profile":
                return messages.Report(**same, skipped="a simulated rank has no operators to profile")
            case "sample":
                prompts = _prompts(plan)
                answers = tuple(messages.Answer(prompt, ANSWER, 1, True, seconds / len(prompts)) for prompt in prompts)
                return messages.SampleReport(**same, answers=answers)
            case "train" | "evaluate" | "checkpoint" | "defragment":
                return messages.Report(**same)

    @property
    def write_seconds(self) -> float:
        """Seconds that a checkpoint's files take."""
        return self._scenario.links.state_bytes / (self._node.disk_mb * 1e6)

    def checkpointed(self, plan: messages.StepPlan) -> messages.Checkpointed:
        """Say that a checkpoint is complete which was written in the background."""
        same: dict[str, Any] = {"run": self.run, "rank": self.rank, "generation": plan.generation}
        return messages.Checkpointed(**same, seq=plan.seq, step=plan.step, checkpoint=self._written(plan.step))

    def _written(self, step: int) -> messages.CheckpointInfo:
        size = self._scenario.links.state_bytes
        return messages.CheckpointInfo("simulated", step, size, self._loop_seconds, self.write_seconds)

    @property
    def _loop_seconds(self) -> float:
        size, rate = self._scenario.links.state_bytes, self._node.disk_mb * 1e6
        return loop_seconds(size, rate, background=self.writes_in_background)


def host_reading(node: str, at: float, spec: DeviceSpec | None) -> messages.HostReading:
    """Return what is known of a simulated node between steps: nothing but its device is simulated, so nothing else is
    read."""
    gpus: tuple[messages.GpuReading, ...] = ()
    if spec is not None:
        used = None if spec.memory is None else int(spec.memory.base_bytes)
        total = None if spec.cap_bytes is None else int(spec.cap_bytes)
        gpus = (messages.GpuReading(spec.name, memory_used_bytes=used, memory_total_bytes=total),)
    return messages.HostReading(node, at, None, None, None, None, gpus=gpus)


def done_by(left: Sequence[messages.Range], part: SimulatedPart, seconds: float) -> list[messages.Range]:
    """The first positions of those left, of the passes that are complete after so many seconds."""
    count = sum(piece.count for piece in left)
    passes = math.ceil(count / part.micro)
    whole = passes if seconds >= part.busy else int(passes * seconds / part.busy)
    return first_positions(left, min(whole * part.micro, count))


def first_positions(pieces: Sequence[messages.Range], count: int) -> list[messages.Range]:
    """The first so many."""
    first: list[messages.Range] = []
    for piece in pieces:
        if count <= 0:
            break
        first.append(messages.Range(piece.start, min(piece.count, count)))
        count -= piece.count
    return first


def _prompts(plan: messages.StepPlan) -> list[str]:
    asked = plan.sampling.prompts if plan.sampling is not None else ()
    return [prompt if isinstance(prompt, str) else prompt[-1].content for prompt in asked]
