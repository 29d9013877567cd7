"""A rank that all others wait for."""

from collections.abc import Iterator
from statistics import median

from trainctl.protocol.analysis.diagnosis.pace import LEAST_STEPS, Parts, shared_sync
from trainctl.protocol.analysis.diagnosis.rule import Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.rules.machine import is_crowded
from trainctl.protocol.analysis.diagnosis.situation import Situation, percent, seconds
from trainctl.protocol.batch.split import ShareCost, check_enough, slowest, split
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import BUSY_PHASES, WhatIf

CROWDED_TIMES = 3.0
"""Factor of the gain of a split, and of OWN_GROWTH, at a high CPU pressure."""
MOST_STEPS, CROWDED_STEPS = 0.8, 0.9
"""Part of the steps in which the rank must be the slower one, and the same at a high CPU pressure: ranks that share
processors keep each other waiting by turns."""
MOST_LINES = 9
"""Lines of evidence about ranks."""
SPLIT_PART = 0.2
"""Part of the others' wait that another split must save: where it saves less, ranks wait for their turn on shared
processors."""
MODELED_PART = 0.75
"""Part of a step without the sum that the slowest rank's model must explain, for splits to be compared by it."""
OWN_GROWTH = 0.1
"""Part by which a rank's passes must be longer than they were, to be called slow by its own past."""
OWN_PART = 0.5
"""Part of the others' wait that this must explain."""


def slow_rank(s: Situation) -> Iterator[Verdict]:
    """A rank that the others wait for, and that another split or its own past shows to be slow."""
    if len(s.ranks) < 2:
        yield Clear("one rank alone waits for no other") if s.ranks else Unknown("enough steps of the present plan")
        return
    rank = max(s.ranks, key=lambda one: s.ranks[one].busy)
    by_own, by_split = _by_own(s, rank), _by_split(s, rank)
    part, crowded = _slower_part(s, rank), is_crowded(s)
    if by_own is None and by_split is None:
        yield _clear_split(s)
    elif not s.lasting:
        yield Unknown("10 s or 300 steps of the present plan")
    elif crowded is None:
        yield Unknown("CPU pressure, and all processors are in use")
    elif part < (CROWDED_STEPS if crowded else MOST_STEPS):
        yield Clear(f"{s.label(rank)} is slower than the others in {percent(part)} of the steps: they wait by turns")
    else:
        yield _slow(s, rank, by_own, by_split)


def _slower_part(s: Situation, rank: int) -> float:
    """Part of the lasting steps in which the rank takes longer than the others' median."""
    slower = [
        parts[rank].phases.busy > median([parts[one].phases.busy for one in parts if one != rank])
        for parts in s.lasting
    ]
    return sum(slower) / len(slower) if slower else 0.0


def _slow(s: Situation, rank: int, by_own: WhatIf | None, by_split: WhatIf | None) -> Found:
    phase, line = _phase(s, rank)
    own = s.ranks[rank]
    total = sum(its.samples for its in s.ranks.values())
    share = f"{own.samples} of {total} samples take it {seconds(own.busy)}"
    lines = [
        line if by_own else share,
        *(f"{s.label(one)} waits {seconds(wait)} in each step" for one, wait in _waits(s, rank).items()),
    ]
    title = f"{s.label(rank)} is slow in {phase}" if by_own else f"{s.label(rank)} has too large a share"
    values = {"node": s.node(rank), "split": by_split is not None or None}
    return Found(title, tuple(lines[:MOST_LINES]), s.node(rank), rank, by_split or by_own, values=values)


def _by_own(s: Situation, rank: int) -> WhatIf | None:
    """A step without the rank's slowdown; None if that is no cause."""
    own = _own(s, rank)
    found = s.without({rank: own}, f"{s.label(rank)}'s {_phase(s, rank)[0]}") if own else None
    return found if found is not None and found.part >= _least(s) else None


def _by_split(s: Situation, rank: int) -> WhatIf | None:
    """A step with the best split; None if this one is no cause. Where others hardly wait, or wait much longer than it
    explains, their speed depends on the rank's, as with shared processors, and no split helps."""
    gain = _gain(s)
    if gain is None or s.step_seconds is None or gain[0] < MODELED_PART * (s.step_seconds - s.sync_seconds):
        return None
    found = s.what_if(s.step_seconds - (gain[0] - gain[1]), "this split")
    wait = median(_waits(s, rank).values())
    if found is None or found.part < _least(s) or not SPLIT_PART * wait <= found.saved <= wait / OWN_PART:
        return None
    return found


def _least(s: Situation) -> float:
    """Part of a step that a slow rank must cost: more where processors are shared, because speeds then change."""
    return CROWDED_TIMES * s.split_gain if is_crowded(s) else s.split_gain


def _clear_split(s: Situation) -> Clear:
    best = _best(s, s.recent)
    return Clear(f"the best split is {percent(max(best[0] / best[1] - 1, 0))} faster" if best else "no other split")


def _waits(s: Situation, slow: int) -> dict[int, float]:
    """Seconds that each rank but the slow one waits for slower ones in the sum."""
    others = [rank for rank in s.ranks if rank != slow]
    return {rank: median([parts[rank].phases.sync - shared_sync(parts) for parts in s.recent]) for rank in others}


def _own(s: Situation, rank: int) -> float:
    """Seconds by which the rank's passes are longer than they were, beyond what the others' became longer, if that
    explains the others' wait; else 0."""
    if rank not in s.before:
        return 0.0
    before, wait = s.before[rank].busy, median(_waits(s, rank).values())
    longer = s.ranks[rank].busy - max(_others_growth(s, rank), 1.0) * before
    is_slower = before > 0 and longer >= (CROWDED_TIMES if is_crowded(s) else 1.0) * OWN_GROWTH * before
    return longer if is_slower and wait > 0 and longer >= OWN_PART * wait else 0.0


def _others_growth(s: Situation, rank: int) -> float:
    """The median of what the other ranks' passes take, relative to before: longer samples, or a busier machine, make
    all of them longer. 1: not known."""
    grown = [
        its.busy / s.before[one].busy
        for one, its in s.ranks.items()
        if one != rank and one in s.before and s.before[one].busy > 0
    ]
    return median(grown) if grown else 1.0


def _best(s: Situation, steps: list[Parts]) -> tuple[float, float] | None:
    """Seconds of the slowest rank with the present split, and with the best one; None if models are missing."""
    models, shares = s.models_of(steps), {rank: its.samples for rank, its in s.ranks.items()}
    total = sum(shares.values())
    if not models.keys() >= shares.keys() or not all(shares.values()):
        return None
    try:
        check_enough(total, len(shares), "value")
    except InvalidInputError:
        return None
    costs = {rank: ShareCost.at(models[rank], its.micro or its.samples) for rank, its in s.ranks.items()}
    return slowest(shares, costs), slowest(split(total, costs), costs)


def _gain(s: Situation) -> tuple[float, float] | None:
    """The same, if the best split is faster by enough in each third of the lasting steps; else None."""
    steps = s.lasting or s.recent
    third = len(steps) // 3
    found = _best(s, s.recent) if third >= LEAST_STEPS // 3 and third else None
    if found is None or found[0] < (1 + s.split_gain) * found[1]:
        return None
    thirds = [_best(s, steps[at * third : (at + 1) * third]) for at in range(3)]
    return found if all(one is not None and one[0] >= (1 + s.split_gain) * one[1] for one in thirds) else None


def _phase(s: Situation, rank: int) -> tuple[str, str]:
    """The phase that grew most, and a line about it; without earlier steps the one that is longest beside others'."""
    growth = s.growth(rank)
    if growth is not None and max(growth.values()) > 0:
        grown = sorted(growth.items(), key=lambda one: -one[1])
        phase = grown[0][0]
        whole = sum(value for value in growth.values() if value > 0)
        names = [name for name, value in grown if value > 0.25 * whole] or [phase]
        now, before = s.ranks[rank].phases[phase], s.before[rank].phases[phase]
        return " and ".join(names), f"{phase} takes {seconds(now)}, before {seconds(before)}"
    others = [its for one, its in s.ranks.items() if one != rank]
    own = s.ranks[rank]
    excess = {
        name: own.phases[name] - own.samples * median([its.phases[name] / max(its.samples, 1) for its in others])
        for name in BUSY_PHASES
    }
    phase = max(excess, key=lambda name: excess[name])
    usual = own.phases[phase] - excess[phase]
    return phase, f"{phase} takes {seconds(own.phases[phase])}; at the others' pace its share takes {seconds(usual)}"
