"""The tables of an export: their columns, and their rows a page at a time from a record or through an agent."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    EVALUATED,
    METRICS,
    Event,
    EventsRequest,
    History,
    HistoryRequest,
    HostReading,
    HostsRequest,
    Metric,
    RankStep,
    Sample,
    SamplesRequest,
    SnapshotRequest,
    StepCommitted,
    StepsRequest,
    is_by_name,
)
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation
from trainctl.protocol.record.schema import ROLLUP_LEVELS

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client

MAX_COLUMNS: Final = 2000
METRICS_AT_ONCE: Final = 16
"""The most columns and metrics that a history request may name."""
VALUES: Final = 20_000
"""Most in one reply, some 40 bytes each, so that it stays below the frame limit."""


@dataclass(frozen=True)
class Question:
    """A history request in whose reply each of the steps, ascending, has a bucket of its own."""

    names: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def columns(self) -> int:
        return min(self.steps[-1] - self.steps[0] + 1, MAX_COLUMNS)


Value = tuple[int, int | None, str, float]
"""The step, the rank (None: the run's own), the metric and the value."""


def questions(names: Sequence[str], steps: Sequence[int], ranks: int, values_from: int = 0) -> Iterator[Question]:
    """Yield what to ask for `names` of so many ranks at steps that exist, ascending, however far apart their numbers
    are. From `values_from` on metrics by name are kept singly."""
    for start in range(0, len(names), METRICS_AT_ONCE):
        some = tuple(names[start : start + METRICS_AT_ONCE])
        most = max(1, VALUES // (len(some) * (ranks + 1)))
        for part in (
            tuple(step for step in steps if step < values_from),
            tuple(step for step in steps if step >= values_from),
        ):
            for told in _parts(part, most):
                yield Question(some, told)


def values(history: History, steps: Sequence[int]) -> Iterator[Value]:
    """Yield what the reply to a question says of its steps. Metrics by name that are no longer kept singly are left
    out."""
    for series in history.series:
        least = history.values_from if is_by_name(series.metric) else 0
        own = {step // series.bucket_steps * series.bucket_steps: step for step in steps if step >= least}
        for start, value in zip(series.steps, series.last, strict=True):
            if start in own:
                yield own[start], series.rank, series.metric, value


def _parts(steps: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    if len(steps) > most or not _are_told_apart(steps):
        half = len(steps) // 2
        yield from _parts(steps[:half], most)
        yield from _parts(steps[half:], most)
    elif steps:
        yield steps


def _are_told_apart(steps: Sequence[int]) -> bool:
    """Return whether no bucket has two of them, where an agent makes as many as it may: at most twice as large as they
    need be to be so few, and as large as the finest rollups."""
    if len(steps) < 2 or steps[-1] - steps[0] < MAX_COLUMNS:
        return True
    largest = max(ROLLUP_LEVELS[0], 2 * -(-(steps[-1] - steps[0] + 1) // (MAX_COLUMNS - 1)))
    return min(later - earlier for earlier, later in pairwise(steps)) >= largest


What = Literal["steps", "ranks", "metrics", "evaluations", "samples", "events", "hosts"]
Row = tuple[Any, ...]
PAGE, HOSTS_PAGE = 500, 100


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


async def of_agent(client: "Client", run: str | None, what: What) -> AsyncIterator[list[Row]]:
    """Yield the same through an agent; of ranks' parts and metrics what its history has, which leaves out values that
    are not finite, and of evaluations neither time nor weight. Raises what the client does."""
    if what == "metrics":
        async for rows in _own_of(client, run):
            yield rows
        return
    after, more = 0, True
    while more:
        if what == "hosts":
            hosts = await client.ask(HostsRequest, run, after, HOSTS_PAGE)
            yield [row for reading in hosts.readings for row in _host(reading)]
            more, after = hosts.more, hosts.last_row
            continue
        if what == "samples":
            found = await client.ask(SamplesRequest, run, after)
            yield [_sample(sample) for sample in found.samples]
            more, after = found.more, found.last_row
            continue
        if what == "events":
            events = await client.ask(EventsRequest, run, after, PAGE)
            yield [_event(event) for event in events.events]
            more, after = events.more, events.events[-1].id if events.events else after
            continue
        steps = await client.ask(StepsRequest, run, after, PAGE)
        more = steps.more and bool(steps.steps)
        if what == "steps":
            yield [_step(step) for step in steps.steps]
        elif what == "evaluations" and steps.run is not None:
            yield await _evaluations_of(client, steps.run, [*([] if after else [0]), *(s.step for s in steps.steps)])
        elif steps.steps and steps.run is not None:
            yield await _parts_of(client, steps.run, [step.step for step in steps.steps])
        after = steps.steps[-1].step if steps.steps else after


async def _own_of(client: "Client", run: str | None) -> AsyncIterator[list[Row]]:
    """Yield the metrics that the run brought, as far back as single values are kept."""
    view = (await client.ask(SnapshotRequest, 0, run)).run
    if view is None:
        raise InvalidInputError("run", "the agent has no run yet: start one with trainctl run RUN.toml")
    history = await client.ask(HistoryRequest, view.run, ())
    after, more = max(0, history.values_from - 1), True
    while more:
        steps = await client.ask(StepsRequest, view.run, after, PAGE)
        yield _ordered(await _values_of(client, view.run, history.own_metrics, [step.step for step in steps.steps]))
        more, after = steps.more and bool(steps.steps), steps.steps[-1].step if steps.steps else after


async def _values_of(client: "Client", run: str, names: Sequence[str], steps: Sequence[int]) -> list[Value]:
    """Return the metrics' values at steps that exist, ascending."""
    view = (await client.ask(SnapshotRequest, 0, run)).run
    kept_from = (await client.ask(HistoryRequest, run, ())).values_from
    found: list[Value] = []
    for question in questions(names, steps, len(view.ranks) if view is not None else 1, kept_from):
        asked = question.steps
        history = await client.ask(HistoryRequest, run, question.names, asked[0], asked[-1], question.columns)
        found += values(history, asked)
    return found


async def _evaluations_of(client: "Client", run: str, steps: Sequence[int]) -> list[Row]:
    """Their losses and metrics: an agent's history has no more."""
    found: dict[int, dict[str, float]] = {}
    for step, _, name, value in await _values_of(client, run, ("eval_loss", *_OF_EVALUATION), steps):
        found.setdefault(step, {})[name] = value
    return [
        (step, None, values.get("eval_loss"), None, None, *map(values.get, _OF_EVALUATION))
        for step, values in sorted(found.items())
    ]


async def _parts_of(client: "Client", run: str, steps: Sequence[int]) -> list[Row]:
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for step, rank, name, value in await _values_of(client, run, tuple(_RANK_METRICS), steps):
        row = found.setdefault((step, rank or 0), {"step": step, "rank": rank})
        row[_RANK_METRICS[name]] = value
    return [tuple(found[key].get(name) for name in COLUMNS["ranks"]) for key in sorted(found)]


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
        part.tokens,
        part.weight,
        part.samples,
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
