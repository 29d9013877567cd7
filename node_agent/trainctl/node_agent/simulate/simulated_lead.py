"""The lead of a simulated run: carries the real conductor's decisions out to simulated ranks and to the record."""

import dataclasses

import msgspec

from trainctl.node_agent.conductor import events as conductor_events
from trainctl.node_agent.conductor import views
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.records.keys import DURABLE_KEY, settings_key
from trainctl.node_agent.runs.figures import Links, RunCosts, RunEta, compared, group_links
from trainctl.node_agent.simulate.bulk_record import BulkRecord
from trainctl.node_agent.simulate.models import WORD_SECONDS, EventQueue
from trainctl.node_agent.simulate.simulated_rank import SimulatedRank
from trainctl.protocol import messages
from trainctl.protocol.analysis.rolling import STATISTICS_STEPS, StepStatistics
from trainctl.protocol.config.cluster_file import Prices
from trainctl.protocol.messages import events as run_events
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import VIEW_KEY
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
