"""The tables of an export: their columns, and their rows a page at a time from a record."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainctl.protocol.messages import (
    EVALUATED,
    METRICS,
    Event,
    HostReading,
    Metric,
    RankStep,
    Sample,
    StepCommitted,
    is_by_name,
)
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation

What = Literal["steps", "ranks", "metrics", "evaluations", "samples", "events", "hosts"]
Row = tuple[Any, ...]
PAGE = 500


def _column(metric: Metric) -> str:
    """Return what a rank's metric is called in a table of ranks."""
    return metric.name.removeprefix("rank_")


RATES = ("tokens_per_second", "samples_per_second")
"""Rates of a step, by its duration."""
COLUMNS: dict[str, dict[str, type]] = {
    "steps": {
        "step": int,
        "generation": str,
        "committed_at": float,
        "loss": float,
        "weight": float,
        "samples": int,
        "learning_rate": float,
        "grad_norm": float,
        "cursor": int,
        "global_batch": int,
        "plan_version": int,
        "step_seconds": float,
        "tokens": int,
        "tokens_total": float,
        "weight_total": float,
        "seconds_total": float,
        "skipped": str,
        **{name: float for name, metric in METRICS.items() if metric.scope == "run" and is_by_name(name)},
        **dict.fromkeys(RATES, float),
    },
    "ranks": {
        "step": int,
        "generation": str,
        "rank": int,
        "node": str,
        "tokens": float,
        "weight": float,
        "samples": int,
        "micro_batch": int,
        "replays": int,
        **{_column(metric): float for metric in METRICS.values() if metric.scope == "rank"},
    },
    "metrics": {"step": int, "rank": int, "metric": str, "value": float},
    "evaluations": {
        "step": int,
        "at": float,
        "loss": float,
        "weight": float,
        "seconds": float,
        **{name: float for name in METRICS if name in EVALUATED},
    },
    "samples": {
        "step": int,
        "at": float,
        "number": int,
        "prompt": str,
        "answer": str,
        "tokens": int,
        "ended": bool,
        "seconds": float,
        "loss": float,
        "eval_loss": float,
        "max_tokens": int,
        "temperature": float,
        "top_p": float,
        "seed": int,
        "node": str,
        "by": str,
    },
    "events": {
        "id": int,
        "at": float,
        "kind": str,
        "severity": str,
        "by": str,
        "text": str,
        "step": int,
        "generation": str,
        "command": str,
        "verb": str,
        "before": str,
        "after": str,
        "outcome": str,
        "undoes": str,
        "data": dict,
    },
    "hosts": {
        "read_at": float,
        "node": str,
        "cpu_percent": float,
        "memory_used_bytes": int,
        "memory_total_bytes": int,
        "disk_free_bytes": int,
        "disk_total_bytes": int,
        "load_1min": float,
        "temperature_celsius": float,
        "energy_joules": float,
        "energy_gap_seconds": float,
        "gpu": int,
        "gpu_name": str,
        "gpu_utilization_percent": float,
        "gpu_clock_mhz": float,
        "gpu_power_watts": float,
        "gpu_temperature_celsius": float,
        "gpu_memory_used_bytes": int,
        "gpu_memory_total_bytes": int,
        **{name: float for name, metric in METRICS.items() if metric.scope == "host" and not metric.field},
    },
}
"""The columns of each table: names with their units, in order, and types. What isn't known is empty. Times are Unix
seconds. A dict is an object in JSON lines, and the text of one in other formats."""

_RUN_VALUES = tuple(name for name in COLUMNS["steps"] if name in METRICS and is_by_name(name))
_OF_EVALUATION = tuple(name for name in METRICS if name in EVALUATED)
_OF_MACHINE = tuple(COLUMNS["hosts"])[: tuple(COLUMNS["hosts"]).index("gpu")]
_OF_MACHINE_BY_NAME = tuple(name for name, metric in METRICS.items() if metric.scope == "host" and not metric.field)
_RANK_METRICS = {metric.name: _column(metric) for metric in METRICS.values() if metric.scope == "rank"}
"""The metrics of a rank's part in an agent's history, and the column that each goes to."""


def of_record(directory: Path, what: What) -> Iterator[list[Row]]:
    """Pages of rows, oldest first. Raises InvalidInputError if the record can't be read."""
    with RecordReader(directory) as reader:
        if what == "steps":
            yield from _paged(lambda after: reader.steps(after, PAGE), lambda step: step.step, _step)
        elif what == "events":
            yield from _paged(lambda after: reader.events(after, PAGE), lambda event: event.id, _event)
        elif what == "samples":
            after, more = 0, True
            while more:
                answers, after, more = reader.samples(after)
                yield [_sample(answer) for answer in answers]
        elif what == "evaluations":
            yield [_evaluation(made) for made in reader.evaluations()]
        elif what == "metrics":
            pages = _paged(lambda after: reader.steps(after, PAGE), lambda step: step.step, lambda step: (step,))
            for page in filter(None, pages):
                steps = [step for (step,) in page]
                parts = reader.parts_between(steps[0].step, steps[-1].step)
                yield _ordered(row for part in (*steps, *parts) for row in _own(part))
        elif what == "hosts":
            readings, after = reader.host_readings(0, PAGE)
            while after:
                yield [row for reading in readings for row in _host(reading)]
                readings, after = reader.host_readings(after, PAGE)
        else:
            pages = _paged(lambda after: reader.steps(after, PAGE), lambda step: step.step, lambda step: (step.step,))
            for steps in filter(None, pages):
                yield [_rank(part) for part in reader.parts_between(steps[0][0], steps[-1][0])]


def _paged(
    ask: Callable[[int], tuple[Sequence[Any], bool]], place: Callable[[Any], int], row: Callable[[Any], Row]
) -> Iterator[list[Row]]:
    after, more = 0, True
    while more:
        page, more = ask(after)
        yield [row(item) for item in page]
        after = place(page[-1]) if page else after


def _ordered(rows: Iterable[Row]) -> list[Row]:
    """Return the rows by step and rank, the run's first, and name."""
    return sorted(rows, key=lambda row: (row[0], -1 if row[1] is None else row[1], row[2]))


def _step(step: StepCommitted) -> Row:
    counted = {"samples": step.samples or None, "tokens_total": step.tokens_total or None}
    rates = {name: METRICS[name].of(step) for name in RATES}
    named = {"generation": str(step.generation), **counted, **dict.fromkeys(_RUN_VALUES), **step.values, **rates}
    return tuple(named[name] if name in named else getattr(step, name) for name in COLUMNS["steps"])


def _own(part: StepCommitted | RankStep) -> list[Row]:
    """Return the metrics that the run brought; those of the run itself have no rank."""
    rank = part.rank if isinstance(part, RankStep) else None
    return [(part.step, rank, name, value) for name, value in part.values.items() if name not in METRICS]


def _rank(part: RankStep) -> Row:
    return (
        part.step,
        str(part.generation),
        part.rank,
        part.node,
        part.tokens or None,
        part.weight,
        part.samples or None,
        part.micro_batch,
        part.replays,
        *(METRICS[name].of(part) for name in _RANK_METRICS),
    )


def _event(event: Event) -> Row:
    generation = str(event.generation) if event.generation is not None else None
    special = {"generation": generation, "data": msgspec.to_builtins(event.data)}
    return tuple(special[name] if name in special else getattr(event, name) for name in COLUMNS["events"])


def _evaluation(made: Evaluation) -> Row:
    return (
        made.step,
        made.at,
        made.loss,
        made.weight or None,
        made.seconds or None,
        *map(made.values.get, _OF_EVALUATION),
    )


def _sample(sample: Sample) -> Row:
    return tuple(getattr(sample, name) for name in COLUMNS["samples"])


def _host(reading: HostReading) -> list[Row]:
    """Return a row a device, and one for a machine without any."""
    own = tuple(getattr(reading, name) for name in _OF_MACHINE)
    named = tuple(reading.values.get(name) for name in _OF_MACHINE_BY_NAME)
    if not reading.gpus:
        return [(*own, *(None,) * 8, *named)]
    return [
        (
            *own,
            number,
            gpu.name,
            gpu.utilization_percent,
            gpu.clock_mhz,
            gpu.power_watts,
            gpu.temperature_celsius,
            gpu.memory_used_bytes,
            gpu.memory_total_bytes,
            *named,
        )
        for number, gpu in enumerate(reading.gpus)
    ]
