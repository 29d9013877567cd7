"""A run's facts as the rules ask for them: paces, readings, models, and what a step would take without a cause."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from statistics import median
from typing import Any

from trainctl.protocol.analysis.curve import CurveJudge, CurveLimits
from trainctl.protocol.analysis.diagnosis import pace
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.analysis.diagnosis.pace import Pace, Parts
from trainctl.protocol.analysis.slow_ranks import RankPace
from trainctl.protocol.batch.pass_curve import PASS_NOISE, PassCurve
from trainctl.protocol.batch.step_model import StepModel, models
from trainctl.protocol.config.alert_rules import LOADED_PERCENT, AlertsTable
from trainctl.protocol.config.policies import PolicyTables
from trainctl.protocol.messages import BUSY_PHASES, GpuReading, HostReading, RankView, StepCommitted, WhatIf, peak_bytes
from trainctl.protocol.messages.event_prose import rank_label, seconds
from trainctl.protocol.messages.events import AnyEvent, CheckpointWritten

READING_SECONDS = 30.0
"""Newest seconds of readings that count at least; a record has one every 10 s."""
LINE_POINTS = (1, 2)
"""Micro-batches of a curve that is a line fitted to steps: it is believed only up to sizes that were seen."""


class Situation:
    """Raises nothing for missing facts: what isn't known is None or empty."""

    def __init__(self, facts: DiagnosisFacts) -> None:
        self.facts = facts

    # ------------------------------------------------------------ steps

    @cached_property
    def _all_steps(self) -> list[Parts]:
        return pace.by_step(self.facts)

    @cached_property
    def _present(self) -> list[Parts]:
        branch = self.facts.view.branch if self.facts.view is not None else None
        return pace.present(self._all_steps, 1 if branch is None else branch.step + 1)

    @cached_property
    def recent(self) -> list[Parts]:
        """The newest steps of the present plan."""
        return pace.recent(self._present)

    @cached_property
    def lasting(self) -> list[Parts]:
        """Return the present steps and enough before them that a moment makes no rank slow; empty for a new plan."""
        return pace.lasting(self._present, self.recent)

    @cached_property
    def ranks(self) -> dict[int, Pace]:
        """Return the ranks' paces; empty before there are enough steps."""
        return pace.paces(self.recent)

    @cached_property
    def _blocks(self) -> list[list[Parts]]:
        return [block for block in pace.blocks_before(self._all_steps, self.recent) if len(block) >= pace.LEAST_STEPS]

    @cached_property
    def before(self) -> dict[int, Pace]:
        """Return each rank's earlier pace, as alerts have it: of the best block of steps before the recent ones, and as
        it would be with the present share."""
        found, first = {}, next(iter(self.recent[0].values())).step if self.recent else 0
        for rank, own in self.ranks.items():
            watched = RankPace()
            for parts in self._all_steps:
                if parts[rank].step < first:
                    watched.add(parts[rank])
                    if (typical := watched.now()) is not None:
                        watched.keep_best(typical)
            watched.turn_to((own.micro, own.samples))
            if (best := watched.best) is not None and best.parts:
                found[rank] = Pace.of(best.parts, best.times)
        return found

    @cached_property
    def step_seconds(self) -> float | None:
        """Trimmed mean seconds of a recent step."""
        numbers = {part.step for parts in self.recent for part in parts.values()}
        known = [step.step_seconds for step in self.facts.steps if step.step in numbers and step.step_seconds > 0]
        return pace.trimmed(known) if known else None

    @cached_property
    def data_waits(self) -> dict[int, float]:
        """Return the mean seconds of a step that ranks wait for data, of those that wait long."""
        whole, waits = self.step_seconds, {rank: its.data_mean for rank, its in self.ranks.items()}
        return {rank: wait for rank, wait in waits.items() if whole and pace.waits_for_data(wait, whole, self.alerts)}

    @cached_property
    def sync_seconds(self) -> float:
        """Trimmed mean seconds of the sum itself, without waits for slower ranks."""
        return pace.trimmed([pace.shared_sync(parts) for parts in self.recent]) if self.recent else 0.0

    @cached_property
    def sync_before(self) -> float | None:
        """Trimmed mean seconds of the sum itself earlier, in the block at the first quartile."""
        found = sorted(pace.trimmed([pace.shared_sync(parts) for parts in block]) for block in self._blocks)
        return found[len(found) // 4] if found else None

    def growth(self, rank: int, phases: Iterable[str] = BUSY_PHASES) -> dict[str, float] | None:
        """Seconds by which phases are longer than before; None without earlier steps."""
        now, before = self.ranks.get(rank), self.before.get(rank)
        if now is None or before is None:
            return None
        return {name: now.phases[name] - before.phases[name] for name in phases}

    def slowdown(self, rank: int) -> float | None:
        """Return by what part the rank's passes are longer than before, or than when it was calibrated; None: not
        known."""
        now, before = self.ranks.get(rank), self.before.get(rank)
        speed = self.metric(rank, "calibrated_speed")
        known = [1 / speed - 1] if speed else []
        if now is not None and before is not None and before.busy > 0:
            known.append(now.busy / before.busy - 1)
        return max(known, default=None)

    def metric(self, rank: int, name: str) -> float | None:
        """The median of a rank's metric in the recent steps."""
        values = [parts[rank].values[name] for parts in self.recent if name in parts[rank].values]
        return median(values) if values else None

    def memory(self, rank: int) -> tuple[float | None, float | None]:
        """Median peak of a rank's recent steps, and its cap, in bytes; None: not known."""
        parts = [parts[rank] for parts in self.recent]
        peaks = [peak for part in parts if (peak := peak_bytes(part.values)) is not None]
        caps = [part.memory_cap_bytes for part in parts if part.memory_cap_bytes is not None]
        return median(peaks) if peaks else None, caps[-1] if caps else None

    def newest(self, count: int) -> Sequence[StepCommitted]:
        """The newest `count` steps, oldest first."""
        return self.facts.steps[-count:]

    # ------------------------------------------------------------ machines

    def window_readings(self, node: str) -> Sequence[HostReading]:
        """A node's readings during the recent steps; if there are none, its newest one, unless it is old."""
        since = self._since()
        every = [one for one in self.facts.readings.get(node, ()) if one.read_at <= self.facts.at + READING_SECONDS]
        found = [one for one in every if one.read_at >= since]
        return found or [one for one in every[-1:] if one.read_at >= since - READING_SECONDS]

    def _since(self) -> float:
        numbers = [part.step for parts in self.recent[:1] for part in parts.values()]
        began = [step.committed_at for step in self.facts.steps if numbers and step.step == numbers[0]]
        return min([*began, self.facts.at - READING_SECONDS])

    def reading(self, node: str, name: str) -> float | None:
        """The median of a machine's metric by name during the recent steps; None: not read."""
        values = [one.values[name] for one in self.window_readings(node) if name in one.values]
        if values:
            return median(values)
        found = [self.metric(rank, name) for rank in self.ranks_of(node)]
        return max((value for value in found if value is not None), default=None)

    def gpus(self, rank: int) -> list[GpuReading]:
        """Readings of the rank's device during the recent steps."""
        view = self.rank_view(rank)
        found = [one.gpu_of(view.device if view else None) for one in self.window_readings(self.node(rank))]
        return [gpu for gpu in found if gpu is not None]

    def clock_before(self, rank: int) -> float | None:
        """The median clock of the rank's device under load in the first half of the readings, in MHz."""
        view = self.rank_view(rank)
        every = self.facts.readings.get(self.node(rank), ())
        found = [one.gpu_of(view.device if view else None) for one in every[: len(every) // 2]]
        return loaded_clock([gpu for gpu in found if gpu is not None])

    def reading_before(self, node: str, name: str) -> float | None:
        """The median of a machine's metric in the older half of the readings before the recent steps."""
        since = self._since()
        older = [one for one in self.facts.readings.get(node, ()) if one.read_at < since]
        values = [one.values[name] for one in older[: -(-len(older) // 2)] if name in one.values]
        return median(values) if values else None

    # ------------------------------------------------------------ ranks and their models

    @cached_property
    def nodes(self) -> list[str]:
        """The nodes of the run, in the order of their ranks."""
        views = self.facts.view.ranks if self.facts.view is not None else ()
        return [*dict.fromkeys([*(its.node for its in self.ranks.values()), *(view.node for view in views)])]

    def node(self, rank: int) -> str:
        """A rank's node; empty: not known."""
        view = self.rank_view(rank)
        return self.ranks[rank].node if rank in self.ranks else view.node if view is not None else ""

    def ranks_of(self, node: str) -> list[int]:
        return [rank for rank, its in self.ranks.items() if its.node == node]

    def label(self, rank: int) -> str:
        """A rank as people name it: its node, or node:rank where a node has several."""
        return rank_label(self.node(rank), rank, (its.node for its in self.ranks.values())) or f"rank {rank}"

    def rank_view(self, rank: int) -> RankView | None:
        views = self.facts.view.ranks if self.facts.view is not None else ()
        return next((view for view in views if view.rank == rank), None)

    def curve(self, rank: int) -> tuple[PassCurve, int] | None:
        """Seconds of the rank's passes by micro-batch, and the largest one that was measured; None: not known."""
        profile, view = self.facts.profiles.get(rank), self.rank_view(rank)
        if profile is not None and len(profile.passes) > 1:
            points = [(one.micro, one.seconds) for one in profile.passes]
            return PassCurve.smoothed(points, PASS_NOISE), points[-1][0]
        if view is None or len(view.passes) < 2:
            return None
        sizes = tuple(size for size, _ in view.passes)
        largest = self._largest_seen(rank) if sizes == LINE_POINTS else sizes[-1]
        return (PassCurve(view.passes), largest) if largest else None

    def _largest_seen(self, rank: int) -> int:
        sizes = [min(part.micro_batch or 0, part.samples) for part in self.facts.parts if part.rank == rank]
        return max(sizes, default=0)

    @cached_property
    def models(self) -> dict[int, StepModel]:
        """Return the step models of the recent steps, by rank."""
        return self.models_of(self.recent)

    def models_of(self, steps: Sequence[Parts]) -> dict[int, StepModel]:
        curves = {rank: found[0] for rank in self.ranks if (found := self.curve(rank)) is not None}
        return models(pace.timings(steps), curves) if self.ranks else {}

    def without(self, removed: Mapping[int, float], what: str, sync: float = 0.0) -> WhatIf | None:
        """A step without so many seconds of ranks' own work, and of the sum: other ranks may then be the slowest."""
        now = self.step_seconds
        if now is None or not self.ranks:
            return None
        busy = [its.busy for its in self.ranks.values()]
        less = [max(its.busy - removed.get(rank, 0.0), 0.0) for rank, its in self.ranks.items()]
        return self.what_if(now - (max(busy) - max(less)) - sync, what)

    def what_if(self, without: float, what: str) -> WhatIf | None:
        """`without`: seconds of a step without `what`."""
        now = self.step_seconds
        if now is None:
            return None
        without = min(max(without, 0.0), now)
        return WhatIf(now, without, f"without {what} a step takes {seconds(without)}, not {seconds(now)}")

    # ------------------------------------------------------------ the run

    @cached_property
    def judge(self) -> CurveJudge:
        """The curve's judge after all steps of the facts."""
        judge = CurveJudge(CurveLimits.of(self.facts.config))
        judge.replay(self.facts.steps)
        return judge

    @property
    def alerts(self) -> AlertsTable:
        """The run's thresholds."""
        return self.facts.config.alerts if self.facts.config is not None else AlertsTable()

    @property
    def split_gain(self) -> float:
        """Part by which another split must make steps faster to be worth it: the one from which `rebalance` acts."""
        policies = self.facts.config.policy if self.facts.config is not None else PolicyTables()
        return policies.rebalance.gain

    def checkpoint_before(self, step: int) -> int | None:
        """The newest checkpoint of a step before this one, of those that are kept; None: there is none, or it isn't
        known."""
        kept = self.facts.config.checkpoint.keep_last if self.facts.config is not None else 1
        written = sorted({event.data.step for event in self.events(CheckpointWritten)})[-kept:]
        return max((one for one in written if one < step), default=None)

    def events(self, *kinds: type[AnyEvent]) -> list[Any]:
        """Events of these kinds, oldest first."""
        return [event for event in self.facts.events if isinstance(event.data, kinds)]


def loaded_clock(gpus: Sequence[GpuReading]) -> float | None:
    """Return the median clock of a device's readings under load, in MHz; None: not read."""
    clocks = [gpu.clock_mhz for gpu in gpus if gpu.clock_mhz and (gpu.utilization_percent or 100) >= LOADED_PERCENT]
    return median(clocks) if clocks else None


def percent(part: float) -> str:
    """`12 %` of 0.12; below 1 % with a digit more."""
    return f"{100 * part:.0f} %" if part >= 0.01 or part <= 0 else f"{100 * part:.1g} %"


def megabytes(size: float) -> str:
    """`12 MB` or `1.4 GB`, of 10^6 or 10^9 bytes."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.3g} MB"
