"""Reports of a simulated rank: made up from its device, the plan and the loss model; the text says so. Pure."""

import dataclasses
import math
import struct
from collections.abc import Sequence
from typing import Any, Literal

from trainctl.node_agent.simulate.models import (
    JOIN_SECONDS,
    DeviceModel,
    DeviceSpec,
    LossModel,
    SimulatedLinks,
    SimulatedPart,
)
from trainctl.protocol import messages
from trainctl.protocol.batch.eta import loop_seconds

PROBE_SECONDS = 0.2
ANSWER = "(simulated: no model answered)"
_DIGEST = "simulated"


@dataclasses.dataclass(frozen=True)
class RankFacts:
    """Facts about one rank that don't change."""

    run: str
    rank: int
    backend: Literal["torch", "mlx"]
    device: str
    parameters: int  # trained
    samples: int  # of an epoch
    held_out: int
    tokens: int  # of a sample
    load_seconds: float
    disk_bytes_per_second: float
    writes_in_background: bool  # checkpoints
    started_at: float  # Unix seconds of the simulation's beginning
    loss: LossModel
    device_spec: DeviceSpec


def ready(facts: RankFacts, step: int, cursor: int) -> messages.Ready:
    """Make the message of a rank that has loaded the state of a step."""
    spec = facts.device_spec
    return messages.Ready(
        run=facts.run,
        rank=facts.rank,
        pid=0,
        backend=facts.backend,
        device=facts.device,
        parameters=facts.parameters,
        samples=facts.samples,
        held_out=facts.held_out,
        mean_weight=float(facts.tokens),
        layout_digest=_DIGEST,
        model_digest=_DIGEST,
        data_digest=_DIGEST,
        last_step=step,
        cursor=cursor,
        system="Linux",
        engines=("gloo", "ring"),
        profile=spec.profile,
        memory_cap_bytes=None if spec.cap_bytes is None else int(spec.cap_bytes),
    )


def formed(facts: RankFacts, form: messages.Form, level_seconds: float) -> messages.Formed:
    """Make the message that it has joined the group; `level_seconds`: of the transfer of the state."""
    join = JOIN_SECONDS if form.engine != "none" else 0.0
    return messages.Formed(
        run=facts.run, rank=facts.rank, generation=form.generation, join_seconds=join, level_seconds=level_seconds
    )


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


def _same(facts: RankFacts, plan: messages.StepPlan, now: float) -> dict[str, Any]:
    return {
        "run": facts.run,
        "rank": facts.rank,
        "generation": plan.generation,
        "seq": plan.seq,
        "kind": plan.kind,
        "step": plan.step,
        "finished_at": facts.started_at + now,
    }


@dataclasses.dataclass(frozen=True)
class InStep:
    """A rank's part of the step in progress."""

    plan: messages.StepPlan
    mine: messages.RankWork
    left: tuple[messages.Range, ...]  # positions that weren't in its accumulators
    part: SimulatedPart
    began: float
    waited: float  # for the plan


def step_report(facts: RankFacts, step: InStep, held: Sequence[messages.Range], now: float) -> messages.Report:
    """Report a step that was updated `now`, with the positions that the rank had accumulated."""
    plan, part = step.plan, step.part
    loss, norm = facts.loss.at_step(plan.step, plan.cursor)
    count, tokens = sum(piece.count for piece in held), facts.tokens
    took = now - step.began
    phases = messages.Phases(
        forward=part.forward,
        backward=part.backward,
        sync=max(took - part.busy - part.optimizer, 0.0),
        optimizer=part.optimizer,
        wait=step.waited,
    )
    weight = float(plan.global_batch * tokens)
    return messages.Report(
        **_same(facts, plan, now),
        loss_sum=loss * weight,
        weight=weight,
        own_weight=float(count * tokens),
        own_samples=count,
        tokens=plan.global_batch * tokens,
        own_tokens=count * tokens,
        grad_norm=norm,
        micro_batch=part.micro,
        replays=part.replays,
        phases=phases,
        step_seconds=took + step.waited,
        values=_memory(facts, part),
    )


def device_reading(spec: DeviceSpec) -> messages.GpuReading:
    """Return what is known of a simulated device between steps."""
    used = None if spec.memory is None else int(spec.memory.base_bytes)
    total = None if spec.cap_bytes is None else int(spec.cap_bytes)
    return messages.GpuReading(spec.name, memory_used_bytes=used, memory_total_bytes=total)


def _memory(facts: RankFacts, part: SimulatedPart) -> dict[str, float]:
    """Return what is held at any micro-batch, the peak, and the cap, as far as they are known."""
    spec = facts.device_spec
    values = None if spec.memory is None else spec.memory.base_bytes, part.peak_bytes, spec.cap_bytes
    named = zip(messages.RANK_COLUMNS, values, strict=True)
    return {name: float(int(value)) for name, value in named if value is not None}


def side_seconds(
    facts: RankFacts, device: DeviceModel, links: SimulatedLinks, plan: messages.StepPlan, mine: messages.RankWork
) -> float:
    """Return what a plan beside training takes the rank."""
    count = sum(piece.count for piece in mine.ranges)
    match plan.kind:
        case "evaluate":
            return device.forward_seconds(count, mine.micro_batch)
        case "measure":
            return device.part(plan.step, count, mine.micro_batch, 0.0).busy
        case "checkpoint":
            return _loop_seconds(facts, links.state_bytes) if facts.rank in plan.writers else 0.0
        case "sample":
            return len(_prompts(plan)) * device.forward_seconds(1, 1)
        case "probe":
            return PROBE_SECONDS
        case "train" | "sync" | "defragment" | "profile":
            return 0.0


def side_report(
    facts: RankFacts,
    links: SimulatedLinks,
    plan: messages.StepPlan,
    mine: messages.RankWork,
    seconds: float,
    now: float,
) -> messages.Report:
    """Report a plan beside training that is done `now`."""
    count = sum(piece.count for piece in mine.ranges)
    weight = float(count * facts.tokens)
    same = _same(facts, plan, now) | {
        "loss_sum": facts.loss.held_out(plan.cursor) * weight,
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
        case "checkpoint" if facts.rank in plan.writers and not facts.writes_in_background:
            return messages.Report(**same, checkpoint=_written(facts, plan.step, links.state_bytes))
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


def write_seconds(facts: RankFacts, links: SimulatedLinks) -> float:
    """Return the seconds that a checkpoint's files take."""
    return links.state_bytes / facts.disk_bytes_per_second


def checkpointed(facts: RankFacts, links: SimulatedLinks, plan: messages.StepPlan) -> messages.Checkpointed:
    """Make the message that a checkpoint is complete which was written in the background."""
    return messages.Checkpointed(
        run=facts.run,
        rank=facts.rank,
        generation=plan.generation,
        seq=plan.seq,
        step=plan.step,
        checkpoint=_written(facts, plan.step, links.state_bytes),
    )


def _written(facts: RankFacts, step: int, size: int) -> messages.CheckpointInfo:
    took = size / facts.disk_bytes_per_second
    return messages.CheckpointInfo("simulated", step, size, _loop_seconds(facts, size), took)


def _loop_seconds(facts: RankFacts, size: int) -> float:
    return loop_seconds(size, facts.disk_bytes_per_second, background=facts.writes_in_background)


def _prompts(plan: messages.StepPlan) -> list[str]:
    asked = plan.sampling.prompts if plan.sampling is not None else ()
    return [prompt if isinstance(prompt, str) else prompt[-1].content for prompt in asked]
