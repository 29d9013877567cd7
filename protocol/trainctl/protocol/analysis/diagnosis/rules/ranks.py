"""Causes between ranks: late data, a rank that all others wait for, and the sum of gradients."""

from collections.abc import Iterator
from statistics import median, quantiles

from trainctl.protocol.analysis.diagnosis.pace import LEAST_STEPS, Parts, shared_sync
from trainctl.protocol.analysis.diagnosis.rule import NO_STEPS, Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.rules.machine import CPU_PRESSURE, cpu_pressure, is_crowded, more_prefetch
from trainctl.protocol.analysis.diagnosis.situation import Situation, megabytes, percent
from trainctl.protocol.analysis.rolling import SOUGHT
from trainctl.protocol.analysis.slow_ranks import beyond_others
from trainctl.protocol.analysis.straggler import waits
from trainctl.protocol.batch.pass_curve import sent_bytes
from trainctl.protocol.batch.split import ShareCost, check_enough, slowest, split
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import BUSY_PHASES, WhatIf
from trainctl.protocol.messages.event_prose import seconds

MOST_WORKERS = 64
"""Threads that a run file may let assemble micro-batches."""
LEAST_GAIN = 0.02
"""Part of a step that a cause must cost."""
SYNC_PART = 0.1
"""Part of a step that the sum of gradients may take, without waits for slower ranks."""
LEAST_SYNC_SECONDS = 0.02
"""Seconds of a step below which the sum is no trouble: it is mostly fixed costs."""
CROSSING_PART = 0.1
"""Part of the sum's bytes that a node must send over its network, for the gradients to cross it."""
SLOW_LINK = 12.5e6
"""Bytes per second of a slow link, 100 Mbit/s: a sum that takes much longer than that doesn't wait for bytes."""
LOST_SEGMENTS = 0.002
"""Part of the segments sent again from which a link is lossy."""
LEAST_LOST = 1.0
"""Segments sent again per second from which a link is lossy, whatever is sent."""
SEGMENT_BYTES = 1448
"""Payload of a TCP segment on Ethernet."""
VARYING = 1.6
"""Ratio of the quartiles of the sum's seconds from which it is said to vary."""


def late_data(s: Situation) -> Iterator[Verdict]:
    """Ranks that wait for data."""
    whole = s.step_seconds
    if not s.ranks or not whole:
        yield NO_STEPS
        return
    late = s.data_waits
    what_if = s.without(late, "waits for data") if late else None
    most = max(its.data_mean for its in s.ranks.values())
    if what_if is None or what_if.part < LEAST_GAIN:
        yield Clear(f"data take {percent(most / whole)} of a step at most")
        return
    worst = max(late, key=lambda rank: late[rank])
    lines = [
        f"{s.label(rank)}: {seconds(late[rank])} of {seconds(whole)}, {percent(late[rank] / whole)}"
        for rank in sorted(late)
    ]
    data = s.facts.config.data if s.facts.config is not None else None
    settings = (f"prefetch {data.prefetch}, {data.workers} worker{'s'[: data.workers - 1]}",) if data else ()
    workers = min(2 * data.workers, MOST_WORKERS) if data and data.workers < MOST_WORKERS else None
    values = {"node": s.node(worst), "prefetch": more_prefetch(s), "workers": workers}
    yield Found(
        f"{s.label(worst)} waits for data",
        (*lines, *settings),
        s.node(worst) if len(late) == 1 else "",
        worst if len(late) == 1 else None,
        what_if,
        values=values,
    )


# ---------------------------------------------------------------- the sum of gradients


def lossy_link(s: Situation) -> Iterator[Verdict]:
    """Segments that are sent again."""
    part = _sync_part(s)
    if part is None:
        yield _alone(s)
        return
    lost = {node: found for node in s.nodes if (found := _lost(s, node)) is not None}
    worst = max(lost, key=lambda node: lost[node][0], default=None)
    is_lossy = worst is not None and lost[worst][1]
    if worst is None:
        yield Unknown("TCP segments sent again")
    elif is_lossy and _is_long(s, part):
        said = f"{worst}: {lost[worst][0]:.0f} segments per second sent again"
        yield _slow_sum(s, f"{worst}'s link loses segments", (said, *_varied(s)), worst)
    else:
        yield Clear(f"{lost[worst][0]:.1f} segments per second sent again", worst)


def slow_link(s: Situation) -> Iterator[Verdict]:
    """A sum of gradients that takes much of each step, on a link that loses nothing."""
    part = _sync_part(s)
    if part is None:
        yield _alone(s)
    elif not _is_long(s, part):
        yield Clear(f"the sum of gradients takes {seconds(s.sync_seconds)}, {percent(part)} of a step")
    elif _crosses(s) is False:
        yield Clear("the gradients don't leave the machine: no network link carries them")
    else:
        use = _link_use(s)
        said = [f"{percent(use)} of the calibrated bandwidth"] if use is not None else []
        before = s.sync_before
        said += [f"before: {seconds(before)}"] if before and before < 0.8 * s.sync_seconds else []
        is_below_calibration = use is not None and use < s.alerts.link_percent / 100
        is_slow = is_below_calibration or (before is not None and before < 0.5 * s.sync_seconds)
        title = "the link between the nodes is slow" if is_slow else "the sum of gradients takes long"
        pressure = cpu_pressure(s)
        if not is_slow and not _crosses(s) and not _is_explained(s):
            yield Clear(f"{percent(part)} of a step, more than its bytes explain: it waits for processors")
        elif pressure is not None and pressure >= CPU_PRESSURE and not is_slow:
            yield Clear(f"{percent(part)} of a step, at a CPU pressure of {pressure:.0f} %: it waits for processors")
        else:
            yield _slow_sum(s, title, (*said, *_varied(s)), None)


def _alone(s: Situation) -> Verdict:
    return Clear("one rank alone sums with no other") if s.ranks else NO_STEPS


def _sync_part(s: Situation) -> float | None:
    """Part of a step that the sum itself takes; None for one rank, or without steps."""
    return s.sync_seconds / s.step_seconds if len(s.ranks) > 1 and s.step_seconds else None


def _is_long(s: Situation, part: float) -> bool:
    return part >= SYNC_PART and s.sync_seconds >= LEAST_SYNC_SECONDS


def _crosses(s: Situation) -> bool | None:
    """Return whether the gradients go over a network, by what the nodes send besides loopback; None: not known."""
    sent, size = _sent(s), _sum_bytes(s)
    if sent is None or size is None or not s.step_seconds:
        return None
    return sent * s.step_seconds >= CROSSING_PART * sent_bytes(size, len(s.ranks))


def _sent(s: Situation) -> float | None:
    """Bytes per second of the node that sends most; None: not counted on each node."""
    found = [s.reading(node, "network_out_bytes_per_second") for node in s.nodes]
    return max((one for one in found if one is not None), default=None) if None not in found else None


def _is_explained(s: Situation) -> bool:
    """Return whether a slow link would take half of the sum's seconds for its bytes."""
    size = _sum_bytes(s)
    return size is not None and sent_bytes(size, len(s.ranks)) / SLOW_LINK >= 0.5 * s.sync_seconds


def _sum_bytes(s: Situation) -> float | None:
    return max((size for rank in s.ranks if (size := s.metric(rank, "sum_bytes")) is not None), default=None)


def _lost(s: Situation, node: str) -> tuple[float, bool] | None:
    """Segments per second sent again, and whether these are many; None: not counted."""
    again, sent = s.reading(node, "retransmits_per_second"), s.reading(node, "network_out_bytes_per_second")
    if again is None:
        return None
    part = again * SEGMENT_BYTES / sent if sent else None
    return again, again >= LEAST_LOST and (part is None or part >= LOST_SEGMENTS)


def _varied(s: Situation) -> tuple[str, ...]:
    """A line if the sum's seconds vary much, as they do where segments are lost."""
    return (f"the middle half of the sums differ by a factor of {_varies(s):.1f}",) if _varies(s) >= VARYING else ()


def _varies(s: Situation) -> float:
    sums = [shared_sync(parts) for parts in s.recent]
    low, _, high = quantiles(sums, n=4) if len(sums) > 1 else (1.0, 1.0, 1.0)
    return high / low if low > 0 else 1.0


def _link_use(s: Situation) -> float | None:
    return max((use for rank in s.ranks if (use := s.metric(rank, "link_use")) is not None), default=None)


def _slow_sum(s: Situation, title: str, evidence: tuple[str, ...], node: str | None) -> Found:
    whole, took, use = s.step_seconds or 0.0, s.sync_seconds, _link_use(s)
    expected = [took * use] if use is not None and use < 1 else []
    expected += [s.sync_before] if s.sync_before is not None else []
    usual = min([one for one in expected if one < took], default=0.0)
    said = f"the sum takes {seconds(took)} of {seconds(whole)}, {percent(took / whole)}, waits for slower ranks aside"
    size = _sum_bytes(s)
    summed = (f"{megabytes(size)} of gradients are summed in each step",) if size is not None else ()
    what_if = s.what_if(whole - (took - usual), "the link's delay" if usual else "the sum of gradients")
    return Found(title, (said, *evidence, *summed), node or "", what_if=what_if, values=_values(s, took))


def _values(s: Situation, took: float) -> dict[str, object]:
    """The global batch at which the sum takes a tenth of a step, and the rank that is faster alone, if one is."""
    total, whole = sum(its.samples for its in s.ranks.values()), s.step_seconds or 0.0
    passes = max(its.busy for its in s.ranks.values())
    wanted = round(total * 9 * took / passes) if passes > 0 else total
    alone = {rank: model.seconds(total, s.ranks[rank].micro or total) - took for rank, model in s.models.items()}
    best = min(alone, key=lambda rank: alone[rank], default=None)
    is_faster = best is not None and alone[best] < (1 - s.split_gain) * whole
    others = [s.node(rank) for rank in s.ranks if rank != best] if is_faster else []
    return {
        "batch": wanted if wanted > total else None,
        "other": others[0] if others else None,
        "alone": seconds(alone[best]) if is_faster and best is not None else None,
    }


CROWDED_TIMES = 3.0
"""Factor of the gain of a split, and of SOUGHT, at a high CPU pressure."""
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
OWN_PART = 0.5
"""Part of the others' wait that this must explain."""


def slow_rank(s: Situation) -> Iterator[Verdict]:
    """A rank that the others wait for, and that another split or its own past shows to be slow."""
    if len(s.ranks) < 2:
        yield Clear("one rank alone waits for no other") if s.ranks else NO_STEPS
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
    each = [waits(parts) for parts in s.recent]
    return {rank: median([waited[rank] for waited in each]) for rank in s.ranks if rank != slow}


def _own(s: Situation, rank: int) -> float:
    """Seconds by which the rank's passes are longer than they were, beyond what the others' became longer, if that
    explains the others' wait; else 0."""
    before = {one: s.before[one].busy for one in s.ranks if one in s.before and s.before[one].busy > 0}
    if rank not in before:
        return 0.0
    part = beyond_others({one: s.ranks[one].busy / busy - 1 for one, busy in before.items()}, rank)
    longer, wait = part * before[rank], median(_waits(s, rank).values())
    is_slower = part >= (CROWDED_TIMES if is_crowded(s) else 1.0) * SOUGHT
    return longer if is_slower and wait > 0 and longer >= OWN_PART * wait else 0.0


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
    """Return step seconds now and with the best split, if that is faster by enough in each third of the lasting
    steps."""
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
