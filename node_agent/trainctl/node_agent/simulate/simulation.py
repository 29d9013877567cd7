"""A simulated run: its lead, which carries the real conductor's decisions out to simulated ranks and to the record, and
ranks, lead and time together, from the first step to the end of the run."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from trainctl.node_agent.conductor import events as conductor_events
from trainctl.node_agent.conductor import views
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.state import Progress
from trainctl.node_agent.planning.durable import Durable, RankSetting
from trainctl.node_agent.records.keys import DURABLE_KEY, settings_key
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.figures import Links, RunCosts, RunEta, compared, group_links
from trainctl.node_agent.runs.recovery import Backoff
from trainctl.node_agent.simulate.bulk_record import BulkRecord
from trainctl.node_agent.simulate.models import WORD_SECONDS, EventQueue
from trainctl.node_agent.simulate.scenario import Scenario
from trainctl.node_agent.simulate.simulated_rank import SimulatedRank, make_ranks
from trainctl.node_agent.simulate.simulated_reports import host_reading
from trainctl.node_agent.trainers.supervisor import SIMULATED_NOTICE
from trainctl.protocol import messages
from trainctl.protocol.analysis.rolling import STATISTICS_STEPS, StepStatistics
from trainctl.protocol.config.cluster_file import Prices
from trainctl.protocol.messages import events as run_events
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import VIEW_KEY, RecordReader
from trainctl.protocol.wire.codec import encode_json

STARTED_AT = 1767225600.0
"""Start of every simulation in Unix seconds: 1 January 2026, so that the same seed gives the same record."""
TIME_LEFT_STEPS = 10
"""Steps between estimates of the time left: they would take a tenth of the simulator's time."""
TTL_SECONDS = 60.0
"""Seconds in which a policy's command must take effect."""


class SimulatedLead:
    """One conductor with its ranks. `ended` says how it ended."""

    def __init__(
        self, conductor: Conductor, paths: RunPaths, recorder: BulkRecord, lead: str, queue: EventQueue, prices: Prices
    ) -> None:
        self.conductor, self.recorder, self.ranks = conductor, recorder, dict[int, SimulatedRank]()
        self.ended: conductor_events.Ended | None = None
        self.actions: dict[str, int] = {}  # commands of policies that were applied, by policy
        self._paths, self._lead, self._queue = paths, lead, queue
        self._costs = RunCosts(recorder, prices)
        self._eta = RunEta(recorder, conductor.config, lambda: self.at)
        newest = recorder.newest_steps(1000)
        conductor.proposals.curve.replay(newest)
        self._statistics = StepStatistics(newest[-STATISTICS_STEPS:])
        self._kept_durable: Durable | None = None
        self._sent: dict[str, conductor_events.Proposed] = {}
        self._before: dict[int, messages.RankView] = {}
        self._links: tuple[messages.Generation, Links] | None = None

    @property
    def at(self) -> float:
        """Unix seconds of the simulation."""
        return STARTED_AT + self._queue.now

    def feed(self, event: conductor_events.Input) -> None:
        """Give the conductor an event and carry out what it decides."""
        if self.ended is not None:
            return
        for decision in self.conductor.handle(event, self._queue.now):
            self._carry_out(decision)
        if not isinstance(event, messages.Soon | messages.Report):
            self._look()

    def _look(self) -> None:
        """Return whether the run's state or its settings are others: its cost and its time left follow them."""
        state = self.conductor.state
        self._costs.look(self.conductor.durable.settings, state, self.at)
        self._eta.look(state, self.conductor.reason, self._queue.now)

    def _carry_out(self, decision: conductor_events.Decision) -> None:
        match decision:  # by how often they come
            case conductor_events.RankDone(part, step):
                self.recorder.commit(step, [self._joined(part)], step.committed_at)
            case conductor_events.Issue(plan, durable, held):
                self._issue(plan, durable, held=held)
            case conductor_events.Commit(step, first):
                self._commit(step, first)
            case conductor_events.Persist(durable):
                self._keep_durable(durable)
            case conductor_events.Tell(rank, message):
                self.ranks[rank].take(message)
            case conductor_events.Start(rank):
                self.ranks[rank].start()
            case conductor_events.Kill(rank):
                self.ranks[rank].die("killed because it hung")
            case conductor_events.Ended():
                self.ended = decision
            case conductor_events.Retract(step):
                self.recorder.retract_after(step - 1)
            case conductor_events.Evaluated(step, loss, weight, seconds, values):
                self.recorder.evaluation(step, self.at, loss, weight, seconds, values)
            case conductor_events.Sampled(sample):
                self.recorder.sample(sample)
            case conductor_events.Drifted(step, by_rank):
                self.recorder.drifts(step, self.at, by_rank)
            case conductor_events.Happened():
                self.note(decision)
            case conductor_events.Proposed():
                self._propose(decision)
            case conductor_events.CommandEnded():
                self._end_command(decision)

    def _issue(self, plan: messages.StepPlan, durable: Durable, *, held: bool) -> None:
        self._keep_durable(durable)
        self._eta.issued(plan)
        self.recorder.plan(plan, self.at)
        if not held:
            for work in plan.work:
                self.ranks[work.rank].take(plan)

    def _commit(self, step: messages.StepCommitted, first: messages.RankStep) -> None:
        step = self._costs.with_cost(step)
        if step.step % TIME_LEFT_STEPS:
            self._eta.measure(step, self._queue.now)
        else:
            held_out = next((at.ready.held_out for at in self.conductor.ranks.values() if at.ready is not None), 0)
            step = self._eta.with_time_left(step, held_out, self._queue.now)
        self.recorder.commit(self._statistics.joined(step), [self._joined(first)], step.committed_at)

    def _joined(self, part: messages.RankStep) -> messages.RankStep:
        """Add what a calibrated rank's part is of its calibration."""
        ready = self.conductor.ranks[part.rank].ready
        if ready is None or ready.profile is None:
            return part
        if self._links is None or self._links[0] != part.generation:
            nodes = {rank: setting.node for rank, setting in self.conductor.durable.settings.live.items()}
            said = {rank: at.ready.profile for rank, at in self.conductor.ranks.items() if at.ready is not None}
            profiles = {rank: profile for rank, profile in said.items() if profile is not None}
            self._links = part.generation, group_links(nodes, profiles, self._lead)
        return compared(part, ready, self._links[1])

    # ------------------------------------------------------------ commands of policies

    def _propose(self, proposed: conductor_events.Proposed) -> None:
        """The command comes back to the conductor like a person's."""
        self._sent[proposed.id] = proposed
        fields = {field.name: getattr(proposed, field.name) for field in dataclasses.fields(proposed)}
        command = conductor_events.Commanded(**fields, expires=self._queue.now + TTL_SECONDS)
        self._queue.after(WORD_SECONDS, lambda: self.feed(command))

    def _end_command(self, ended: conductor_events.CommandEnded) -> None:
        sent = self._sent.pop(ended.id, None)
        if sent is None:
            return
        node, is_applied = sent.node or "", ended.state == "applied"
        if is_applied:
            self.actions[sent.by] = self.actions.get(sent.by, 0) + 1
        made = (
            ended.made or run_events.CommandApplied(node)
            if is_applied
            else run_events.CommandFailed(ended.reason, "", node)
        )
        severity: messages.Severity = "info" if is_applied else "warning"
        self.note(conductor_events.Happened(made, severity, sent.by, ended.step, sent.verb, ended.id, ended.state))

    # ------------------------------------------------------------ keeping

    def note(self, happened: conductor_events.Happened) -> None:
        """Keep an event."""
        fields = {field.name: getattr(happened, field.name) for field in dataclasses.fields(happened)}
        self.recorder.event(self.at, **fields, generation=self.conductor.durable.generation)

    def _keep_durable(self, durable: Durable) -> None:
        durable = msgspec.structs.replace(durable, seq=0)
        before = self._kept_durable
        if before is None or durable.settings is not before.settings:
            key = settings_key(durable.settings.plan_version)
            self.recorder.set_meta(key, msgspec.json.encode(durable.settings).decode())
            self._look()
        self._kept_durable = durable

    def view(self) -> messages.RunView:
        """The run as it is now, marked as simulated."""
        ranks = tuple(
            views.rank_view(self.conductor, rank, None, "", self._before.get(rank), self.at)
            for rank in sorted(self.conductor.ranks)
        )
        self._before = {view.rank: view for view in ranks}
        cost, directory = self._costs.cost, str(self._paths.directory)
        view = views.run_view(self.conductor, STARTED_AT, directory, ranks, self._lead, cost)
        return msgspec.structs.replace(view, simulated=True)

    def flush(self) -> None:
        """Write all of the record up to now, with the view."""
        if self._kept_durable is not None:
            self.recorder.set_meta(DURABLE_KEY, msgspec.json.encode(self._kept_durable).decode())
        self.recorder.set_meta(VIEW_KEY, encode_json(self.view()), own=True)
        self.recorder.flush()

    def close(self) -> None:
        """Keep what was measured, and close the record."""
        self._eta.close()
        self.flush()
        self.recorder.close()


TICK_SECONDS = 1.0
"""Between looks at deadlines, and messages of ranks that they are alive, while a rank has no plan."""
LONG_SECONDS = 5.0
"""Seconds between looks once a rank has been at a plan for longer: each second would cost more than the steps do."""
CALM_SECONDS = 30.0
"""Between looks at deadlines while all plans are shorter."""
READING_SECONDS = 60.0
"""Between readings of a machine."""
FIRST_SECONDS, FLUSH_SECONDS = 0.5, 4.0
"""Real seconds until the record is first written, and between further writes."""


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
    """Result of a simulation."""

    lead: SimulatedLead
    ended: conductor_events.Ended
    real_seconds: float  # that the simulation took
    simulated_seconds: float
    deaths: int
    returns: int  # to a checkpoint


class Simulation:
    """One run of a scenario, in an empty run directory."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        """Makes the directory if it isn't there. Raises RefusedError or InvalidInputError."""
        self.scenario, self.paths = scenario, RunPaths(directory)
        self.queue = EventQueue()
        self._ticked = -CALM_SECONDS
        self._backoff, self._returns = Backoff(lambda: self.queue.now), 0
        durable = restore.first_durable(scenario.config)
        restore.make_directory(self.paths, scenario.config).close()
        conductor = Conductor(directory.name, scenario.config, durable, Progress())
        self.lead = self._led(conductor)
        self.ranks = make_ranks(scenario, directory.name, STARTED_AT, self.queue, lambda event: self.lead.feed(event))
        self.lead.ranks = self.ranks
        self.lead.note(conductor_events.Happened(run_events.Notice(SIMULATED_NOTICE), "info", "simulator", 0))

    def _led(self, conductor: Conductor) -> SimulatedLead:
        node = conductor.durable.settings.ranks[0].node
        prices = self.scenario.cluster.prices
        return SimulatedLead(conductor, self.paths, BulkRecord(self.paths), node, self.queue, prices)

    # ------------------------------------------------------------ time

    def begin(self) -> None:
        """Start the trainers; `queue.step` then does one thing after another."""
        for rank in self.ranks.values():
            rank.start()
        self._tick()
        self._read()

    def play(self, on_record: Callable[[], object] = lambda: None) -> SimulatedRun:
        """To the end of the run; `on_record` is called once the record can be read. The record is closed then."""
        began = time.monotonic()
        due, said = began + FIRST_SECONDS, False
        self.begin()
        while self.lead.ended is None:
            for _ in range(1000):
                if self.lead.ended is not None or not self.queue.step():
                    break
            if time.monotonic() > due and self.lead.conductor.progress.step:
                self.lead.flush()
                if not said:
                    on_record()
                said = True
                due = time.monotonic() + FLUSH_SECONDS
            if self.lead.ended is not None and self.lead.conductor.goes_back:
                self._go_back(self.lead.ended.reason)
        self.lead.close()
        if not said:
            on_record()
        deaths = sum(rank.deaths for rank in self.ranks.values())
        return SimulatedRun(self.lead, self.lead.ended, time.monotonic() - began, self.queue.now, deaths, self._returns)

    def _tick(self) -> None:
        longest = max(rank.is_busy_for for rank in self.ranks.values())  # infinite: a rank has no plan
        busy_seconds = LONG_SECONDS if longest < inf else TICK_SECONDS
        if self.queue.now - self._ticked >= (busy_seconds if longest > LONG_SECONDS else CALM_SECONDS):
            self._ticked = self.queue.now
            for rank in self.ranks.values():
                if rank.alive and rank.is_busy_for > LONG_SECONDS:
                    self.lead.feed(rank.alive_message())
            self.lead.feed(conductor_events.Ticked())
        self.queue.after(TICK_SECONDS, self._tick)

    def _read(self) -> None:
        """A reading of each machine: only what is simulated is known."""
        for node, spec in zip(self.scenario.config.nodes, self.scenario.devices.values(), strict=True):
            self.lead.recorder.host(host_reading(node, self.lead.at, spec))
        self.queue.after(READING_SECONDS, self._read)

    # ------------------------------------------------------------ back to a checkpoint

    def _go_back(self, reason: str) -> None:
        """Take the run up from its newest checkpoint, as the lead's agent does."""
        due = self._backoff.take(self.paths.directory.name, self.lead.conductor.progress.step)
        if due is None:
            self.lead.ended = conductor_events.Ended("failed", f"{reason}; it went back to a checkpoint too often")
            return
        self._returns += 1
        actions = self.lead.actions
        self.lead.close()
        at_most = restore.rollback_step(self.paths)
        source = checkpoint_source.find(self.paths, "", at_most=at_most)
        nodes = tuple(self.scenario.config.nodes)
        opening = restore.old_run(self.paths, "", nodes, source, None, clock=lambda: STARTED_AT + self.queue.now)
        opening.recorder.close()
        self.lead = self._led(opening.conductor)
        self.lead.ranks, self.lead.actions = self.ranks, actions
        for notice in opening.notices:
            self.lead.note(conductor_events.Happened(run_events.Notice(notice), "info", "auto", source.step))
        progress = opening.conductor.progress
        for rank in self.ranks.values():
            self.queue.after(due - self.queue.now, partial(rank.start, progress.step, progress.cursor))


NEWEST_STEPS = 500
"""Newest steps whose median is given, so that the first ones, before shares have settled, don't count."""


def outcome(scenario: Scenario, played: SimulatedRun, paths: RunPaths) -> dict[str, Any]:
    """Return the outcome as one JSON object. Seconds are simulated ones, except `real_seconds`."""
    conductor, cost = played.lead.conductor, played.lead.view().cost
    with RecordReader(paths) as reader:
        last, totals = reader.last_step(), reader.totals()
        steps = reader.steps(max(last.step - NEWEST_STEPS, 0), NEWEST_STEPS)[0] if last is not None else ()
    median = statistics.median([step.step_seconds for step in steps]) if steps else None
    settings, samples = conductor.durable.settings, sum(step.samples for step in steps)
    rate = samples / sum(step.step_seconds for step in steps) if steps else None
    alone = {setting.node: rate_alone(scenario, rank, setting) for rank, setting in settings.ranks.items()}
    return {
        "simulated": True,
        "run": paths.directory.name,
        "run_directory": str(paths.directory),
        "state": played.ended.state,
        "reason": played.ended.reason,
        "seed": scenario.seed,
        "steps": conductor.progress.step,
        "global_batch": settings.global_batch,
        "seconds": played.simulated_seconds,
        "real_seconds": round(played.real_seconds, 3),
        "step_seconds": median,
        "samples_per_second": rate,
        "tokens_per_second": rate * scenario.config.data.sequence_length if rate is not None else None,
        "alone_samples_per_second": alone,
        "efficiency": rate / sum(alone.values()) if rate is not None else None,
        "sum_seconds": scenario.links.sum_seconds([*settings.live]),
        "time_in_steps": totals.step_seconds,
        "deaths": played.deaths,
        "generations": conductor.durable.generation.n,
        "returns": played.returns,
        "actions": {name.removeprefix("auto:"): count for name, count in sorted(played.lead.actions.items())},
        "shares": {setting.node: setting.share for setting in settings.ranks.values()},
        "micro_batches": {setting.node: setting.micro_in_force for setting in settings.ranks.values()},
        "cost": cost.spent if cost is not None else None,
        "currency": cost.currency if cost is not None else None,
        "loss": last.loss if last is not None else None,
    }


def rate_alone(scenario: Scenario, rank: int, setting: RankSetting) -> float:
    """Return the samples per second of one rank without a group, with the faster of the micro-batches that it ended
    with and that its share left of it: what the group has, the rank alone could have too."""
    device, batch = scenario.devices[rank], scenario.config.batch.global_
    rates = []
    for micro in {setting.micro_batch, setting.micro_in_force}:
        while micro > 1 and device.out_of_memory(micro):
            micro = (micro + 1) // 2
        rates.append(batch / (device.curve.share_seconds(batch, min(micro, batch)) + device.step_seconds))
    return max(rates)
