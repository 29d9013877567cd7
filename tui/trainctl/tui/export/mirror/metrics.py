"""What is mirrored of a run, by the names that it has in every target: pure."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainctl.protocol import messages as m

EVALUATION = "eval/loss"
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")

RUN_METRICS = (
    "loss", "grad_norm", "learning_rate", "step_seconds", "tokens_per_second", "tokens_total", "global_batch",
)  # fmt: skip
"""Of `train/`, a value a step, beside the number of the generation that committed it."""


class Part(NamedTuple):
    """One rank's part of a step; what isn't known is absent."""

    step: int
    rank: int
    values: dict[str, float]  # by name, below that of the node


class Point(NamedTuple):
    """One committed step."""

    step: int
    generation: m.Generation
    at: float  # when it was committed, Unix seconds
    values: dict[str, float]  # by full name


class Text(NamedTuple):
    """Events of one step."""

    step: int
    at: float  # of the last one, Unix seconds
    text: str  # a line each


def of_step(step: m.StepCommitted, parts: Sequence[Part], prefixes: Mapping[int, str]) -> Point:
    """A step with its ranks' parts, each under its prefix; a part without one is left out."""
    own: dict[str, float | None] = {name: getattr(step, name) for name in RUN_METRICS}
    own["generation"] = step.generation.n
    values = {f"train/{name}": float(value) for name, value in own.items() if value is not None}
    for part in parts:
        if part.rank in prefixes:
            values |= {f"{prefixes[part.rank]}/{name}": value for name, value in part.values.items()}
    return Point(step.step, step.generation, step.committed_at, values)


def of_part(part: m.RankStep) -> Part:
    found: dict[str, float | None] = {
        "tokens_per_second": part.own_tokens_per_second, "step_seconds": part.step_seconds, "samples": part.samples,
        **{f"{name}_seconds": getattr(part.phases, name) for name in m.PHASES}, "memory_bytes": part.memory_bytes,
        "memory_peak_bytes": part.memory_peak_bytes,
    }  # fmt: skip
    return Part(part.step, part.rank, {name: float(value) for name, value in found.items() if value is not None})


def prefixes(nodes: Mapping[int, str]) -> dict[int, str]:
    """Of each rank's metrics, by its node: `nodes/NAME`, and with the rank's number where a node has several."""
    several = {node for node in nodes.values() if list(nodes.values()).count(node) > 1}
    safe = {rank: _UNSAFE.sub("_", node) for rank, node in nodes.items()}
    return {
        rank: f"nodes/{safe[rank]}/rank-{rank}" if node in several else f"nodes/{safe[rank]}"
        for rank, node in nodes.items()
    }


def line(event: m.Event) -> str:
    """An event in one line."""
    at = f"step {event.step}: " if event.step is not None else ""
    return f"{at}[{event.kind}] {event.text} ({event.by})"


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Settings by dotted names, for a target that has no tables."""
    found: dict[str, bool | int | float | str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            found[f"{prefix}{name}"] = value
        elif value is not None:
            found[f"{prefix}{name}"] = str(value)
    return found
