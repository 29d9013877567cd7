"""Causes in how ranks work together: data that come late, and the sum of gradients over the network."""

from collections.abc import Iterator
from statistics import quantiles

from trainctl.protocol.analysis.diagnosis.pace import shared_sync
from trainctl.protocol.analysis.diagnosis.rule import Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.rules.machine import CPU_PRESSURE, cpu_pressure, more_prefetch
from trainctl.protocol.analysis.diagnosis.situation import Situation, megabytes, percent, seconds
from trainctl.protocol.batch.against_profile import sent_bytes
from trainctl.protocol.config.alert_rules import MIN_DATA_SECONDS

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
        yield Unknown("enough steps of the present plan")
        return
    late = {rank: its.data_mean for rank, its in s.ranks.items() if its.data_mean > s.data_part * whole}
    what_if = s.without(late, "waits for data") if late else None
    most = max(its.data_mean for its in s.ranks.values())
    if not late or what_if is None or max(late.values()) < MIN_DATA_SECONDS or what_if.part < LEAST_GAIN:
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
    yield Found(f"{s.label(worst)} waits for data", (*lines, *settings), s.node(worst) if len(late) == 1 else "",
                worst if len(late) == 1 else None, what_if, values=values)  # fmt: skip


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
        waits = cpu_pressure(s)
        if not is_slow and not _crosses(s) and not _is_explained(s):
            yield Clear(f"{percent(part)} of a step, more than its bytes explain: it waits for processors")
        elif waits is not None and waits >= CPU_PRESSURE and not is_slow:
            yield Clear(f"{percent(part)} of a step, at a CPU pressure of {waits:.0f} %: it waits for processors")
        else:
            yield _slow_sum(s, title, (*said, *_varied(s)), None)


def _alone(s: Situation) -> Verdict:
    return Clear("one rank alone sums with no other") if s.ranks else Unknown("enough steps of the present plan")


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
    """The third quartile of the sum's seconds by the first."""
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
