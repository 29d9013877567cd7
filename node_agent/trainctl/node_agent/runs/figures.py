"""Figures of one run that is led here: its cost, the time left, and ranks' parts beside peaks and calibrations."""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import msgspec

from trainctl.node_agent.planning.durable import Settings
from trainctl.node_agent.records.keys import ETA_KEY, NODE_TIMES_KEY
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.batch import cost
from trainctl.protocol.batch.eta import RECENT_STEPS, Eta, EtaFacts, Schedule
from trainctl.protocol.batch.flops import peak_parts
from trainctl.protocol.batch.pass_curve import links_of, passes_seconds, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate, ProfileSummary
from trainctl.protocol.config.cluster_file import Prices
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    HostReading,
    RankStep,
    Ready,
    RunCost,
    RunState,
    StepCommitted,
    StepPlan,
)


class RunCosts:
    """The cost of one run: who takes part is kept in its record, prices are those of this machine.

    `cost` is None while none of its nodes has a price.
    """

    def __init__(self, recorder: RunDb, prices: Prices) -> None:
        """Continues from the record."""
        self._recorder, self._prices = recorder, prices
        self._times, self._joules = kept_times(recorder), dict[str, float]()
        self._known: tuple[Settings, RunState] | None = None
        self.cost: RunCost | None = None

    def look(self, settings: Settings, state: RunState, at: float) -> RunCost | None:
        """The cost once the run has these settings and this state, from `at` (Unix seconds) on."""
        if self._known is None or self._known[0] is not settings or self._known[1] != state:
            self._known = settings, state
            nodes = {setting.node for setting in settings.live.values()} if state in ACTIVE_RUN_STATES else set()
            before, self._times = self._times, cost.counted(self._times, nodes, at)
            if self.cost is None or self._times != before:
                self.cost = cost.run_cost(self._times, self._prices, at)
            if self._times != before:
                keep_times(self._recorder, self._times)
        return self.cost

    def read(self, reading: HostReading) -> None:
        """A reading of one of the run's machines."""
        if reading.energy_joules is not None:
            self._joules[reading.node] = reading.energy_joules

    def with_cost(self, step: StepCommitted) -> StepCommitted:
        """A step with what the run has cost by then, and beside it the energy; as it is where nothing has a price."""
        if self.cost is None:
            return step
        spent = cost.spent_by(self.cost, step.committed_at)
        values = {**step.values, "cost": spent, "cost_per_hour": self.cost.per_hour}
        joules = [self._joules[time.node] for time in self._times if time.node in self._joules]
        return msgspec.structs.replace(step, values=values | ({"energy_joules": sum(joules)} if joules else {}))


def kept_times(recorder: RunDb) -> cost.Times:
    """Return who took part, by the record. A cost is no reason not to lead a run: what can't be read is counted
    again."""
    text = recorder.meta(NODE_TIMES_KEY)
    try:
        return msgspec.json.decode(text, type=cost.Times) if text is not None else ()
    except msgspec.MsgspecError:
        return ()


def keep_times(recorder: RunDb, times: cost.Times) -> None:
    """Keep who took part for how long, here and on the run's other nodes."""
    recorder.set_meta(NODE_TIMES_KEY, msgspec.json.encode(times).decode())


def close_times(recorder: RunDb, at: float, nodes: Collection[str] | None = None) -> None:
    """Close the times of a run that ended with its agent, about `at` (Unix seconds): from then on nobody took part, or
    only others than `nodes`."""
    times = kept_times(recorder)
    others = {time.node for time in times if time.since_at is not None} - set(nodes) if nodes is not None else ()
    if (over := cost.counted(times, others, at)) != times:
        keep_times(recorder, over)


FORWARD_PART: Final = 1 / 3
"""Part of a training step's time that evaluating as many samples takes: it has no backward pass."""
LONGEST_RECOVERY_SECONDS: Final = 600.0
"""Time between two sessions of a run above which the run counts as stopped in between, not as recovering."""


class KeptEta(msgspec.Struct, frozen=True):
    """Estimate as the record keeps it."""

    facts: EtaFacts = EtaFacts()
    step: int = 0  # last committed step then
    at: float = 0.0  # Unix seconds


class RunEta:
    """The time left of one run: measured at each commit, and kept in its record over restarts.

    A step takes what its report says. Plans beside training and faults take what else passes between two
    commits, without pauses.
    """

    def __init__(self, recorder: RunDb, config: RunFile, clock: Callable[[], float] = time.time) -> None:
        """Continues from the record. `clock`: Unix seconds."""
        self._recorder, self._config, self._clock = recorder, config, clock
        kept, newest = _kept_eta(recorder), recorder.newest_steps(RECENT_STEPS)
        self._eta = Eta(config.run.steps, kept.facts)
        self._eta.replay((step.step, step.step_seconds) for step in newest)
        self._note_return(kept, newest[-1].step if newest else 0)
        self._last: StepCommitted | None = None
        self._committed_at = 0.0  # by a monotonic clock, as all times here
        self._sides: dict[int, list[str]] = {}  # kinds of plans, by the step that they follow
        self._paused_seconds, self._paused_since = 0.0, 0.0  # since the last commit; 0: not now

    def _note_return(self, kept: KeptEta, step: int) -> None:
        """The run has gone back to a checkpoint while nobody led it."""
        away_seconds = self._clock() - kept.at
        if step < kept.step and 0 <= away_seconds < LONGEST_RECOVERY_SECONDS:
            self._eta.step_done = kept.step
            self._eta.fault(step, away_seconds)

    def look(self, state: RunState, reason: str, now: float) -> None:
        """The run's state, and what it waits for: a pause isn't counted, nor is a wait for data or for nodes."""
        is_paused = state in ("pausing", "paused") or bool(reason)
        if is_paused and not self._paused_since:
            self._paused_since = now
        elif not is_paused and self._paused_since:
            self._paused_seconds += now - self._paused_since
            self._paused_since = 0.0

    def issued(self, plan: StepPlan) -> None:
        """A plan was sent to the ranks."""
        if plan.kind != "train":
            self._sides.setdefault(plan.step, []).append(plan.kind)

    def with_time_left(self, step: StepCommitted, held_out: int, now: float) -> StepCommitted:
        """A step that was committed `now`, with the time left after it; `held_out`: samples of an evaluation."""
        self.measure(step, now)
        found = self._eta.left(self._schedules(held_out))
        if found is None:
            return step
        left = {
            "time_left_seconds": found.expected,
            "time_left_best_seconds": found.best,
            "time_left_worst_seconds": found.worst,
        }
        return msgspec.structs.replace(step, values=step.values | left)

    def close(self) -> None:
        """Keep what was measured."""
        kept = KeptEta(self._eta.facts, self._eta.step_done, self._clock())
        self._recorder.set_meta(ETA_KEY, msgspec.json.encode(kept).decode())

    # ------------------------------------------------------------ measuring

    def measure(self, step: StepCommitted, now: float) -> None:
        """Learn from a step that was committed `now`."""
        last, sides = self._last, self._sides_before(step.step)
        other = max(now - self._committed_at - self._paused_seconds - step.step_seconds, 0.0)
        self._last, self._committed_at, self._paused_seconds = step, now, 0.0
        if last is not None and (step.generation != last.generation or step.step <= last.step):
            self._eta.fault(step.step - 1, other)
        elif last is not None and sides:
            self._share_out(sides, other)
        if last is not None and step.plan_version != last.plan_version and step.global_batch != last.global_batch:
            self._eta.change()
        self._eta.step(step.step, step.step_seconds)
        if last is not None and (sides or step.generation != last.generation):
            self.close()

    def _sides_before(self, step: int) -> list[str]:
        """Kinds of plans that were made between this step and the one before."""
        known = sorted(at for at in self._sides if at < step)
        return list(dict.fromkeys(kind for at in known for kind in self._sides.pop(at)))

    def _share_out(self, sides: Sequence[str], seconds: float) -> None:
        """Several plans have their time by what they took before, or alike."""
        plans = self._eta.facts.plans
        usual = {kind: sum(plans[kind]) / len(plans[kind]) for kind in sides if plans.get(kind)}
        whole = sum(usual.values()) if len(usual) == len(sides) else 0.0
        for kind in sides:
            self._eta.plan(kind, seconds * (usual[kind] / whole if whole > 0 else 1 / len(sides)))

    def _schedules(self, held_out: int) -> dict[str, Schedule]:
        """Return what the conductor will make of plans."""
        config, usual = self._config, self._eta.usual_seconds or 0.0
        batch = self._last.samples if self._last is not None and self._last.samples else 0
        evaluation = FORWARD_PART * usual * held_out / batch if batch else 0.0
        samples = config.samples.every_steps if config.samples.prompts else 0
        return {
            "evaluate": Schedule(config.evaluate.every_steps if held_out else 0, held_out > 0, evaluation),
            "checkpoint": Schedule(config.checkpoint.every_steps, config.checkpoint.at_end),
            "sample": Schedule(samples, samples > 0),
            "sync": Schedule(config.group.sync_weights_every if len(config.nodes) > 1 else 0),
        }


def _kept_eta(recorder: RunDb) -> KeptEta:
    """An estimate is no reason not to lead a run: what can't be read is measured again."""
    try:
        return msgspec.json.decode(recorder.meta(ETA_KEY) or "{}", type=KeptEta)
    except msgspec.MsgspecError:
        return KeptEta()


@dataclasses.dataclass(frozen=True)
class Links:
    """Links between the ranks of a group."""

    ranks: int = 0
    calibrated: tuple[LinkRate, ...] = ()  # empty if a link isn't calibrated, or there is none


def group_links(nodes: Mapping[int, str], profiles: Mapping[int, ProfileSummary], lead: str) -> Links:
    """Return the links of the group whose ranks are on these nodes; `profiles`: by rank."""
    known = links_of({node: profiles[rank] for rank, node in nodes.items() if rank in profiles}, lead)
    others = {*nodes.values()} - {lead}
    return Links(len(nodes), tuple(known[node] for node in sorted(others)) if others <= known.keys() else ())


def compared(part: RankStep, own: Ready | None, links: Links) -> RankStep:
    """Return a part with its device's peaks and its calibration as metrics; the part itself if nothing is known.

    `own`: what the rank said when it had loaded.
    """
    if own is None:
        return part
    values = _peaks(part, own) | _calibrated_speed(part, own) | _link_use(part, links)
    return msgspec.structs.replace(part, values=part.values | values) if values else part


def _peaks(part: RankStep, own: Ready) -> dict[str, float]:
    rate = part.values.get("tflops")
    if rate is None or own.compute is None:
        return {}
    return peak_parts(1e12 * rate, own.device, own.compute.dtype, own.profile)


def _calibrated_speed(part: RankStep, own: Ready) -> dict[str, float]:
    took = part.phases.forward + part.phases.backward
    expected = passes_seconds(part, own.profile) if own.profile is not None else None
    return {"calibrated_speed": expected / took} if expected is not None and took > 0 else {}


def _link_use(part: RankStep, links: Links) -> dict[str, float]:
    size = part.values.get("sum_bytes")
    if not size or not links.calibrated or part.phases.sync <= 0:
        return {}
    return {"link_use": sum_seconds(size, links.ranks, links.calibrated) / part.phases.sync}
