"""The endpoint's counters, and a snapshot as numbers with labels, by the names of the catalogue."""

import bisect
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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


@dataclass
class RankTotals:
    """Sums over one rank's parts of steps."""

    node: str
    counts: dict[str, float] = field(default_factory=dict)  # by the end of the exported name
    phase_seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class RunTotals:
    """Sums over one run, since its agent first knew it."""

    counts: dict[str, float] = field(default_factory=dict)  # by exported name; what no step has said isn't there
    step_seconds: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS_SECONDS) + 1))  # steps in each
    ranks: dict[int, RankTotals] = field(default_factory=dict)


class Totals:
    """Sums since the agent started: of the active runs, and of those that ended after the last one began."""

    def __init__(self) -> None:
        self.runs: dict[str, RunTotals] = {}
        self.events: Counter[tuple[str, str]] = Counter()  # by kind and severity
        self.commands: Counter[tuple[str, str]] = Counter()  # by verb and outcome
        self._ended: set[str] = set()  # runs that go when another one begins

    def add(self, message: Live) -> None:
        """Count what has been published; gauges are no sums."""
        match message:
            case StepCommitted():
                self._add_step(self._run(message.run), message)
            case RankStep():
                self._add_part(self._run(message.run), message)
            case RunView(run=run, state=state):
                self._ended -= {run}
                self._ended |= {run} if state not in ACTIVE_RUN_STATES else set()
            case Event():
                self.events[message.kind, message.severity] += 1
                if message.verb is not None and message.outcome is not None:
                    self.commands[message.verb, message.outcome] += 1
            case HostReading() | Alerts() | Sample():
                pass

    def _run(self, run: str) -> RunTotals:
        if run not in self.runs:
            self.runs = {name: totals for name, totals in self.runs.items() if name not in self._ended}
            self._ended.clear()
            self.runs[run] = RunTotals()
        return self.runs[run]

    @staticmethod
    def _add_step(run: RunTotals, step: StepCommitted) -> None:
        _count(run.counts, "steps_total", 1)
        _count(run.counts, "skipped_steps_total", step.skipped is not None)
        _count(run.counts, "tokens_total", step.tokens)
        _count(run.counts, "weight_total", step.weight)
        _count(run.counts, "samples_total", step.samples or None)
        run.step_seconds += _finite(step.step_seconds)
        run.buckets[bisect.bisect_left(STEP_BUCKETS_SECONDS, step.step_seconds)] += 1

    @staticmethod
    def _add_part(run: RunTotals, part: RankStep) -> None:
        rank = run.ranks.setdefault(part.rank, RankTotals(part.node))
        rank.node = part.node
        _count(rank.counts, "tokens_total", part.tokens or None)
        _count(rank.counts, "samples_total", part.samples or None)
        _count(rank.counts, "replays_total", part.replays)
        for phase in PHASES:
            _count(rank.phase_seconds, phase, getattr(part.phases, phase))


def _count(counts: dict[str, float], name: str, more: float | None) -> None:
    if more is not None:
        counts[name] = counts.get(name, 0.0) + _finite(more)


def _finite(value: float) -> float:
    """A sum that was once NaN would stay so."""
    return value if math.isfinite(value) and value > 0 else 0.0


@dataclass(frozen=True)
class AgentSnapshot:
    """State of an agent at a moment, from which a scrape is answered; nothing changes in it, so any thread may read
    it."""

    taken_monotonic: float
    started_at: float  # Unix seconds
    node: NodeView
    peers: tuple[PeerView, ...]
    live: tuple[LiveRun, ...]  # the active runs
    loop_lag_seconds: float | None
    totals: Totals


@dataclass(frozen=True)
class Histogram:
    """Observations up to each bucket's end, and their sum."""

    buckets: tuple[tuple[str, float], ...]
    total: float


@dataclass(frozen=True)
class Reading:
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
    for run, totals in snapshot.totals.runs.items():
        yield from _run_totals(run, totals)


def _known(prefix: str, labels: tuple[str, ...], *pairs: tuple[str, float | None]) -> Iterator[Reading]:
    for name, value in pairs:
        if value is not None:
            yield Reading(f"{prefix}_{name}", labels, value)


def _agent(snapshot: AgentSnapshot, now_monotonic: float) -> Iterator[Reading]:
    own = (snapshot.node.node,)
    yield Reading("trainctl_agent_info", (*own, snapshot.node.version, snapshot.node.boot), 1)
    yield from _known(
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
    yield from _known(
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
        yield from _known("trainctl_host", (host.node,), (metric.name, metric.of(host)))
    for number, gpu in enumerate(host.gpus):
        yield from _known(
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
    """Yield the processes' readings, summed by role and rank: a pid as a label would make a series a restart."""
    groups: dict[tuple[str, str, str], list[ProcessReading]] = {}
    for process in host.processes:
        labels = host.node, process.role, "" if process.rank is None else str(process.rank)
        groups.setdefault(labels, []).append(process)
    for labels, group in groups.items():
        yield from _known(
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
    yield from _known(
        "trainctl_run",
        run,
        ("start_time_seconds", view.started_at),
        ("step", view.step),
        ("target_steps", view.steps),
        ("plan_version", view.plan_version),
        ("cursor_samples", view.cursor),
        ("last_commit_timestamp_seconds", last.committed_at if last is not None else None),
    )
    yield from _known(
        "trainctl",
        run,
        ("generation_term", view.generation.term),
        ("generation_number", view.generation.n),
        ("global_batch_samples", view.global_batch),
        ("eval_loss", view.eval_loss),
        ("perplexity", view.perplexity),
    )
    for metric in RUN_METRICS if last is not None else ():
        yield from _known("trainctl", run, (exported_name(metric.name), metric.of(last)))
    for name, value in view.eval_values:
        yield from _known("trainctl", run, (exported_name(name), value))
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
        yield from _known("trainctl", labels, ("share_samples", rank.share), ("micro_batch_samples", rank.micro_batch))
    for part in live.rank_steps:
        labels = run, part.node, str(part.rank)
        for metric in RANK_METRICS:
            yield from _known("trainctl_rank", labels, (metric.name.removeprefix("rank_"), metric.of(part)))
        for name, value in part.values.items():
            if name not in METRICS:
                yield Reading("trainctl_rank_metric", (*labels, name), value)


def _run_totals(run: str, totals: RunTotals) -> Iterator[Reading]:
    ends = (*(f"{end:g}" for end in STEP_BUCKETS_SECONDS), "+Inf")
    counts = tuple(zip(ends, accumulate(totals.buckets), strict=True))
    yield Reading("trainctl_step_duration_seconds", (run,), Histogram(counts, totals.step_seconds))
    yield from _known("trainctl", (run,), *totals.counts.items())
    for number, rank in totals.ranks.items():
        labels = run, rank.node, str(number)
        yield from _known("trainctl_rank", labels, *rank.counts.items())
        for phase, seconds in rank.phase_seconds.items():
            yield Reading("trainctl_rank_phase_seconds_total", (*labels, phase), seconds)


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _sum(values: Sequence[float | None]) -> float | None:
    """None where nothing is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
