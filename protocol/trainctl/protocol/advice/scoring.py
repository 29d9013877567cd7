"""How fast all known nodes score rows together, each at its own rate. Pure.

A node works on one slice of rows after another (node_agent/work/dealer.py). Rows are as long as the run's samples.
"""

from typing import Final

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts, Source
from trainctl.protocol.advice.node_speed import NodeSpeed
from trainctl.protocol.advice.plans import FORWARD_PART, speeds_of
from trainctl.protocol.messages.requests import SLICE_ROWS

SLICE_SECONDS: Final = 2.0
"""Time that a slice takes, as it is dealt out."""
ROW_SECONDS: Final = 1e-4
"""What a row of some 100 tokens takes beside its forward pass, on one core: 65 us of the worker, to read and tokenize
it and to sum and encode its result, and 35 us of the agents. Measured with bytes as tokens."""
BETWEEN_SECONDS: Final = 0.1
"""Time between two slices of a node: its results travel to the lead, and the next rows to it."""


class ScoringRate(msgspec.Struct, frozen=True):
    """Rows per second while all nodes work."""

    nodes: dict[str, float]  # by node
    rows_per_second: float
    source: Source


def scoring_rate(facts: AdviceFacts) -> ScoringRate | None:
    """None if no node is known."""
    speeds = speeds_of(facts, [node.name for node in facts.nodes])
    if not speeds:
        return None
    rates = {name: _rate(speed) for name, speed in speeds.items()}
    measured = all(speed.forward is not None and speed.source == "measured" for speed in speeds.values())
    return ScoringRate(rates, sum(rates.values()), "measured" if measured else "estimated")


def _rate(speed: NodeSpeed) -> float:
    trained = speed.model.samples_per_second(speed.micro)
    rate = speed.forward.samples_per_second(speed.micro) if speed.forward is not None else trained / FORWARD_PART
    rate = 1 / (1 / rate + ROW_SECONDS)
    rows = max(1.0, min(SLICE_ROWS["log-probabilities"], SLICE_SECONDS * rate))
    return rows / (rows / rate + BETWEEN_SECONDS)
