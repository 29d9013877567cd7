"""One run that this agent leads: carries the conductor's decisions out to the record, the ranks and the clients."""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from trainctl.node_agent.conductor import events as conductor_events
from trainctl.node_agent.conductor import views
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.state import rank_step
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.readings.step_readings import NewestReadings, StepReadings
from trainctl.node_agent.records.keys import DURABLE_KEY, settings_key
from trainctl.node_agent.records.replication import Copies
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs.figures import Links, RunCosts, RunEta, compared, group_links
from trainctl.node_agent.trainers.rank_ports import RankPort
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import LiveFacts
from trainctl.protocol.analysis.rolling import STATISTICS_STEPS, StepStatistics
from trainctl.protocol.analysis.straggler import StragglerWatch
from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config.cluster_file import Prices
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages.events import AnyEvent
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import LEAD_VIEW_KEY, VIEW_KEY
from trainctl.protocol.wire.codec import encode_json

STALL_SECONDS, CATCH_UP_SECONDS = 2.0, 1.0
"""An agent that has not looked for this many seconds was stopped itself, and then needs this many to receive what it
missed."""
VIEW_SECONDS = 0.25
"""Least seconds between two looks at whether steps alone have changed more of the view than their progress."""
CURVE_STEPS = 1000
"""Newest steps of the record from which policies learn the loss curve again."""
COMMITTED_STEPS = 64
"""Newest steps to which late reports are added."""
UNCOMMITTED_PARTS = 64
"""Newest late reports kept of steps that no other rank had reported."""


@dataclasses.dataclass(frozen=True)
class LedRun:
    """A run as its lead has it: what a session is made of."""

    conductor: Conductor
    paths: RunPaths
    recorder: RunDb
    copies: Copies  # the record's, on the run's other nodes
    ports: Mapping[int, RankPort]  # to every rank
    lead: str  # this node
    publisher: Publisher
    started_at: float  # Unix seconds
    prices: Prices = Prices()  # noqa: RUF009  immutable; of all nodes
    simulated: bool = False  # its trainers train nothing


@dataclasses.dataclass(frozen=True)
class RunListener:
    """Callbacks of an agent for its run, beside the record, the ranks and the clients."""

    command_ended: Callable[[conductor_events.CommandEnded], Awaitable[None]]
    generation: Callable[[messages.Generation], object] = lambda _: None  # before it is used
    proposed: Callable[[conductor_events.Proposed], object] = lambda _: None  # by a policy
    ended: Callable[[], object] = lambda: None  # the run has


class Session:
    """The thin edge around one Conductor. Everything happens on the agent's event loop, one event at a time."""

    def __init__(self, led: LedRun, listener: RunListener) -> None:
        conductor, recorder = led.conductor, led.recorder
        self.conductor, self.paths, self.recorder, self.started_at = conductor, led.paths, recorder, led.started_at
        self.run, self.copies, recorder.on_kept = conductor.run, led.copies, led.copies.add
        self.ports, self._lead = led.ports, led.lead
        self._publisher, self._listener, self._is_simulated = led.publisher, listener, led.simulated
        self._costs = RunCosts(recorder, led.prices)
        self._eta = RunEta(recorder, conductor.config)
        state = recorder.last_state()
        self.last_step: messages.StepCommitted | None = state.step
        self.rank_steps: dict[int, messages.RankStep] = {part.rank: part for part in state.rank_steps}
        self.last_commit_monotonic = time.monotonic()
        self.ended: conductor_events.Ended | None = None
        self.doing: messages.PlanKind = "train"  # kind of the newest plan
        self._uncommitted: deque[messages.RankStep] = deque(maxlen=UNCOMMITTED_PARTS)
        self._announced: list[messages.Live] = []  # once it is in the record
        self._readings, self._newest_readings = StepReadings(), NewestReadings()
        self._links: tuple[messages.Generation, Links] | None = None
        newest = recorder.newest_steps(CURVE_STEPS)
        conductor.proposals.curve.replay(newest)
        self._committed = deque(newest[-COMMITTED_STEPS:], maxlen=COMMITTED_STEPS)
        self._statistics = StepStatistics(newest[-STATISTICS_STEPS:])
        self._stragglers = StragglerWatch()
        self._kept_durable: Durable | None = None
        self._turn, self.is_closed = asyncio.Lock(), False
        self._taker: asyncio.Task[None] | None = None  # whose turn it is
        self._pids: dict[int, int | None] = {}
        self._watched_monotonic = self._watching_since = time.monotonic()
        self._lacking = ""
        self._unrecorded = self._begun_checkpoint()  # plans of those whose writers wait for the record
        self._telling = set[asyncio.Task[None]]()  # kept, or they could be collected before they are done
        self._unstarted: dict[int, str] = {}  # why, for ranks that could not be started again
        self._away: dict[int, str] = {}  # why, for ranks that have been silent lately
        self._view, self._is_view_old = self._look({}), False
        self._shown, self._looked_monotonic = self._view, time.monotonic()  # the view as clients have it
        self._keep_view()

    # ------------------------------------------------------------ ranks

    async def start_trainers(self, resume_from: Path | None) -> None:
        """Start every rank of this node; the others' agents have started theirs."""
        for rank, port in self.ports.items():
            try:
                port.start(resume_from)
            except RefusedError as error:
                await self.feed(conductor_events.RankEnded(rank, False, f"could not be started: {error}"))

    async def watch_trainers(self) -> None:
        """Notice the ranks whose process has ended, and those that say nothing."""
        now = time.monotonic()
        if now - self._watched_monotonic > STALL_SECONDS:
            self._watching_since = now
        self._watched_monotonic = now
        for rank in [*self.conductor.ranks]:
            if rank in self._unstarted:
                await self.feed(conductor_events.RankEnded(rank, False, self._unstarted.pop(rank)))
            if self.conductor.ranks[rank].ended:
                continue
            look = self.ports[rank].look()
            self._pids[rank] = look.pid
            if (ending := look.ending) is not None:
                for report in self.ports[rank].last_reports():
                    await self.feed(report)
                await self.feed(conductor_events.RankEnded(rank, ending.clean, ending.why, ending.memory))
            elif (silent_seconds := self._silent_seconds(rank)) > 0:
                alone = not any(port.in_touch for other, port in self.ports.items() if other != rank)
                in_touch = self.ports[rank].in_touch
                await self.feed(conductor_events.RankSilent(rank, self._away[rank], silent_seconds, in_touch, alone))

    def _silent_seconds(self, rank: int) -> float:
        """For how long a trainer that lives has been silent, if that is too long; then also notice where it was."""
        heard = self.conductor.ranks[rank].heard or 0.0
        # An agent that has just come back gives its trainers as long again: they are still to attach to it.
        silent_seconds = time.monotonic() - max(heard, self._watching_since, self.ports[rank].reached_monotonic)
        if silent_seconds < self.conductor.restarts.silence_limit_seconds(rank, in_touch=self.ports[rank].in_touch):
            self._away.pop(rank, None)
            return 0.0
        if rank not in self._away:
            self._away[rank] = self.ports[rank].doing()
        return silent_seconds

    @property
    def is_steady(self) -> bool:
        """Return whether the run makes steps or is paused, each of its ranks lives, and no command waits."""
        if self.view.state not in ("running", "paused") or self.conductor.shared.pending.waiting:
            return False
        return all(rank.state in ("run", "paused") and rank.pid is not None for rank in self.view.ranks)

    async def tick(self) -> None:
        """Let time pass for the conductor; not at once after this agent itself was stopped for a while, for what has
        been said meanwhile is still to be read."""
        if time.monotonic() > self._watching_since + CATCH_UP_SECONDS:
            await self.feed(conductor_events.Ticked())

    async def lacks(self, lacking: str) -> None:
        """Take what is missing for a majority of nodes, empty if nothing: no step is made without a majority where one
        is wanted."""
        if lacking != self._lacking:
            self._lacking = lacking
            await self.feed(conductor_events.Quorum(lacking))

    async def _start_again(self, rank: int) -> None:
        try:
            await self.ports[rank].start_again()
        except RefusedError as error:
            self._unstarted[rank] = f"could not be started: {error}"

    # ------------------------------------------------------------ events and decisions

    async def feed(self, event: conductor_events.Input) -> None:
        """Give the conductor an event and carry out what it decides: all of it, even if the caller is cancelled, and
        before the next event has its turn. What carries decisions out must not call it: it would wait for itself."""
        assert self._taker is not asyncio.current_task(), "an event was fed while another was handled"
        await asyncio.shield(self._take(event))

    async def _take(self, event: conductor_events.Input) -> None:
        async with self._turn:
            self._taker = asyncio.current_task()
            try:
                decisions = self.conductor.handle(event, time.monotonic())
                for decision in decisions:
                    if not self.is_closed or isinstance(decision, conductor_events.CommandEnded):
                        await self._carry_out(decision)
                await self.announce()
            finally:
                self._taker = None
            if not self.is_closed:
                self._look_at_record()
                self._show(event, is_step=_is_step(event, decisions))
                await self.copies.flush()
        if self.ended is not None:
            self._listener.ended()

    async def announce(self) -> None:
        """Publish what has been kept, once it is in the record, as far as that can be written now."""
        if not self.is_closed:
            await self.recorder.settled()
        announced, self._announced = self._announced, []
        for message in announced:
            self._publisher.publish(message)

    def _publish(self, message: messages.Live) -> None:
        """Now, or with what is being carried out."""
        if self._taker is not None or self._announced:
            self._announced.append(message)
        else:
            self._publisher.publish(message)

    def _show(self, event: conductor_events.Input, *, is_step: bool) -> None:
        if isinstance(event, messages.Message):
            self._away.pop(event.rank, None)
        if isinstance(event, messages.Fenced | messages.Report):
            self._keep_late(event.rank, event.reports if isinstance(event, messages.Fenced) else [event])
        self._is_view_old = True
        if not is_step or time.monotonic() >= self._looked_monotonic + VIEW_SECONDS:
            self._publish_view()

    def _keep_late(self, rank: int, reports: Sequence[messages.Report]) -> None:
        """Reports that the conductor did not count still belong in the record: of a plan that is over, or repeated
        because the agent may have missed them."""
        node, counted = self.conductor.durable.settings.ranks[rank].node, self.rank_steps.get(rank)
        known = (counted.step, counted.generation) if counted is not None else None
        late = [report for report in reports if report.kind == "train" and (report.step, report.generation) != known]
        for part in [rank_step(report, node) for report in late]:
            self._uncommitted.append(part)
            for step in self._committed:
                if (step.step, step.generation) == (part.step, part.generation):
                    self.recorder.add_part(part, step.committed_at)

    def _keep_evaluation(self, made: conductor_events.Evaluated) -> None:
        at = time.time()
        self.recorder.evaluation(made.step, at, made.loss, made.weight, made.seconds, made.values)
        if made.pairs:
            self.recorder.pairs(messages.HeldOutPairs(made.step, at, made.pairs))

    async def _carry_out(self, decision: conductor_events.Decision) -> None:
        match decision:
            case conductor_events.Issue(plan, durable, held):
                self._keep_durable(durable)
                self.doing = plan.kind
                self._eta.issued(plan)
                self.recorder.plan(plan, time.time(), durable=bool(plan.commands))
                await self.announce()
                await self.copies.flush()  # so that no one has a plan without the settings it is made from
                if not held:
                    await self._send_plan(plan)
                if plan.kind == "checkpoint":
                    self._unrecorded.append(plan)
            case conductor_events.Persist(durable):
                self._keep_durable(durable)
            case conductor_events.Tell(rank, message):
                await self.announce()  # what it follows from is in the record first
                await self._tell(rank, message)
            case conductor_events.Start(rank):
                await self.announce()
                await self._start_again(rank)
            case conductor_events.Kill(rank):
                await self.announce()
                await self.ports[rank].kill()
            case conductor_events.Retract(step):
                self._retract(step)
            case conductor_events.Commit(step, first):
                self._commit(step, first)
            case conductor_events.RankDone(part, step):
                self._add_part(part, step)
            case conductor_events.Evaluated():
                self._keep_evaluation(decision)
            case conductor_events.Sampled(sample):
                self.recorder.sample(sample)
                self._publish(sample)
            case conductor_events.Drifted(step, by_rank):
                self.recorder.drifts(step, time.time(), by_rank)
            case conductor_events.CommandEnded():
                await self.announce()
                await self._listener.command_ended(decision)
            case conductor_events.Proposed():
                self._listener.proposed(decision)
            case conductor_events.Happened():
                self.note(decision)
            case conductor_events.Ended():
                self.ended = decision

    def _begun_checkpoint(self) -> list[messages.StepPlan]:
        """The plan of the checkpoint that is being written since another agent's life, if there is one."""
        writing, plan = self.conductor.durable.writing, self.recorder.checkpoint_plan()
        if writing is None or plan is None:
            return []
        return [plan] if (plan.generation, plan.seq) == (writing.generation, writing.seq) else []

    def _look_at_record(self) -> None:
        """Once the step of a planned checkpoint is in the record, have the disk keep it and tell the writers so. No
        step waits for that."""
        self._unrecorded = [plan for plan in self._unrecorded if self._is_current(plan)]
        if not self._unrecorded or self.recorder.is_refused:
            return
        for plan in [plan for plan in self._unrecorded if self.conductor.progress.step >= plan.step]:
            self._unrecorded.remove(plan)
            task = asyncio.create_task(self._tell_recorded(plan))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_recorded(self, plan: messages.StepPlan) -> None:
        """If the disk fails, or other agents would refuse a plan of that generation, the writers hear nothing, and
        make do with the records of their own nodes."""
        await self.recorder.settled()
        if self.recorder.is_refused:
            self._unrecorded.append(plan)
            return
        try:
            await asyncio.to_thread(self.recorder.sync)
        except OSError:
            return
        async with self._turn:  # no event makes the generation an older one between the look and the message
            for rank in plan.writers:
                if not self.is_closed and self._is_current(plan):
                    await self.ports[rank].tell(msgspec.structs.replace(plan, recorded=True))

    def _is_current(self, plan: messages.StepPlan) -> bool:
        return plan.generation == self.conductor.durable.generation

    async def _send_plan(self, plan: messages.StepPlan) -> None:
        for work in plan.work:
            await self.ports[work.rank].tell(plan)  # a trainer that is away is fenced when it is back

    async def _tell(self, rank: int, message: messages.ToTrainer) -> None:
        if not await self.ports[rank].tell(message) and isinstance(message, messages.Leave):
            await self.ports[rank].end()

    def read(self, reading: messages.HostReading) -> None:
        """A reading of a node's machine: kept in the record, and with the step that is being made."""
        self.recorder.host(reading)
        self._costs.read(reading)
        self._newest_readings.take(reading)
        if self.view.state == "running":
            self._readings.take(reading, self.conductor.progress.step + 1)

    def _joined(self, part: messages.RankStep) -> messages.RankStep:
        """Add its machine's metrics, and what they are of its device's peak and of its calibration."""
        ready = self.conductor.ranks[part.rank].ready
        part = compared(part, ready, self._links_of(part.generation))
        return self._readings.joined(part, ready.device if ready is not None else None)

    def _commit(self, step: messages.StepCommitted, first: messages.RankStep) -> None:
        step = self._eta.with_time_left(self._costs.with_cost(step), self._held_out, time.monotonic())
        step, first = self._statistics.joined(step), self._joined(first)
        early = [part for part in self._uncommitted if (part.step, part.generation) == (step.step, step.generation)]
        self.recorder.commit(step, [first, *early], step.committed_at)
        self.last_step, self.rank_steps[first.rank] = step, first
        self.last_commit_monotonic = time.monotonic()
        self._committed.append(step)
        self._publish(step)
        self._publish(first)
        self._stragglers.add(first, step, self.conductor.shared.live)

    def _links_of(self, generation: messages.Generation) -> Links:
        """The calibrated links of a group."""
        if self._links is None or self._links[0] != generation:
            nodes = {rank: setting.node for rank, setting in self.conductor.durable.settings.live.items()}
            self._links = generation, group_links(nodes, self.profiles, self._lead)
        return self._links[1]

    @property
    def profiles(self) -> dict[int, ProfileSummary]:
        """The ranks' calibrations, of those that have one."""
        found = {rank: at.ready.profile for rank, at in self.conductor.ranks.items() if at.ready is not None}
        return {rank: profile for rank, profile in found.items() if profile is not None}

    def live_facts(self, alerts: tuple[messages.AlertView, ...]) -> LiveFacts:
        """Return what a diagnosis of the run needs that its record doesn't have; `alerts`: open ones."""
        is_running = self.view.state == "running"
        age_seconds = time.monotonic() - self.last_commit_monotonic if is_running else None
        return LiveFacts(self.view, alerts, self.profiles, self._newest_readings.by_node, age_seconds, self.doing)

    @property
    def _held_out(self) -> int:
        """Samples of an evaluation; 0 until a rank has loaded."""
        return next((at.ready.held_out for at in self.conductor.ranks.values() if at.ready is not None), 0)

    def _retract(self, step: int) -> None:
        self.recorder.retract_after(step - 1)
        stands = [committed for committed in self._committed if committed.step < step]
        self._committed = deque(stands, maxlen=COMMITTED_STEPS)
        self.last_step = stands[-1] if stands else self.recorder.last_state().step

    def _add_part(self, part: messages.RankStep, step: messages.StepCommitted) -> None:
        part = self._joined(part)
        self.recorder.add_part(part, step.committed_at)
        known = self.rank_steps.get(part.rank)
        if known is None or part.step >= known.step:
            self.rank_steps[part.rank] = part
        self._publish(part)
        self._stragglers.add(part, step, self.conductor.shared.live)

    def note(self, happened: conductor_events.Happened) -> None:
        """Keep and publish an event of this run."""
        generation = self.conductor.durable.generation
        fields = {field.name: getattr(happened, field.name) for field in dataclasses.fields(happened)}
        self._publish(self.recorder.event(time.time(), **fields, generation=generation))

    def happened(self, data: AnyEvent, severity: messages.Severity = "info", by: str = "auto") -> None:
        """Keep and publish an event of the newest committed step."""
        self.note(conductor_events.Happened(data, severity, by, self.conductor.progress.step))

    # ------------------------------------------------------------ keeping

    def _keep_durable(self, durable: Durable) -> None:
        """Every plan has a seq of its own in the journal, so what differs by no more than that is already kept."""
        durable = msgspec.structs.replace(durable, seq=0)
        before = self._kept_durable
        if before is None or durable.settings != before.settings:
            key = settings_key(durable.settings.plan_version)
            self.recorder.set_meta(key, msgspec.json.encode(durable.settings).decode())
        if before is None or durable.generation != before.generation:
            self._listener.generation(durable.generation)
        if durable != before:
            self.recorder.set_meta(DURABLE_KEY, msgspec.json.encode(durable).decode())
            self._kept_durable = durable

    @property
    def view(self) -> messages.RunView:
        """The run as it is now."""
        if self._is_view_old and not self.is_closed:
            self._view = self._look({view.rank: view for view in self._view.ranks})
            self._is_view_old = False
        return self._view

    def _look(self, before: Mapping[int, messages.RankView]) -> messages.RunView:
        ranks = tuple(
            views.rank_view(
                self.conductor, rank, self._pids.get(rank), self._away.get(rank, ""), before.get(rank), time.time()
            )
            for rank in sorted(self.conductor.ranks)
        )
        self._eta.look(self.conductor.state, self.conductor.reason, time.monotonic())
        cost = self._costs.look(self.conductor.durable.settings, self.conductor.state, time.time())
        directory = str(self.paths.directory)
        view = views.run_view(self.conductor, self.started_at, directory, ranks, self._lead, cost)
        slow = self._stragglers.named
        straggler = slow if slow is not None and view.state == "running" and slow.rank in view.reporting else None
        return msgspec.structs.replace(view, simulated=self._is_simulated, straggler=straggler)

    def _publish_view(self) -> None:
        before, self._shown, self._looked_monotonic = self._shown, self.view, time.monotonic()
        if not views.same_but_progress(before, self._shown):
            self._keep_view()
            self._publisher.publish(self._shown.without_passes_of(before))

    def _keep_view(self) -> None:
        text = encode_json(self.view)
        self.recorder.set_meta(VIEW_KEY, text, own=True)
        self.recorder.set_meta(LEAD_VIEW_KEY, text)

    def close(self, kept_on: str = "") -> None:
        """End the commands that wait, and write no more to the record. `kept_on`: the node whose agent leads the run
        from here on, where this copy of the record ends."""
        if not self.is_closed:
            view, self.is_closed = self.view, True
            if kept_on:
                reason = f"{kept_on} leads it; its record there goes on, this copy ends here"
                self._view = msgspec.structs.replace(view, state="stopped", reason=reason)
            self._keep_view()
            self._eta.close()
            self.recorder.close()


def _is_step(event: conductor_events.Input, decisions: Sequence[conductor_events.Decision]) -> bool:
    """Return whether an event is a part of a step, and nothing but a step follows from it."""
    if not isinstance(event, messages.Soon | messages.Report):
        return False
    plans = [decision.plan for decision in decisions if isinstance(decision, conductor_events.Issue)]
    steps = conductor_events.Issue | conductor_events.Commit | conductor_events.RankDone
    is_plain = all(plan.kind == "train" and not plan.commands for plan in plans)
    return is_plain and all(isinstance(decision, steps) for decision in decisions)


class Conducting(Protocol):
    """The part of an agent that leads."""

    @property
    def session(self) -> Session | None: ...
    @property
    def is_busy(self) -> bool: ...
