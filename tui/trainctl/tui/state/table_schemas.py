"""The tables that `/` searches: the fields of the fleet, of events and of runs, which `o` sorts, and of logs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

from trainctl.protocol.messages import (
    METRICS,
    CommandState,
    Event,
    GpuReading,
    HostReading,
    Metric,
    MetricStyle,
    RankState,
    RankStep,
    RunKind,
    RunState,
    RunSummary,
    Severity,
    is_by_name,
    metric_of,
)
from trainctl.protocol.record import log_format
from trainctl.tui.state import run_events
from trainctl.tui.state.merged_log import LogEntry
from trainctl.tui.state.rank_rows import Row
from trainctl.tui.state.table_fields import FilterField, Kinds, Table

COUNT, BYTES, PERCENT, SECONDS, CELSIUS, WATTS, HERTZ = Kinds
_RANK_STATES = (*get_args(RankState), "slow", "stale", "out")
_LINK_STATES = ("up", "silent")


@dataclass(frozen=True)
class EventRow:
    """An event with what is known of it beside the record: its age in seconds, the nodes that its text names, and the
    relative change of the fleet's rate that it made (None: not measured)."""

    event: Event
    age_seconds: float
    nodes: tuple[str, ...]
    effect: float | None = None
    undone: bool = False


@dataclass(frozen=True)
class RunRow:
    """A run with how long ago it began and how long it lasted, in seconds (None: not known). `depth`: below how many
    runs it stands in the tree of branches."""

    run: RunSummary
    age_seconds: float
    duration_seconds: float | None
    depth: int = 0


def _percent_of(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def _states(row: Row) -> tuple[str, ...]:
    more = (("slow", bool(row.slow_phase)), ("stale", row.old), ("out", row.out))
    return (row.view.state, *(name for name, holds in more if holds))


def _of_step(get: Callable[[RankStep], float | None]) -> Callable[[Row], float | None]:
    return lambda row: get(row.step) if row.step is not None else None


def _of_host(get: Callable[[HostReading], float | None]) -> Callable[[Row], float | None]:
    return lambda row: get(row.host) if row.host is not None else None


def _of_gpu(get: Callable[[GpuReading], float | None]) -> Callable[[Row], float | None]:
    return lambda row: get(row.gpu) if row.gpu is not None else None


def _celsius(row: Row) -> float | None:
    if row.gpu is not None:
        return row.gpu.temperature_celsius
    return row.host.temperature_celsius if row.host is not None else None


_KINDS: dict[MetricStyle, Kinds] = {
    "seconds": SECONDS,
    "bytes": BYTES,
    "percent": PERCENT,
    "watts": WATTS,
    "celsius": CELSIUS,
    "megabytes": BYTES,
}
_SHORTER = frozenset(
    {
        "cpu_percent",
        "disk_free_bytes",
        "temperature_celsius",
        "gpu_utilization_percent",
        "gpu_clock_mhz",
        "gpu_power_watts",
        "gpu_temperature_celsius",
    }
)
"""Metrics of a machine that have a field by a shorter name."""


def _metric_field(metric: Metric) -> FilterField[Row]:
    kind = _KINDS.get(metric.style, COUNT)
    return FilterField(metric.name, metric.help.rstrip("."), lambda row: row.value_of(metric), kind, is_metric=True)


_OF_METRICS = tuple(
    _metric_field(metric)
    for metric in METRICS.values()
    if metric.scope != "run" and is_by_name(metric.name) and metric.name not in _SHORTER
)
"""Fields of the metrics that have none by a shorter name."""


@functools.lru_cache(8)
def fleet(own: tuple[str, ...]) -> Table[Row]:
    """Return the fleet's table with the metrics that the run brings, by name, as fields."""
    brought = (metric_of(name) for name in own)
    more = [FilterField(one.name, one.help, _of_step(one.of), COUNT) for one in brought]
    return replace(FLEET, fields=(*FLEET.fields, *more))


FLEET: Table[Row] = Table(
    "fleet",
    (
        FilterField("node", "machine name", lambda row: row.view.node),
        FilterField(
            "state",
            "slow: other ranks wait for it; stale: its values are old; out: not in the group",
            _states,
            states=_RANK_STATES,
        ),
        FilterField("rank", "rank number in the run", lambda row: row.view.rank, COUNT),
        FilterField("device", "such as cpu or cuda:0", lambda row: row.view.device),
        FilterField("backend", "torch or mlx", lambda row: row.view.backend),
        FilterField("share", "samples in the global batch", lambda row: row.view.share, COUNT),
        FilterField(
            "share%", "share as a percentage", lambda row: _percent_of(row.view.share, row.global_batch), PERCENT
        ),
        FilterField("micro", "micro-batch in samples", lambda row: row.view.micro_batch, COUNT),
        FilterField("tok/s", "own rate, tokens per second", lambda row: row.own_rate, COUNT, aliases=("own",)),
        FilterField("step", "duration of the last step", _of_step(lambda step: step.step_seconds), SECONDS),
        FilterField(
            "busy",
            "time of data, forward and backward in the last step",
            _of_step(lambda step: step.phases.timed_busy),
            SECONDS,
        ),
        FilterField("wait", "wait for slower ranks and for the plan", lambda row: row.wait, SECONDS),
        FilterField("phase", "phase that makes the rank slow", lambda row: row.slow_phase or None),
        FilterField(
            "mem",
            "peak device memory in the last step",
            _of_step(lambda step: step.peak_or_held_bytes),
            BYTES,
            aliases=("peak",),
        ),
        FilterField(
            "mem%",
            "peak memory as a percentage of the memory cap",
            _of_step(lambda step: _percent_of(step.peak_or_held_bytes, step.memory_cap_bytes)),
            PERCENT,
        ),
        FilterField("held", "device memory held after the last step", _of_step(lambda step: step.memory_bytes), BYTES),
        FilterField("gpu", "GPU use", _of_gpu(lambda gpu: gpu.utilization_percent), PERCENT),
        FilterField("cpu", "the machine's CPU use", _of_host(lambda host: host.cpu_percent), PERCENT),
        FilterField(
            "clock",
            "GPU clock rate",
            _of_gpu(lambda gpu: gpu.clock_mhz * 1e6 if gpu.clock_mhz is not None else None),
            HERTZ,
        ),
        FilterField("power", "GPU power", _of_gpu(lambda gpu: gpu.power_watts), WATTS),
        FilterField("temp", "GPU temperature, or CPU temperature if unknown", _celsius, CELSIUS),
        FilterField("disk", "the machine's free disk space", _of_host(lambda host: host.disk_free_bytes), BYTES),
        FilterField("age", "time since the last report, or since the rank left", lambda row: row.age, SECONDS),
        FilterField(
            "link", "connection to the node's agent", lambda row: (row.link,) if row.link else None, states=_LINK_STATES
        ),
        *_OF_METRICS,
        FilterField("why", "reason for a state other than run", lambda row: row.view.why or None),
    ),
    lambda row: " ".join((row.view.node, *_states(row), row.view.backend or "", row.view.device or "", row.view.why)),
)

EVENTS: Table[EventRow] = Table(
    "events",
    (
        FilterField("by", "user, node or policy that caused the event", lambda row: row.event.by or None),
        FilterField(
            "kind", "command, run, rank, checkpoint, evaluation, probe, agent, alert", lambda row: row.event.kind
        ),
        FilterField("verb", "verb of the command, or of an equivalent command", lambda row: row.event.verb),
        FilterField("text", "event text", lambda row: row.event.text or None),
        FilterField("node", "node that the event names", lambda row: " ".join(row.nodes) or None),
        FilterField("step", "step at which the change took effect", lambda row: row.event.step, COUNT),
        FilterField("severity", "severity level", lambda row: (row.event.severity,), states=get_args(Severity)),
        FilterField(
            "outcome",
            "outcome of the command",
            lambda row: (row.event.outcome,) if row.event.outcome else None,
            states=get_args(CommandState),
        ),
        FilterField("before", "value before the change", lambda row: row.event.before),
        FilterField("after", "value after the change", lambda row: row.event.after),
        FilterField(
            "effect",
            "measured change of tokens per second, in percent",
            lambda row: 100 * row.effect if row.effect is not None else None,
            PERCENT,
        ),
        FilterField("age", "time since the event", lambda row: row.age_seconds, SECONDS),
        FilterField("is", "undone: a later command undid it", lambda row: ("undone",) * row.undone, states=("undone",)),
    ),
    lambda row: f"{row.event.by} {row.event.kind} {row.event.verb or ''} {run_events.event_words(row.event)}",
)

RUNS: Table[RunRow] = Table(
    "runs",
    (
        FilterField("name", "name in the run file", lambda row: row.run.name),
        FilterField("run", "run id", lambda row: row.run.run),
        FilterField("state", "running, finished, ...", lambda row: (row.run.state,), states=get_args(RunState)),
        FilterField("kind", "hosted, or of another program", lambda row: (row.run.kind,), states=get_args(RunKind)),
        FilterField("step", "last committed step", lambda row: row.run.step, COUNT),
        FilterField("steps", "total number of steps", lambda row: row.run.steps, COUNT),
        FilterField("done", "percentage of steps done", lambda row: _percent_of(row.run.step, row.run.steps), PERCENT),
        FilterField("loss", "last loss", lambda row: row.run.last_loss, COUNT),
        FilterField("age", "time since the run started", lambda row: row.age_seconds, SECONDS),
        FilterField("duration", "time from start to end", lambda row: row.duration_seconds, SECONDS),
        FilterField("lead", "node that leads the run", lambda row: row.run.lead or None),
        FilterField("node", "nodes of the run", lambda row: " ".join(row.run.nodes) or None),
        FilterField("parent", "run that it branched off", lambda row: row.run.branch.run if row.run.branch else None),
    ),
    lambda row: " ".join((row.run.name, row.run.run, row.run.state, row.run.lead, *row.run.nodes)),
)

LOGS: Table[LogEntry] = Table(
    "logs",
    (
        FilterField("text", "text of the line", lambda line: line.text),
        FilterField("node", "node that wrote it", lambda line: line.node),
        FilterField("rank", "rank that wrote it", lambda line: line.rank, COUNT),
        FilterField(
            "level",
            "severity; of a line without one, as its text sounds",
            lambda line: (line.level.lower(),) if line.level else None,
            states=tuple(map(str.lower, log_format.LEVELS)),
        ),
    ),
    lambda line: line.text,
)
