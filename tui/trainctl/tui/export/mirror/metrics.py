"""The metrics of a run that are mirrored, by the names that they have in every target: pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from trainctl.protocol import messages
from trainctl.protocol.batch.cost import HOUR_SECONDS, run_rates

EVALUATION_LOSS, EVALUATION_PERPLEXITY = "eval/loss", "eval/perplexity"
EVALUATED = ("eval_loss", "perplexity", *(name for name in messages.METRICS if name in messages.EVALUATED))
"""Metrics that a step has no value of, but an evaluation."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")

RUN_METRICS = tuple(
    metric
    for metric in messages.METRICS.values()
    if metric.scope == "run" and metric.drawn and metric.name not in EVALUATED
)
"""The metrics of `train/` that are a value a step, beside what the plan was and the number of the generation that
committed it."""
RANK_METRICS = {
    metric.name: metric.name.removeprefix("rank_").removeprefix("own_")
    for metric in messages.METRICS.values()
    if metric.scope != "run"
}
"""The metrics of a rank's part and its machine by their names in a mirror, below that of the node."""

RATES = {
    "average_per_second": "Tokens per second since the run began; pairs per second if the loss is divided by pairs.",
    "seconds_per_epoch": "Seconds per epoch at this step's rate.",
    "epochs_left": "Epochs until the run's last step.",
}
"""The metrics of `train/` that a step has of the whole run."""


@dataclass(frozen=True)
class Part:
    """One rank's part of a step; what isn't known is absent."""

    step: int
    rank: int
    values: dict[str, float]  # by name, below that of the node


@dataclass(frozen=True)
class Point:
    """One committed step."""

    step: int
    generation: messages.Generation
    at: float  # when it was committed, Unix seconds
    values: dict[str, float]  # by full name


@dataclass(frozen=True)
class Text:
    """Events of one step."""

    step: int
    at: float  # of the last one, Unix seconds
    text: str  # a line each
    kind: Literal["events", "samples"] = "events"


def of_step(
    step: messages.StepCommitted, parts: Sequence[Part], prefixes: Mapping[int, str], view: messages.RunView | None
) -> Point:
    """Return a step with its ranks' parts, each under its prefix; a part without one is left out. `view`: of its
    run."""
    own: dict[str, float | None] = {**step.values, **{metric.name: metric.of(step) for metric in RUN_METRICS}}
    own |= {"tokens_total": step.tokens_total, "global_batch": step.global_batch, "generation": step.generation.n}
    if view is not None:
        rates = run_rates(view, step)
        own |= {name: getattr(rates, name) for name in RATES}
        own["cost_to_end"] = _to_end(step, rates)
    trained = view.trained(step.cursor) if view is not None else step.cursor
    if (spent := step.values.get("cost")) is not None and trained:
        own["cost_per_1000_samples"] = 1000 * spent / trained
    values = {f"train/{name}": float(value) for name, value in own.items() if value is not None}
    for part in parts:
        if part.rank in prefixes:
            values |= {f"{prefixes[part.rank]}/{name}": value for name, value in part.values.items()}
    return Point(step.step, step.generation, step.committed_at, values)


def _to_end(step: messages.StepCommitted, rates: messages.RunRates) -> float | None:
    """Return what the steps after this one cost, also of a run that has ended since."""
    per_hour = step.values.get("cost_per_hour")
    if per_hour is None:
        return None
    if (left := step.values.get("time_left_seconds")) is not None:
        return per_hour * left / HOUR_SECONDS
    if rates.epochs_left is None or rates.seconds_per_epoch is None:
        return None
    return per_hour * rates.epochs_left * rates.seconds_per_epoch / HOUR_SECONDS


def of_evaluation(
    loss: float, view: messages.RunView | None, values: Mapping[str, float] = MappingProxyType({})
) -> dict[str, float]:
    """Return a held-out loss, its perplexity where that is defined, and the metrics beside it, by full name. `view`: of
    the run."""
    found = {EVALUATION_LOSS: loss, **values}
    perplexity = messages.perplexity(loss, view.loss_unit) if view is not None else messages.perplexity(loss)
    return found if perplexity is None else {**found, EVALUATION_PERPLEXITY: perplexity}


def of_part(part: messages.RankStep) -> Part:
    own = {name: value for name, value in part.values.items() if name not in messages.METRICS}
    known = {said: messages.METRICS[name].of(part) for name, said in RANK_METRICS.items()}
    found: dict[str, float | None] = {"samples": part.samples, **known, **own}
    return Part(part.step, part.rank, {name: float(value) for name, value in found.items() if value is not None})


def prefixes(nodes: Mapping[int, str]) -> dict[int, str]:
    """Return the prefix of each rank's metrics, by its node: `nodes/NAME`, and with the rank's number where a node has
    several."""
    several = {node for node in nodes.values() if list(nodes.values()).count(node) > 1}
    safe = {rank: _UNSAFE.sub("_", node) for rank, node in nodes.items()}
    return {
        rank: f"nodes/{safe[rank]}/rank-{rank}" if node in several else f"nodes/{safe[rank]}"
        for rank, node in nodes.items()
    }


def line(event: messages.Event) -> str:
    """Return an event in one line."""
    at = f"step {event.step}: " if event.step is not None else ""
    return f"{at}[{event.kind}] {event.text} ({event.by})"


def answer_line(sample: messages.Sample) -> str:
    """Return a prompt and its answer in one line."""
    prompt, answer = (" ".join(text.split()) for text in (sample.prompt, sample.answer))
    return f"{prompt} → {answer}"


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
