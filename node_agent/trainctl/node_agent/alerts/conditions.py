"""Conditions of ranks and machines: memory near its cap, a full disk, silence, loss, and a stalled run; and the
observations that all watches make, which become findings."""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config.alert_rules import KINDS, AlertKind, AlertsTable, stall_limit_seconds
from trainctl.protocol.messages import (
    CLOCK_LIMITED_BY,
    KL,
    GpuReading,
    HostReading,
    RankStep,
    RankView,
    RunView,
    StepCommitted,
)
from trainctl.protocol.messages.diagnosis import Finding, Remedy
from trainctl.protocol.messages.event_prose import seconds


@dataclasses.dataclass(frozen=True)
class Said:
    """Text of a finding: a line on what is wrong and why, the facts at hand and what to do, a line each."""

    text: str
    facts: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Observation:
    """One condition at one look; `say` is asked only if it becomes a finding."""

    kind: AlertKind
    bad: bool
    good: bool
    say: Callable[[], Said]
    node: str = ""
    rank: int | None = None

    @property
    def id(self) -> str:
        """An id that follows from the condition: kind, node and rank."""
        parts = [self.kind, self.node, "" if self.rank is None else str(self.rank)]
        return ":".join(part for part in parts if part)

    @property
    def finding(self) -> Finding:
        """The condition as a finding."""
        said, severity = self.say(), KINDS[self.kind].severity
        remedies = tuple(map(Remedy, said.remedies))
        return Finding(self.kind, said.text, severity, self.node, self.rank, said.facts, remedies=remedies)


def gigahertz(mhz: float) -> str:
    return f"{mhz / 1000:.2f}"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def number(value: float) -> str:
    """A loss or a norm in four digits."""
    return f"{value:.4g}"


def arrow(before: str, after: str) -> str:
    """`71→84`, or one of them where they are the same."""
    return after if before == after else f"{before}→{after}"


def limited_by(gpu: GpuReading | None) -> str:
    """`limited by heat`: what lowers a device's clock, where it says so."""
    words = [CLOCK_LIMITED_BY[limit] for limit in gpu.clock_limits] if gpu is not None else []
    return f"limited by {' and '.join(words)}" if words else ""


WELL_STATES = frozenset({"ready", "run", "paused", "late", "draining", "drained", "done"})
"""States of a rank that is neither lost nor on its way back."""
STEPS_KEPT = 32


@dataclasses.dataclass(frozen=True)
class RunSnapshot:
    """The run and its machines at one look."""

    view: RunView
    silent: Mapping[str, str]  # nodes whose agents aren't heard, and why
    doing: str = "train"  # kind of the newest plan
    profiles: Mapping[int, ProfileSummary] = dataclasses.field(default_factory=dict)  # calibrations, by rank


def memory(part: RankStep, table: AlertsTable) -> list[Observation]:
    """The peak of a rank's step against its cap, both in bytes; nothing where one is unknown."""
    used, cap = part.peak_or_held_bytes, part.memory_cap_bytes
    if used is None or not cap:
        return []
    percent = 100 * used / cap

    def say() -> Said:
        held = f"{gigabytes(part.memory_bytes)} held after the step, " if part.memory_bytes is not None else ""
        replays = f", {part.replays} passes repeated" if part.replays else ""
        size = f"micro-batch {part.micro_batch} of " if part.micro_batch is not None else ""
        facts = (f"{held}{size}{part.samples} samples{replays}",)
        return Said(f"memory {percent:.0f} % of {gigabytes(cap)}", facts)

    bad, good = percent > table.memory_percent, percent < table.memory_clear_percent
    return [Observation("memory", bad, good, say, part.node, part.rank)]


def disk(reading: HostReading, table: AlertsTable) -> list[Observation]:
    """Return a finding with the space left on a machine's disk; nothing if it isn't known."""
    free = reading.disk_free_bytes
    if free is None:
        return []
    total = reading.disk_total_bytes
    percent = 100 * free / total if total else None
    of = f" ({percent:.1f} % of {gigabytes(total)})" if total and percent is not None else ""
    text = f"{gigabytes(free)}{of} left on the disk that holds its runs"
    facts = ("when the disk is full, the run continues but can't write its record or checkpoints",)
    bad = free < table.disk_free_gb * 1e9 or (percent is not None and percent < table.disk_free_percent)
    good = free > table.disk_clear_gb * 1e9 and (percent is None or percent > table.disk_clear_percent)
    return [Observation("disk", bad, good, lambda: Said(text, facts), reading.node)]


def record(node: str, problem: str | None) -> Observation:
    """The faults of a machine's databases."""
    facts = ("runs continue; what can't be written waits in memory",)
    return Observation("record", problem is not None, problem is None, lambda: Said(problem or "", facts), node)


def nodes(snapshot: RunSnapshot) -> list[Observation]:
    """Ranks that are lost or failed, and those that hang or whose agents aren't heard."""
    found = []
    for view in snapshot.view.ranks:
        lost, quiet = view.state in ("lost", "failed"), view.state == "hung" or view.node in snapshot.silent
        say = partial(_say, view.state, view.why, view)
        found.append(Observation("node-lost", lost, view.state in WELL_STATES, say, view.node, view.rank))
        expected = lost or view.state == "drained"  # a drained node may be switched off
        silence = _silence(view, snapshot)
        found.append(
            Observation("node-silent", quiet and not expected, expected or not quiet, silence, view.node, view.rank)
        )
    return found


def _silence(view: RankView, snapshot: RunSnapshot) -> Callable[[], Said]:
    if view.state == "hung":
        return partial(_say, "hung", view.why, view)
    return partial(_say, "silent", snapshot.silent.get(view.node, ""), view)


def _say(state: str, why: str, view: RankView) -> Said:
    known = (("share", view.share), ("micro-batch", view.micro_batch), ("pid", view.pid))
    facts = "".join(f", {name} {value}" for name, value in known if value is not None)
    return Said(f"{state}: {why}" if why else state, (f"rank {view.rank}: {view.state}{facts}",))


def reference_distance(view: RunView, table: AlertsTable) -> list[Observation]:
    """Return a finding with the newest evaluation's distance from the reference; nothing in a run without one."""
    nats = dict(view.eval_values).get(KL)
    if nats is None:
        return []

    def say() -> Said:
        settings = "a higher objective.beta or a lower learning rate keeps it closer"
        text = f"KL {number(nats)} nats per token from the reference, above {number(table.kl_nats)}"
        return Said(text, remedies=(settings,))

    return [Observation("kl", not nats <= table.kl_nats, nats < table.kl_clear_nats, say)]


class StallWatch:
    """Time for which a running run has committed nothing; `now` is a reading of a monotonic clock."""

    def __init__(self, table: AlertsTable, now: float) -> None:
        self._table, self._last, self._step = table, now, 0
        self._seconds: deque[float] = deque(maxlen=STEPS_KEPT)

    def committed(self, step: StepCommitted, now: float) -> None:
        self._last, self._step = now, step.step
        self._seconds.append(step.step_seconds)

    def look(self, snapshot: RunSnapshot, now: float) -> Observation:
        """A run that is meant to wait doesn't stall."""
        if snapshot.view.state != "running" or snapshot.view.reason:
            self._last = now
        usual_seconds = median(self._seconds) if self._seconds else None
        limit_seconds = stall_limit_seconds(self._table, snapshot.doing, usual_seconds)
        bad = now - self._last > limit_seconds
        return Observation("stall", bad, not bad, lambda: self._say(snapshot, limit_seconds))

    def _say(self, snapshot: RunSnapshot, limit_seconds: float) -> Said:
        doing = "" if snapshot.doing == "train" else f", {snapshot.doing} in progress"
        blamed = [f"{view.node} {view.state}" for view in snapshot.view.ranks if view.state not in ("run", "drained")]
        blamed += [f"{node}'s agent is silent" for node in snapshot.silent]
        cause = f": {', '.join(blamed)}" if blamed else f"{doing}; all ranks are responding"
        facts = [f"{view.node}: {view.state}{f', {view.why}' if view.why else ''}" for view in snapshot.view.ranks]
        if self._seconds:
            facts.insert(0, f"a step usually takes {seconds(median(self._seconds))}")
        step = self._step or snapshot.view.step
        return Said(f"no step in {limit_seconds:.0f} s since step {step:,}{cause}", tuple(facts))


def lead_silent(node: str, lead: str, silent_seconds: float, table: AlertsTable) -> Observation:
    """A follower's view of its lead."""
    text = f"no message from {lead}, the run's lead; this node's rank waits"
    remedies = ("the run continues when the lead's agent is back; to make this node the lead instead, use promote",)
    bad = silent_seconds > table.silent_seconds
    return Observation("lead-silent", bad, not bad, lambda: Said(text, remedies=remedies), node)
