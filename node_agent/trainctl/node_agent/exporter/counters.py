"""The endpoint's counters: sums over the messages that an agent has published; pure."""

import bisect
import math

import msgspec

from trainctl.node_agent.exporter.catalogue import STEP_BUCKETS_SECONDS
from trainctl.protocol import messages as m


class RankTotals(msgspec.Struct, frozen=True):
    """Of one rank's parts of steps."""

    node: str
    tokens: float = 0.0
    samples: int = 0
    replays: int = 0
    phase_seconds: tuple[float, ...] = (0.0,) * len(m.PHASES)


class RunTotals(msgspec.Struct, frozen=True):
    """Of one run, since its agent first heard of it."""

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
    """Of an agent since it started; of runs those that are active, and those that ended after the last one began."""

    runs: dict[str, RunTotals] = {}
    ended: frozenset[str] = frozenset()  # of them; they go when another one begins
    events: dict[tuple[str, str], int] = {}  # by kind and severity
    commands: dict[tuple[str, str], int] = {}  # by verb and outcome


def after(totals: Totals, message: m.Live) -> Totals:
    """The totals once a message has been published."""
    match message:
        case m.StepCommitted():
            return _with_run(totals, _stepped(_of_run(totals, message.run), message))
        case m.RankStep():
            return _with_run(totals, _parted(_of_run(totals, message.run), message))
        case m.RunView(run=run, state=state):
            ended = totals.ended - {run} if state in m.ACTIVE_RUN_STATES else totals.ended | {run}
            return msgspec.structs.replace(totals, ended=ended)
        case m.Event():
            return _happened(totals, message)
        case m.HostReading() | m.Alerts() | m.Sample():
            return totals  # gauges, or nothing to count


def _of_run(totals: Totals, run: str) -> RunTotals:
    return totals.runs.get(run) or RunTotals(run)


def _with_run(totals: Totals, run: RunTotals) -> Totals:
    if run.run in totals.runs:
        return msgspec.structs.replace(totals, runs={**totals.runs, run.run: run})
    active = {name: kept for name, kept in totals.runs.items() if name not in totals.ended}
    return msgspec.structs.replace(totals, runs={**active, run.run: run}, ended=frozenset())


def _stepped(run: RunTotals, step: m.StepCommitted) -> RunTotals:
    buckets = list(run.buckets)
    buckets[bisect.bisect_left(STEP_BUCKETS_SECONDS, step.step_seconds)] += 1
    return msgspec.structs.replace(
        run, steps=run.steps + 1, skipped=run.skipped + (step.skipped is not None),
        tokens=_counted(run.tokens, step.tokens), weight=_counted(run.weight, step.weight),
        samples=run.samples + step.samples,
        step_seconds=run.step_seconds + _finite(step.step_seconds), buckets=tuple(buckets),
    )  # fmt: skip


def _parted(run: RunTotals, part: m.RankStep) -> RunTotals:
    known = run.ranks.get(part.rank, RankTotals(part.node))
    spent = (getattr(part.phases, name) for name in m.PHASES)
    made = RankTotals(
        part.node, known.tokens + _finite(part.tokens), known.samples + part.samples, known.replays + part.replays,
        tuple(before + _finite(more) for before, more in zip(known.phase_seconds, spent, strict=True)),
    )  # fmt: skip
    return msgspec.structs.replace(run, ranks={**run.ranks, part.rank: made})


def _happened(totals: Totals, event: m.Event) -> Totals:
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
