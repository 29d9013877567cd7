"""Causes in how ranks work together: data that come late, a slow rank, and the sum of gradients over the network."""

from collections.abc import Iterator
from statistics import median, quantiles

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.pace import LEAST_STEPS, Parts, shared_sync
from trainctl.protocol.analysis.diagnosis.rule import Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.rules.machine import DATA_PART
from trainctl.protocol.analysis.diagnosis.situation import Situation
from trainctl.protocol.analysis.diagnosis.words import megabytes, percent, seconds
from trainctl.protocol.batch.apportion import check_enough
from trainctl.protocol.batch.split import ShareCost, slowest, split
from trainctl.protocol.errors import InvalidInputError

LEAST_DATA_SECONDS = 0.02
"""Seconds of a step below which waiting for data is no trouble: a tiny step is mostly fixed costs."""
LEAST_GAIN = 0.02
"""Part of a step that a cause must cost."""
SPLIT_GAIN = 0.05
"""Part by which steps must get faster with another split, for a rank to be called slow."""
OWN_GROWTH = 0.1
"""Part by which a rank's passes must be longer than they were, to be called slow by its own past."""
OWN_PART = 0.5
"""Part of the others' wait that this must explain."""
SYNC_PART = 0.1
"""Part of a step that the sum of gradients may take, without waits for slower ranks."""
LEAST_SYNC_SECONDS = 0.02
"""Seconds of a step below which the sum is no trouble: it is mostly fixed costs."""
LINK_USE = 0.5
"""Part of the calibrated bandwidth below which a link is slow."""
LOST_SEGMENTS = 0.002
"""Part of the segments sent again from which a link is lossy."""
LEAST_LOST = 1.0
"""Segments sent again per second from which a link is lossy, whatever is sent."""
SEGMENT_BYTES = 1448
"""Payload of a TCP segment on Ethernet."""
VARYING = 1.6
"""Ratio of the quartiles of the sum's seconds from which lost segments are assumed, if they aren't counted."""


def late_data(s: Situation) -> Iterator[Verdict]:
    """Ranks that wait for data."""
    whole = s.step_seconds
    if not s.ranks or not whole:
        yield Unknown("enough steps of the present plan")
        return
    late = {rank: its.data_mean for rank, its in s.ranks.items() if its.data_mean > DATA_PART * whole}
    what_if = s.without(late, "waits for data") if late else None
    most = max(its.data_mean for its in s.ranks.values())
    if not late or what_if is None or max(late.values()) < LEAST_DATA_SECONDS or what_if.part < LEAST_GAIN:
        yield Clear(f"data take {percent(most / whole)} of a step at most")
        return
    worst = max(late, key=lambda rank: late[rank])
    lines = [f"{s.label(rank)}: {seconds(late[rank])} of {seconds(whole)}, {percent(late[rank] / whole)}"
             for rank in sorted(late)]  # fmt: skip
    data = s.facts.config.data if s.facts.config is not None else None
    settings = (f"prefetch {data.prefetch}, {data.workers} worker{'s'[: data.workers - 1]}",) if data else ()
    values = {
        "node": s.node(worst), "prefetch": max(2 * data.prefetch, 4) if data else None,
        "workers": 2 * data.workers if data else None,
    }  # fmt: skip
    yield Found(f"{s.label(worst)} waits for data", (*lines, *settings), s.node(worst) if len(late) == 1 else "",
                worst if len(late) == 1 else None, what_if, values=values)  # fmt: skip


# ---------------------------------------------------------------- a slow rank


def slow_rank(s: Situation) -> Iterator[Verdict]:
    """A rank that the others wait for, and that another split or its own past shows to be slow."""
    if len(s.ranks) < 2:
        yield Clear("one rank alone waits for no other") if s.ranks else Unknown("enough steps of the present plan")
        return
    rank = max(s.ranks, key=lambda one: s.ranks[one].busy)
    gain, own = _gain(s), _own(s, rank)
    if gain is None and not own:
        best = _best(s, s.recent)
        text = f"the best split is {percent(max(best[0] / best[1] - 1, 0))} faster" if best else "no split to compare"
        yield Clear(text)
        return
    phase, line = _phase(s, rank)
    evidence = [f"{s.label(one)} waits {seconds(wait)} in each step" for one, wait in _waits(s).items() if one != rank]
    what_if = s.without({rank: own}, f"{s.label(rank)}'s {phase}") if own else None
    if gain is not None:
        evidence.append(f"the best split of the batch takes {seconds(gain[1])}, this one {seconds(gain[0])}")
        split_if = s.what_if((s.step_seconds or 0) - (gain[0] - gain[1]), "this split")
        what_if = what_if if what_if is not None and own else split_if
    title = f"{s.label(rank)} is slow in {phase}" if own else f"{s.label(rank)} has too large a share"
    yield Found(title, (*([line] if line else []), *evidence[:8]), s.node(rank), rank, what_if,
                values={"node": s.node(rank), "split": gain is not None or None})  # fmt: skip


def _waits(s: Situation) -> dict[int, float]:
    """Seconds that each rank waits for slower ones in the sum."""
    return {
        rank: median([parts[rank].phases.sync - shared_sync(parts) for parts in s.recent]) for rank in s.ranks
    }  # fmt: skip


def _own(s: Situation, rank: int) -> float:
    """Seconds by which the rank's passes are longer than they were, if that explains the others' wait; else 0."""
    growth = s.growth(rank)
    waits = [wait for one, wait in _waits(s).items() if one != rank]
    if growth is None or not waits:
        return 0.0
    before, wait = s.best[rank].busy, median(waits)
    longer = s.ranks[rank].busy - before
    is_slower = before > 0 and longer >= OWN_GROWTH * before
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
    """The same, if the best split is faster by enough in each third of the recent steps; else None."""
    third = len(s.recent) // 3
    found = _best(s, s.recent) if third >= LEAST_STEPS // 3 and third else None
    if found is None or found[0] < (1 + SPLIT_GAIN) * found[1]:
        return None
    thirds = [_best(s, s.recent[at * third : (at + 1) * third]) for at in range(3)]
    return found if all(one is not None and one[0] >= (1 + SPLIT_GAIN) * one[1] for one in thirds) else None


def _phase(s: Situation, rank: int) -> tuple[str, str]:
    """The phase that grew most, and a line about it; without earlier steps the one that is longest beside others'."""
    growth = s.growth(rank)
    if growth is not None and max(growth.values()) > 0:
        grown = sorted(growth.items(), key=lambda one: -one[1])
        phase = grown[0][0]
        whole = sum(value for value in growth.values() if value > 0)
        names = [name for name, value in grown if value > 0.25 * whole] or [phase]
        now, before = s.ranks[rank].phases[phase], s.best[rank].phases[phase]
        return " and ".join(names), f"{phase} takes {seconds(now)}, before {seconds(before)}"
    others = [its for one, its in s.ranks.items() if one != rank]
    own = s.ranks[rank]
    excess = {
        name: own.phases[name] - own.samples * median([its.phases[name] / max(its.samples, 1) for its in others])
        for name in m.BUSY_PHASES
    }
    phase = max(excess, key=lambda name: excess[name])
    usual = own.phases[phase] - excess[phase]
    return phase, f"{phase} takes {seconds(own.phases[phase])}; at the others' pace its share takes {seconds(usual)}"


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
    if _is_long(s, part) and (is_lossy or (worst is None and _varies(s) >= VARYING)):
        yield _slow_sum(s, f"{worst}'s link loses segments" if worst and is_lossy else "the link's speed varies", (
            *((f"{worst}: {lost[worst][0]:.0f} segments per second sent again",) if worst and is_lossy else ()),
            f"the middle half of the sums differ by a factor of {_varies(s):.1f}",
        ), worst if is_lossy else None)  # fmt: skip
    elif worst is None:
        yield Unknown("TCP segments sent again")
    else:
        yield Clear(f"{lost[worst][0]:.1f} segments per second sent again", worst)


def slow_link(s: Situation) -> Iterator[Verdict]:
    """A sum of gradients that takes much of each step, on a link that loses nothing."""
    part = _sync_part(s)
    if part is None:
        yield _alone(s)
    elif not _is_long(s, part):
        yield Clear(f"the sum of gradients takes {seconds(s.sync_seconds)}, {percent(part)} of a step")
    else:
        use = _link_use(s)
        said = [f"{percent(use)} of the calibrated bandwidth"] if use is not None else []
        before = s.best_sync_seconds
        said += [f"before: {seconds(before)}"] if before and before < 0.8 * s.sync_seconds else []
        is_slow = (use is not None and use < LINK_USE) or (before is not None and before < 0.5 * s.sync_seconds)
        title = "the link between the nodes is slow" if is_slow else "the sum of gradients takes long"
        yield _slow_sum(s, title, tuple(said), None)


def _alone(s: Situation) -> Verdict:
    return Clear("one rank alone sums with no other") if s.ranks else Unknown("enough steps of the present plan")


def _sync_part(s: Situation) -> float | None:
    """Part of a step that the sum itself takes; None for one rank, or without steps."""
    return s.sync_seconds / s.step_seconds if len(s.ranks) > 1 and s.step_seconds else None


def _is_long(s: Situation, part: float) -> bool:
    return part >= SYNC_PART and s.sync_seconds >= LEAST_SYNC_SECONDS


def _lost(s: Situation, node: str) -> tuple[float, bool] | None:
    """Segments per second sent again, and whether these are many; None: not counted."""
    again, sent = s.reading(node, "retransmits_per_second"), s.reading(node, "network_out_bytes_per_second")
    if again is None:
        return None
    part = again * SEGMENT_BYTES / sent if sent else None
    return again, again >= LEAST_LOST and (part is None or part >= LOST_SEGMENTS)


def _varies(s: Situation) -> float:
    """The third quartile of the sum's seconds by the first."""
    sums = [shared_sync(parts) for parts in s.recent]
    low, _, high = quantiles(sums, n=4) if len(sums) > 1 else (1.0, 1.0, 1.0)
    return high / low if low > 0 else 1.0


def _link_use(s: Situation) -> float | None:
    return max((use for rank in s.ranks if (use := s.metric(rank, "link_use")) is not None), default=None)


def _slow_sum(s: Situation, title: str, evidence: tuple[str, ...], node: str | None) -> Found:
    whole, took, use = s.step_seconds or 0.0, s.sync_seconds, _link_use(s)
    expected = [took * use] if use is not None and use < 1 else []
    expected += [s.best_sync_seconds] if s.best_sync_seconds is not None else []
    usual = min([one for one in expected if one < took], default=0.0)
    said = f"the sum takes {seconds(took)} of {seconds(whole)}, {percent(took / whole)}, waits for slower ranks aside"
    sizes = [size for rank in s.ranks if (size := s.metric(rank, "sum_bytes")) is not None]
    summed = (f"{megabytes(max(sizes))} of gradients are summed in each step",) if sizes else ()
    what_if = s.what_if(whole - (took - usual), "the link's delay" if usual else "the sum of gradients")
    return Found(title, (said, *evidence, *summed), node or "", what_if=what_if, values=_values(s, took))


def _values(s: Situation, took: float) -> dict[str, object]:
    """The global batch at which the sum takes a tenth of a step, and the rank that is faster alone, if one is."""
    total, whole = sum(its.samples for its in s.ranks.values()), s.step_seconds or 0.0
    passes = max(its.busy for its in s.ranks.values())
    wanted = round(total * 9 * took / passes) if passes > 0 else total
    alone = {rank: model.seconds(total, s.ranks[rank].micro or total) - took for rank, model in s.models.items()}
    best = min(alone, key=lambda rank: alone[rank], default=None)
    is_faster = best is not None and alone[best] < (1 - SPLIT_GAIN) * whole
    others = [s.node(rank) for rank in s.ranks if rank != best] if is_faster else []
    return {
        "batch": wanted if wanted > total else None, "other": others[0] if others else None,
        "alone": seconds(alone[best]) if is_faster and best is not None else None,
    }  # fmt: skip
