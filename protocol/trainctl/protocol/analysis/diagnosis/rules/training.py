"""Causes in how the run trains: its micro-batch, clipping, a curve out of control, its checkpoints, its calibration."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from trainctl.protocol.analysis.diagnosis.rule import NO_STEPS, Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.situation import Situation, megabytes, percent
from trainctl.protocol.batch.memory_estimate import fit
from trainctl.protocol.batch.pass_curve import CLEAR_GAIN, SMALL_GAIN, PassCurve
from trainctl.protocol.calibration.peak import MAX_CAP_PART
from trainctl.protocol.config.policies import CLIP_STEPS
from trainctl.protocol.messages import WhatIf
from trainctl.protocol.messages.event_prose import seconds
from trainctl.protocol.messages.events import CheckpointWritten

LEAST_GAIN = 0.03
"""Part of a step that this must save."""
EARLY_PART = 0.1
"""Part of a run's steps up to which trouble may come from a warm-up that is too short."""
CHECKPOINT_PART = 0.05
"""Part of the training time that checkpoints may stop it."""
LEAST_CHECKPOINT_SECONDS = 0.2
"""Seconds of a checkpoint below which it is no trouble."""
LOW_USE = 50.0
"""Percent of use below which a GPU is poorly used. A high one says only that some kernel ran."""


def small_micro(s: Situation) -> Iterator[Verdict]:
    """Passes of fewer samples than the device needs, by its own curve."""
    yield from _wrong_micro(s, "small", lambda one: one.size > one.micro)


def large_micro(s: Situation) -> Iterator[Verdict]:
    """Passes of more samples than the device is fastest with, by its own curve: some have a peak, and then fall."""
    yield from _wrong_micro(s, "large", lambda one: one.size < one.micro)


def _wrong_micro(s: Situation, word: str, is_wrong: "Callable[[_Better], bool]") -> Iterator[Verdict]:
    if not s.ranks:
        yield NO_STEPS
    better = {rank: found for rank in s.ranks if (found := _better(s, rank)) is not None}
    wrong = {rank: one for rank, one in better.items() if is_wrong(one) and one.gain >= CLEAR_GAIN}
    whose = f"{s.label(next(iter(wrong)))}'s {word} micro-batch" if len(wrong) == 1 else f"the {word} micro-batches"
    # Ranks that are all slow have to be faster together.
    what_if = s.without({rank: one.saved for rank, one in wrong.items()}, whose)
    is_worth_it = what_if is not None and what_if.part >= LEAST_GAIN
    for rank, its in s.ranks.items():
        if rank not in better:
            yield Unknown(f"seconds of {s.label(rank)}'s passes by micro-batch: it has no calibration", its.node)
        elif rank in wrong and is_worth_it:
            values = {"node": its.node, "micro": better[rank].size}
            evidence = (better[rank].evidence, *_memory(s, rank))
            yield Found(f"{s.label(rank)}'s micro-batch is {word}", evidence, its.node, rank, what_if, values=values)
        elif better[rank].gain >= CLEAR_GAIN and not is_wrong(better[rank]):
            yield Clear(f"{s.label(rank)}'s micro-batch of {better[rank].micro} isn't too {word}", its.node)
        else:
            text = f"{s.label(rank)}'s micro-batch of {better[rank].micro} is"
            yield Clear(f"{text} within {percent(better[rank].gain)} of the fastest", its.node)


@dataclass(frozen=True)
class _Better:
    micro: int
    size: int
    gain: float  # part by which passes get faster
    saved: float  # seconds of a step
    evidence: str


def _better(s: Situation, rank: int) -> _Better | None:
    its, known = s.ranks[rank], s.curve(rank)
    micro = min(its.micro, its.samples)
    if known is None or not micro:
        return None
    curve, largest = known
    size = _fastest(s, rank, curve, largest)
    now, best = curve.share_seconds(its.samples, micro), curve.share_seconds(its.samples, size)
    passes = its.phases["forward"] + its.phases["backward"]
    rates = [f"{curve.samples_per_second(one):.3g} samples/s with a micro-batch of {one}" for one in (micro, size)]
    evidence = f"by its curve {', '.join(rates)}"
    return _Better(micro, size, now / best - 1, passes * (1 - best / now), evidence)


def _fastest(s: Situation, rank: int, curve: PassCurve, largest: int) -> int:
    """The smallest micro-batch near the best rate that is within what was measured, the share and the memory."""
    its, profile = s.ranks[rank], s.facts.profiles.get(rank)
    most = min(largest, its.samples)
    peaks = [(one.micro, float(one.peak_bytes)) for one in profile.passes if one.peak_bytes] if profile else []
    model, (peak, cap) = fit(peaks), s.memory(rank)
    if cap and model is not None and peak is not None:
        most = max(min(most, model.through(its.micro, peak).most(MAX_CAP_PART * cap, most)), min(its.micro, most))
    elif cap and peak and peak > MAX_CAP_PART * cap:
        most = min(its.micro, most)
    sizes = range(1, most + 1)
    best = min((curve.share_seconds(its.samples, size) for size in sizes), default=0.0)
    near = (size for size in sizes if curve.share_seconds(its.samples, size) <= (1 + SMALL_GAIN) * best)
    return next(near, max(its.micro, 1))


def _memory(s: Situation, rank: int) -> tuple[str, ...]:
    peak, cap = s.memory(rank)
    return (f"peak memory {megabytes(peak)} of {megabytes(cap)}",) if cap and peak else ()


# ---------------------------------------------------------------- the curve


def clip_bound(s: Situation) -> Iterator[Verdict]:
    """Clipping that scales nearly every gradient to a small part of itself."""
    scale = s.judge.clip_scale
    if scale is None:
        yield Unknown(f"clip scales of {CLIP_STEPS} steps")
        return
    if not s.judge.is_clip_bound:
        yield Clear(f"median clip scale {scale:.2g}")
        return
    norms = [step.grad_norm for step in s.newest(CLIP_STEPS) if step.grad_norm is not None]
    limit = s.facts.config.optimizer.clip_norm if s.facts.config is not None else None
    said = [f"median clip scale of {CLIP_STEPS} steps {scale:.2g}: each update is {percent(scale)} of its gradient"]
    said += [f"median gradient norm {median(norms):.3g}"] if norms else []
    said += [f"optimizer.clip_norm is {limit:g}"] if limit is not None else []
    norm = f"{median(norms):.2g}" if norms and median(norms) > 0 else None
    yield Found("clipping holds the training back", tuple(said), values={"norm": norm})


def unstable(s: Situation) -> Iterator[Verdict]:
    """A loss that jumps and doesn't come back, or that keeps rising."""
    steps = s.facts.steps
    if not steps:
        yield Unknown("steps")
        return
    half = (steps[-1].learning_rate or 0.0) / 2
    values: dict[str, Any] = {"half_rate": f"{half:.3g}" if half else None, "clip": _lower_clip(s)}
    if (spike := s.judge.spike) is not None:
        said = f"since step {spike.first:,} up to {spike.loss:.4g}, {spike.expected:.4g} expected"
        norm = "the gradient norm jumped with it" if spike.norm_rose else "the gradient norm hasn't jumped with it"
        values |= {"back": s.checkpoint_before(spike.first), "warmup": _longer_warmup(s, spike.first)}
        yield Found("the loss has jumped", (said, norm), values=values)
    elif (rising := s.judge.divergence) is not None:
        said = f"{rising.level:.4g}, {rising.best.level:.4g} at step {rising.best.step:,}"
        slope = f"it rises by {rising.trend:.2g} per step, for {rising.steps:,} steps"
        began = steps[-1].step - rising.steps
        values |= {"back": s.checkpoint_before(began), "warmup": _longer_warmup(s, began)}
        yield Found("the loss keeps rising", (said, slope), values=values)
    else:
        yield Clear("no jump of the loss, and it doesn't keep rising")


def _lower_clip(s: Situation) -> str | None:
    """Return half of the limit of gradient norms, or without one the median norm; None if neither is known."""
    limit = s.facts.config.optimizer.clip_norm if s.facts.config is not None else 0.0
    norms = [step.grad_norm for step in s.facts.steps if step.grad_norm and math.isfinite(step.grad_norm)]
    value = limit / 2 if limit else median(norms) if norms else None
    return None if value is None else f"{value:.2g}"


def _longer_warmup(s: Situation, began: int) -> str | None:
    """Return the setting of twice the warm-up; None where the trouble began long after it, so that it can't help."""
    config = s.facts.config
    if config is None:
        return None
    now = config.optimizer.warmup(config.run.steps)
    wanted = min(max(2 * now, began), config.run.steps - 1)
    if began > max(2 * now, EARLY_PART * config.run.steps) or wanted <= now:
        return None
    ratio = config.optimizer.warmup_ratio
    return f"warmup_ratio={wanted / config.run.steps:.3g}" if ratio else f"warmup_steps={wanted}"


# ---------------------------------------------------------------- beside its calibration


def below_calibration(s: Situation) -> Iterator[Verdict]:
    """Passes that are slower than when the device was calibrated."""
    known = {rank: speed for rank in s.ranks if (speed := s.metric(rank, "calibrated_speed"))}
    if not known:
        yield Unknown("a calibration")
    for rank, speed in known.items():
        slower, its = 1 / speed - 1, s.ranks[rank]
        if slower <= s.alerts.calibrated_slower_percent / 100:
            yield Clear(f"{s.label(rank)}'s passes run at {percent(speed)} of their calibration", its.node)
            continue
        passes = its.phases["forward"] + its.phases["backward"]
        said = f"forward and backward take {seconds(passes)}, {seconds(passes * speed)} when calibrated"
        what_if = s.without({rank: passes * (1 - speed)}, f"{s.label(rank)}'s slowdown since its calibration")
        yield Found(
            f"{s.label(rank)} is {percent(slower)} slower than calibrated",
            (said,),
            its.node,
            rank,
            what_if,
            values={"node": its.node},
        )


# ---------------------------------------------------------------- checkpoints


def long_checkpoint(s: Situation) -> Iterator[Verdict]:
    """Checkpoints that stop the training for much of its time."""
    written = [event.data for event in s.events(CheckpointWritten) if event.data.loop_seconds is not None]
    interval = _interval(s, [one.step for one in written])
    if not written or not interval or s.step_seconds is None:
        yield Unknown("how long checkpoints stop the training") if not written else Clear("no regular checkpoints")
        return
    each = median([one.loop_seconds for one in written])
    part = each / (each + interval * s.step_seconds)
    if part < CHECKPOINT_PART or each < LEAST_CHECKPOINT_SECONDS:
        yield Clear(f"checkpoints take {percent(part)} of the time")
        return
    size = next((one.size_bytes for one in reversed(written) if one.size_bytes), None)
    said = f"a checkpoint stops the training for {seconds(each)}, every {interval:,} steps: {percent(part)} of the time"
    background = s.facts.config.checkpoint.background if s.facts.config is not None else None
    doing = "" if background is None else "copied at " if background else "written at "
    rate = (f"{megabytes(size)} each, {doing}{megabytes(size / each)}/s",) if size else ()
    spread = each / interval
    what = f"with checkpoints a step takes {seconds(s.step_seconds + spread)}, without {seconds(s.step_seconds)}"
    wanted = max(interval + 1, round(each / s.step_seconds * (1 / CHECKPOINT_PART - 1)) + 1)
    yield Found(
        "checkpoints take long",
        (said, *rate),
        what_if=WhatIf(s.step_seconds + spread, s.step_seconds, what),
        values={"every": wanted},
    )


def _interval(s: Situation, steps: Sequence[int]) -> int:
    """Steps between two checkpoints: as they were written, else as the run file says; 0: not regular."""
    gaps = [late - early for early, late in pairwise(sorted(set(steps)))]
    if gaps:
        return round(median(gaps))
    return s.facts.config.checkpoint.every_steps if s.facts.config is not None else 0


# ---------------------------------------------------------------- use of the device


def low_use(s: Situation) -> Iterator[Verdict]:
    """A GPU that is idle for much of a step, where nothing before explains it."""
    if not s.ranks:
        yield NO_STEPS
    for rank, its in s.ranks.items():
        used = [gpu.utilization_percent for gpu in s.gpus(rank) if gpu.utilization_percent is not None]
        if not used:
            yield Unknown(f"use of {s.label(rank)}'s GPU", its.node)
        elif median(used) >= LOW_USE:
            yield Clear(f"{s.label(rank)}'s GPU is used {median(used):.0f} % of the time", its.node)
        else:
            longest = sorted(its.phases, key=lambda name: -its.phases[name])[:3]
            said = ", ".join(f"{name} {seconds(its.phases[name])}" for name in longest)
            lines = (f"used {median(used):.0f} % of the time", f"the longest phases of its step: {said}")
            double = 2 * its.micro if 0 < 2 * its.micro <= its.samples else None
            yield Found(
                f"{s.label(rank)}'s GPU is often idle",
                lines,
                its.node,
                rank,
                severity="info",
                values={"node": its.node, "double": double},
            )
