"""The endpoint's counters, and a snapshot as numbers with labels, by the names of the catalogue: pure."""

import bisect
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from trainctl.node_agent.clients.query_context import LiveRun
from trainctl.node_agent.exporter.catalogue import (
    COMPUTE,
    HOST_METRICS,
    RANK_METRICS,
    RUN_METRICS,
    STEP_BUCKETS_SECONDS,
    exported_name,
)
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    METRICS,
    PHASES,
    Alerts,
    Event,
    HostReading,
    Live,
    NodeView,
    PeerView,
    ProcessReading,
    RankStep,
    RankView,
    RunView,
    Sample,
    StepCommitted,
)


class RankTotals(msgspec.Struct, frozen=True):
    """Sums over one rank's parts of steps."""

    node: str
    tokens: float = 0.0
    samples: int = 0
    replays: int = 0
    phase_seconds: tuple[float, ...] = (0.0,) * len(PHASES)


class RunTotals(msgspec.Struct, frozen=True):
    """Sums over one run, since its agent first heard of it."""

    run: str
    steps: int = 0
    skipped: int = 0
    tokens: float | None = None  # None: no step has said how many
    weight: float | None = None
    samples: int = 0
    step_seconds: float = 0.0
    buckets: tuple[int, ...] = (0,) * (len(STEP_BUCKETS_SECONDS) + 1)  # steps in each, not summed up
    ranks: dict[int, RankTotals] = {}  # replaced, never changed


class Totals(msgspec.Struct, frozen=True):
    """Sums since the agent started: of the active runs, and of those that ended after the last one began."""

    runs: dict[str, RunTotals] = {}
    ended: frozenset[str] = frozenset()  # of them; they go when another one begins
    events: dict[tuple[str, str], int] = {}  # by kind and severity
    commands: dict[tuple[str, str], int] = {}  # by verb and outcome


def after(totals: Totals, message: Live) -> Totals:
    """The totals once a message has been published."""
    match message:
        case StepCommitted():
            return _with_run(totals, _stepped(_of_run(totals, message.run), message))
        case RankStep():
            return _with_run(totals, _parted(_of_run(totals, message.run), message))
        case RunView(run=run, state=state):
            ended = totals.ended - {run} if state in ACTIVE_RUN_STATES else totals.ended | {run}
            return msgspec.structs.replace(totals, ended=ended)
        case Event():
            return _happened(totals, message)
        case HostReading() | Alerts() | Sample():
            return totals  # gauges, or nothing to count


def _of_run(totals: Totals, run: str) -> RunTotals:
    return totals.runs.get(run) or RunTotals(run)


def _with_run(totals: Totals, run: RunTotals) -> Totals:
    if run.run in totals.runs:
        return msgspec.structs.replace(totals, runs={**totals.runs, run.run: run})
    active = {name: kept for name, kept in totals.runs.items() if name not in totals.ended}
    return msgspec.structs.replace(totals, runs={**active, run.run: run}, ended=frozenset())


def _stepped(run: RunTotals, step: StepCommitted) -> RunTotals:
    buckets = list(run.buckets)
    buckets[bisect.bisect_left(STEP_BUCKETS_SECONDS, step.step_seconds)] += 1
    return msgspec.structs.replace(
        run,
        steps=run.steps + 1,
        skipped=run.skipped + (step.skipped is not None),
        tokens=_counted(run.tokens, step.tokens),
        weight=_counted(run.weight, step.weight),
        samples=run.samples + step.samples,
        step_seconds=run.step_seconds + _finite(step.step_seconds),
        buckets=tuple(buckets),
    )


def _parted(run: RunTotals, part: RankStep) -> RunTotals:
    known = run.ranks.get(part.rank, RankTotals(part.node))
    spent = (getattr(part.phases, name) for name in PHASES)
    made = RankTotals(
        part.node,
        known.tokens + _finite(part.tokens),
        known.samples + part.samples,
        known.replays + part.replays,
        tuple(before + _finite(more) for before, more in zip(known.phase_seconds, spent, strict=True)),
    )
    return msgspec.structs.replace(run, ranks={**run.ranks, part.rank: made})


def _happened(totals: Totals, event: Event) -> Totals:
    kind = event.kind, event.severity
    events = {**totals.events, kind: totals.events.get(kind, 0) + 1}
    commands = totals.commands
    if event.verb is not None and event.outcome is not None:
        ended = event.verb, event.outcome
        commands = {**commands, ended: commands.get(ended, 0) + 1}
    return msgspec.structs.replace(totals, events=events, commands=commands)


def _counted(total: float | None, more: float | None) -> float | None:
    """None for as long as no step says how many."""
    return total if more is None else (total or 0.0) + _finite(more)


def _finite(value: float) -> float:
    """A sum that was once NaN would stay so."""
    return value if math.isfinite(value) and value > 0 else 0.0


class AgentSnapshot(NamedTuple):
    """State of an agent at a moment, from which a scrape is answered; all immutable, so any thread may read it."""

    taken_monotonic: float
    started_at: float  # Unix seconds
    node: NodeView
    peers: tuple[PeerView, ...]
    live: tuple[LiveRun, ...]  # the active runs
    loop_lag_seconds: float | None
    totals: Totals


class Histogram(NamedTuple):
    """Observations up to each bucket's end, and their sum."""

    buckets: tuple[tuple[str, float], ...]
    total: float


class Reading(NamedTuple):
    """One number; `labels` are in the catalogue's order."""

    name: str
    labels: tuple[str, ...]
    value: float | Histogram


def readings(snapshot: AgentSnapshot, now_monotonic: float) -> Iterator[Reading]:
    """All that is known."""
    yield from _agent(snapshot, now_monotonic)
    if snapshot.node.host is not None:
        yield from _host(snapshot.node.host)
    for live in snapshot.live:
        yield from _run(live)
        yield from _alerts(live)
        yield from _ranks(live)
    for totals in snapshot.totals.runs.values():
        yield from _run_totals(totals)


def _given(prefix: str, labels: tuple[str, ...], *pairs: tuple[str, float | None]) -> Iterator[Reading]:
    for name, value in pairs:
        if value is not None:
            yield Reading(f"{prefix}_{name}", labels, value)


def _agent(snapshot: AgentSnapshot, now_monotonic: float) -> Iterator[Reading]:
    own = (snapshot.node.node,)
    yield Reading("trainctl_agent_info", (*own, snapshot.node.version, snapshot.node.boot), 1)
    yield from _given(
        "trainctl_agent",
        own,
        ("start_time_seconds", snapshot.started_at),
        ("event_loop_lag_seconds", snapshot.loop_lag_seconds),
        ("snapshot_age_seconds", max(0.0, now_monotonic - snapshot.taken_monotonic)),
    )
    for peer in snapshot.peers:
        if peer.state != "unknown":
            yield Reading("trainctl_peer_connected", (*own, peer.node), peer.state == "connected")
    active = sum(live.view.state in ACTIVE_RUN_STATES for live in snapshot.live)
    yield Reading("trainctl_active_runs", own, active)
    for kind, count in snapshot.totals.events.items():
        yield Reading("trainctl_events_total", (*own, *kind), count)
    for ended, count in snapshot.totals.commands.items():
        yield Reading("trainctl_commands_total", (*own, *ended), count)


def _host(host: HostReading) -> Iterator[Reading]:
    yield from _given(
        "trainctl_host",
        (host.node,),
        ("read_timestamp_seconds", host.read_at),
        ("cpu_ratio", _ratio(host.cpu_percent)),
        ("memory_used_bytes", host.memory_used_bytes),
        ("memory_size_bytes", host.memory_total_bytes),
        ("disk_free_bytes", host.disk_free_bytes),
        ("disk_size_bytes", host.disk_total_bytes),
        ("energy_joules", host.energy_joules),
        ("load1", host.load_1min),
        ("temperature_celsius", host.temperature_celsius),
    )
    for metric in HOST_METRICS:
        yield from _given("trainctl_host", (host.node,), (metric.name, metric.of(host)))
    for number, gpu in enumerate(host.gpus):
        yield from _given(
            "trainctl_gpu",
            (host.node, str(number), gpu.name),
            ("utilization_ratio", _ratio(gpu.utilization_percent)),
            ("clock_hertz", None if gpu.clock_mhz is None else 1e6 * gpu.clock_mhz),
            ("power_watts", gpu.power_watts),
            ("temperature_celsius", gpu.temperature_celsius),
            ("memory_used_bytes", gpu.memory_used_bytes),
            ("memory_size_bytes", gpu.memory_total_bytes),
        )
        for limit in gpu.clock_limits:
            yield Reading("trainctl_gpu_clock_limited", (host.node, str(number), gpu.name, limit), 1)
    yield from _processes(host)


def _processes(host: HostReading) -> Iterator[Reading]:
    """Those of one role and rank are summed: a pid as a label would make a new series with every restart."""
    groups: dict[tuple[str, str, str], list[ProcessReading]] = {}
    for process in host.processes:
        labels = host.node, process.role, "" if process.rank is None else str(process.rank)
        groups.setdefault(labels, []).append(process)
    for labels, group in groups.items():
        yield from _given(
            "trainctl_agent_process",
            labels,
            ("memory_bytes", _sum([one.memory_bytes for one in group])),
            ("cpu_ratio", _ratio(_sum([one.cpu_percent for one in group]))),
        )


def _run(live: LiveRun) -> Iterator[Reading]:
    view, last = live.view, live.last_step
    run = (view.run,)
    yield Reading(
        "trainctl_run_info",
        (
            *run,
            view.name,
            view.lead,
            view.engine,
            view.weight_unit,
            view.loss_unit,
            *(_of_ranks(view.ranks, name) for name in COMPUTE),
        ),
        1,
    )
    yield Reading("trainctl_run_state", (*run, view.state), 1)
    yield from _given(
        "trainctl_run",
        run,
        ("start_time_seconds", view.started_at),
        ("step", view.step),
        ("target_steps", view.steps),
        ("plan_version", view.plan_version),
        ("cursor_samples", view.cursor),
        ("last_commit_timestamp_seconds", last.committed_at if last is not None else None),
    )
    yield from _given(
        "trainctl",
        run,
        ("generation_term", view.generation.term),
        ("generation_number", view.generation.n),
        ("global_batch_samples", view.global_batch),
        ("eval_loss", view.eval_loss),
        ("perplexity", view.perplexity),
    )
    for metric in RUN_METRICS if last is not None else ():
        yield from _given("trainctl", run, (exported_name(metric.name), metric.of(last)))
    for name, value in view.eval_values:
        yield from _given("trainctl", run, (exported_name(name), value))
    for name, value in last.values.items() if last is not None else ():
        if name not in METRICS:
            yield Reading("trainctl_run_metric", (*run, name), value)


def _of_ranks(ranks: Sequence[RankView], name: str) -> str:
    """Return what they have of `Compute`, each value once; empty where none is known."""
    found = {getattr(rank.compute, name) for rank in ranks if rank.compute is not None}
    words = {("on" if value else "off") if isinstance(value, bool) else str(value or "") for value in found}
    return ",".join(sorted(words - {""}))


def _alerts(live: LiveRun) -> Iterator[Reading]:
    if live.alerts is None:
        return
    alerts = live.alerts.alerts
    yield Reading("trainctl_alerts_firing", (live.view.run,), len(alerts))
    for alert in {(a.kind, a.node, "" if a.rank is None else str(a.rank), a.severity) for a in alerts}:
        yield Reading("trainctl_alert_firing", (live.view.run, *alert), 1)


def _ranks(live: LiveRun) -> Iterator[Reading]:
    run = live.view.run
    for rank in live.view.ranks:
        labels = run, rank.node, str(rank.rank)
        yield Reading("trainctl_rank_state", (*labels, rank.state), 1)
        yield from _given("trainctl", labels, ("share_samples", rank.share), ("micro_batch_samples", rank.micro_batch))
    for part in live.rank_steps:
        labels = run, part.node, str(part.rank)
        for metric in RANK_METRICS:
            yield from _given("trainctl_rank", labels, (metric.name.removeprefix("rank_"), metric.of(part)))
        for name, value in part.values.items():
            if name not in METRICS:
                yield Reading("trainctl_rank_metric", (*labels, name), value)


def _run_totals(totals: RunTotals) -> Iterator[Reading]:
    run = (totals.run,)
    ends = (*(f"{end:g}" for end in STEP_BUCKETS_SECONDS), "+Inf")
    counts = tuple(zip(ends, accumulate(totals.buckets), strict=True))
    yield Reading("trainctl_step_duration_seconds", run, Histogram(counts, totals.step_seconds))
    yield from _given(
        "trainctl",
        run,
        ("steps_total", totals.steps),
        ("skipped_steps_total", totals.skipped),
        ("tokens_total", totals.tokens),
        ("weight_total", totals.weight),
        ("samples_total", totals.samples),
    )
    for number, rank in totals.ranks.items():
        labels = totals.run, rank.node, str(number)
        yield from _given(
            "trainctl_rank",
            labels,
            ("tokens_total", rank.tokens),
            ("samples_total", rank.samples),
            ("replays_total", rank.replays),
        )
        for phase, seconds in zip(PHASES, rank.phase_seconds, strict=True):
            yield Reading("trainctl_rank_phase_seconds_total", (*labels, phase), seconds)


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _sum(values: Sequence[float | None]) -> float | None:
    """None where nothing is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
