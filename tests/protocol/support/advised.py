"""Nodes and runs for tests of advice: devices of known rates, and a simulated ring."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from tests.protocol.support.profiles import profile_of

from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts, PlannedRun
from trainctl.protocol.calibration.profile import LinkRate, Pass

BILLION = 10**9
GRADIENTS = 4 * BILLION
"""Bytes of the float32 gradients of a billion parameters."""


def node_of(name: str, rate: float, **fields: Any) -> NodeFacts:
    """A node that trains so many samples per second whatever its micro-batch."""
    passes = tuple(Pass(micro, micro / rate, 1000 * (10 + micro)) for micro in (1, 2, 4, 8, 16))
    profile = profile_of(passes=passes, memory_cap_bytes=64 * BILLION)
    return NodeFacts(**{"name": name, "profiles": (profile,), "micro": 8, "machine": name, **fields})


def run_of(**fields: Any) -> PlannedRun:
    """A full fine-tune of a billion parameters."""
    defaults = {
        "file": "run.toml", "steps": 1000, "global_batch": 48, "tokens_per_sample": 512.0, "gradient_bytes": GRADIENTS,
        "parameters": BILLION, "trained": BILLION, "lead": "studio",
    }  # fmt: skip
    return PlannedRun(**{**defaults, **fields})


def link_to(bytes_per_second: float, latency: float | None = None) -> LinkRate:
    return LinkRate("studio", bytes_per_second, bytes_per_second, latency)


def facts_of(
    rates: Mapping[str, float],
    bytes_per_second: float,
    nodes: Mapping[str, Mapping[str, Any]] | None = None,
    **run: Any,
) -> AdviceFacts:
    """Nodes of such rates, all linked so fast to the first one."""
    first, *others = rates
    made = tuple(node_of(name, rate, **(nodes or {}).get(name, {})) for name, rate in rates.items())
    links = {name: link_to(bytes_per_second) for name in others}
    return AdviceFacts(run=run_of(**{"lead": first, **run}), nodes=made, links=links)


def ring_seconds(sum_bytes: float, bytes_per_second: float, ready: Sequence[float], pieces: int = 4) -> float:
    """When the last rank of a simulated ring has the sum, each rank being `ready` at its own time.

    Event by event: each rank sends a part of the buffer to the next one in `pieces` messages, and may send the part
    that it has received and added only when the whole of it is there. First all parts are summed, then passed round.
    """
    ranks = len(ready)
    rounds, part = 2 * (ranks - 1), sum_bytes / ranks
    free = [*ready]  # when each rank's outgoing link is free
    arrived = [0] * ranks
    queue = [(at, rank, 0) for rank, at in enumerate(ready)]
    heapq.heapify(queue)
    end = 0.0
    while queue:
        at, rank, number = heapq.heappop(queue)
        start = max(at, free[rank])
        for _ in range(pieces):
            start += part / pieces / bytes_per_second
        free[rank] = start
        receiver = (rank + 1) % ranks
        arrived[receiver] += 1
        end = max(end, start)
        if number + 1 < rounds:
            heapq.heappush(queue, (max(start, ready[receiver]), receiver, number + 1))
    assert arrived == [rounds] * ranks
    return end
