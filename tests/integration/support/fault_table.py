"""The mixes of faults that runs must survive, and how they are reported."""

from collections import Counter
from collections.abc import Iterable

from tests.cluster.run_files import NODES
from tests.tiers import schedule_seed

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import GenerationFormed, SharesChanged

SEED = schedule_seed(4)
MLX = {"backend": "mlx"}
MIXES = {"torch": {}, "mlx": dict.fromkeys(NODES, MLX), "mixed": {"gamma": MLX}}
ALL = [(engine, mix) for engine in ("gloo", "ring") for mix in MIXES]
TOLERANCE = {"torch": 1e-5, "mlx": 1e-5, "mixed": 5e-5}


def was_lost(events: Iterable[m.Event]) -> set[str]:
    """The nodes that some event says are lost; and those that were given the state of others, for these may not have
    had the sum of the step before, which they had a part in."""
    said = [event.data for event in events]
    lost = {data.lost for data in said if isinstance(data, SharesChanged) and data.lost}
    return lost | {node for data in said if isinstance(data, GenerationFormed) for node in data.behind}


def table(done: Counter[tuple[str, str, str]]) -> str:
    """The counts by victim, signal and phase, one victim and signal a line."""
    lines = []
    for victim, number in sorted({key[:2] for key in done}):
        phases = {key[2]: count for key, count in sorted(done.items()) if key[:2] == (victim, number)}
        counts = ", ".join(f"{phase} {count}" for phase, count in phases.items())
        lines.append(f"{number} {victim}: {sum(phases.values())} ({counts})")
    return "\n".join(lines)
