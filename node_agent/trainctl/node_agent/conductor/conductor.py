"""The conductor: the pure state machine that turns reports and commands into step plans; the clock is an argument.

It is the single writer of plans, so a change is atomic on all ranks by construction. Its parts share one state:
`rendezvous` makes generations, `failures` leads from one to the next, `pipeline` issues plans and commits steps,
`restarts` has ranks leave and come back, `commands` obeys commands, `shutdown` ends the run.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf

from trainctl.node_agent.autopilot.policy import Stepped
from trainctl.node_agent.conductor import side_plans
from trainctl.node_agent.conductor.commands import Commands
from trainctl.node_agent.conductor.endings import Final, Shutdown, StopTimeout
from trainctl.node_agent.conductor.events import (
    Commanded,
    Computing,
    Decision,
    Departing,
    Ended,
    Input,
    NodeReturned,
    Quorum,
    RankEnded,
    RankReturned,
    RankSilent,
    Tell,
    Ticked,
)
from trainctl.node_agent.conductor.failures import Failures, Hangs, Regroup
from trainctl.node_agent.conductor.group import Rank, Rendezvous
from trainctl.node_agent.conductor.in_flight import PlanInFlight
from trainctl.node_agent.conductor.pipeline import Pipeline
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.restarts import Departures, Restarts
from trainctl.node_agent.conductor.state import (
    CannotGoOnError,
    ConductorState,
    NobodyLeftError,
    Pending,
    Progress,
    Stage,
)
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.planning.lr_schedule import rate
from trainctl.node_agent.planning.share_edits import AWAY_SECONDS, fastest_micro
from trainctl.protocol import messages
from trainctl.protocol.batch.memory_estimate import copied_bytes
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import CommandApplied, NodeState, StepsStopped


class Conductor:
    """Leads one run. `handle` takes an event and gives decisions, to be carried out in order."""

    def __init__(
        self, run: str, config: RunFile, durable: Durable, progress: Progress,
        recent: tuple[messages.StepPlan, ...] | None = None,
    ) -> None:  # fmt: skip
        """`recent`: the newest train plans of the record, when a run continues where another conductor left it; its
        trainers then live. None: the trainers are being started."""
        self.run, self.config = run, config
        self._state = state = ConductorState(run, config, durable, progress)
        self._pending = Pending()
        self._pending.wants_pause = durable.mode == "paused"
        self._followed: Durable | None = None  # the durable state whose changes have been followed
        self._rendezvous, self._proposals = Rendezvous(state, recent is not None), Proposals(state)
        self._departures = Departures(state, self._rendezvous)
        self._pipeline = Pipeline(
            state, self._rendezvous, self._pending, self._proposals, self._departures, recent or ()
        )
        self._commands = Commands(state, self._pending, self._pipeline, self._rendezvous, self._proposals)
        self._shutdown = Shutdown(state, self._pending, self._rendezvous, recent is not None)
        self._stop_timeout = StopTimeout(state, self._pipeline.deadlines, self._pipeline.writes)
        self._restarts = Restarts(state, self._rendezvous, self._proposals)
        deadlines = self._pipeline.deadlines
        self.hangs = Hangs(state, self._rendezvous, deadlines, self._restarts, self._shutdown)
        self._regroup = Regroup(state, self._rendezvous, self._pipeline, self._restarts)
        self._failures = Failures(
            state, self._rendezvous, deadlines, self._restarts, self.hangs, self._shutdown, self._regroup
        )

    def replay(self, steps: Sequence[messages.StepCommitted]) -> None:
        """The newest steps of the record, oldest first, before any event: what the policies know of the loss curve."""
        self._proposals.replay(steps)

    # ------------------------------------------------------------ the outside

    def handle(self, event: Input, now: float) -> list[Decision]:
        """Decisions that follow from `event` at `now` (seconds of a monotonic clock)."""
        state = self._state
        if state.stage == "over":
            self._handle_late(event)
            return state.take()
        if isinstance(event, messages.Message) and (at := self._rendezvous.ranks.get(event.rank)) is not None:
            at.heard = now
        try:
            self._dispatch(event, now)
            if state.durable.writing is not None and self._pipeline.writes.look():
                self._conclude_write(now)
        except NobodyLeftError as error:
            self._shutdown.go_back(str(error))
        except CannotGoOnError as error:
            self._shutdown.fail(str(error))
        if state.durable is not self._followed:
            self._follow_changes(now)
        return state.take()

    def _handle_late(self, event: Input) -> None:
        """The run is over."""
        match event:
            case Commanded(args=verbs.Stop()) if self.goes_back:
                self._shutdown.stop_instead(event.id)
                self._state.decide(Ended("stopped", self.reason))
            case Commanded():
                self._commands.refuse(event, "run", f"the run is {self.final}")
            case (
                messages.Ready() | messages.Alive() | messages.Sealed() | messages.Soon()
                | messages.CheckpointProgress() | messages.Checkpointed() | messages.CheckpointCopy()
                | messages.ProfileWritten() | messages.Report() | messages.Fenced() | messages.Offered()
                | messages.Formed() | messages.GroupFailed() | messages.TrainerFailed() | RankEnded() | RankSilent()
                | RankReturned() | Departing() | NodeReturned() | Computing() | Quorum() | Ticked()
            ):  # fmt: skip
                pass

    def _follow_changes(self, now: float) -> None:
        """The event has changed the durable state, as every outcome of a command does; or the run is stopping."""
        state = self._state
        if state.durable.rollback is not None and state.stage not in ("leaving", "over"):
            self._shutdown.roll_back(f"rollback to step {state.durable.rollback.step}")
        self._stop_timeout.look(now)
        if state.ends:
            self._proposals.note_ends()
        self._followed = state.durable if state.durable.mode != "stopping" else None

    @property
    def durable(self) -> Durable:
        return self._state.durable

    @property
    def progress(self) -> Progress:
        return self._state.progress

    @property
    def stage(self) -> Stage:
        return self._state.stage

    @property
    def final(self) -> Final | None:
        return self._shutdown.final

    @property
    def reason(self) -> str:
        """Why the run failed, or makes no steps; empty if neither."""
        lacking = self._state.lacking or self._state.waiting
        return self._shutdown.reason or (lacking if self.final is None else "")

    @property
    def samples(self) -> int | None:
        """N, or what all ranks have of a growing file; None until that is known."""
        ready = next((at.ready.samples for at in self.ranks.values() if at.ready is not None), None)
        sealed = self._pipeline.data.samples
        return ready if sealed is None else sealed

    @property
    def ranks(self) -> dict[int, Rank]:
        """All of the run's, drained ones included."""
        return self._rendezvous.ranks

    @property
    def engine(self) -> str:
        """What the newest generation sums by; "none" for one rank alone."""
        return self._rendezvous.engine

    def curve(self, rank: int) -> PassCurve | None:
        """Seconds of a rank's passes, if it is known at several micro-batches."""
        return self._pipeline.rates.curve(rank)

    def most_micro(self, rank: int) -> int | None:
        """The largest micro-batch that a rebalance may choose for a rank; None if it chooses none."""
        return self._pipeline.most_micro((rank,)).get(rank)

    @property
    def is_mixed(self) -> bool:
        """Whether live ranks are of unlike backends."""
        return len({at.ready.backend for at in self._rendezvous.live.values() if at.ready is not None}) > 1

    @property
    def goes_back(self) -> bool:
        """Whether the run, though over for this conductor, is to be taken up from its newest checkpoint."""
        return self._shutdown.goes_back

    @property
    def has_halved(self) -> bool:
        """Return whether it has ended for lack of memory, after its last rank's micro-batch was halved."""
        return self._shutdown.has_halved

    @property
    def goes_back_by_command(self) -> bool:
        """Whether that is a rollback: no rank has failed."""
        return self.goes_back and self.durable.rollback is not None

    @property
    def state(self) -> messages.RunState:
        """The run's state in the words that clients see."""
        if self.goes_back:
            return "starting"
        if self.final is not None:
            return self.final if self.stage == "over" or self.final == "failed" else "stopping"
        if self.durable.mode == "stopping":
            return "stopping"
        if self._pending.wants_pause:
            return "paused" if self.durable.mode == "paused" else "pausing"
        return "running" if self.stage == "formed" and not self._state.lacking else "starting"

    @property
    def learning_rate(self) -> float:
        """Of the step in progress, or of the next one."""
        step = min(self.progress.step + 1, self.config.run.steps)
        return rate(self.durable.settings.lr, self.config.optimizer, self.config.run.steps, step)

    def policy_statuses(self) -> tuple[messages.PolicyStatus, ...]:
        """What each policy sees and would do next, without its newest commands."""
        return self._proposals.policy_statuses()

    @property
    def not_taken(self) -> dict[str, str]:
        """The verbs that the run does not take, each with why."""
        return self._commands.not_taken

    def silence_limit_seconds(self, rank: int, *, in_touch: bool) -> float:
        """How long a trainer may say nothing; the longest while it loads for the first time."""
        return self._restarts.silence_limit_seconds(rank, in_touch=in_touch)

    def draining(self, rank: int) -> str:
        """Until when the group has a rank of a node whose drain was accepted; empty if there is no such drain."""
        node = self.durable.settings.ranks[rank].node
        staged = any(isinstance(command.args, verbs.Drain) and command.node == node for command in self._pending.staged)
        return self._pipeline.deadlines.end_of_part if staged or rank in self._departures.due else ""

    def writing(self, rank: int) -> str:
        """How far a rank's checkpoint is, in words; empty if it writes none."""
        return self._pipeline.writes.doing(rank)

    def is_starting(self, rank: int) -> bool:
        """Whether a lost rank's trainer has been started again and is to load yet."""
        return self._restarts.is_starting(rank)

    def leave_out(self, ranks: Mapping[int, str]) -> None:
        """Say why ranks are lost from the beginning."""
        for rank, why in ranks.items():
            self.ranks[rank].why = why

    # ------------------------------------------------------------ events

    def _dispatch(self, event: Input, now: float) -> None:
        match event:  # by how often they come
            case messages.Soon():
                if self._pipeline.on_soon(event, now):
                    self._advance(now)
            case messages.Report():
                self._on_report(event, now)
            case messages.Ready():
                self._on_loaded(event.rank, event, None, now)
            case messages.Alive():
                if event.rank in self.ranks:
                    self.ranks[event.rank].doing = f"{event.phase} of step {event.step}"
                    self.ranks[event.rank].loading = event.detail
                    self._pipeline.deadlines.stalls.heard(event, now)
                if event.preflight is not None:
                    self._on_preflight(event.rank, event.preflight)
                if event.ready is not None:
                    self._on_loaded(event.rank, event.ready, event.generation, now)
            case messages.Sealed():
                self._on_sealed(event, now)
            case messages.CheckpointProgress():
                self._pipeline.writes.on_progress(event, now)
            case messages.Checkpointed():
                if self._pipeline.writes.on_checkpointed(event):
                    self._conclude_write(now)
            case messages.CheckpointCopy():
                self._pipeline.writes.on_copy(event)
            case messages.ProfileWritten():
                side_plans.profiled(self._state, event)
            case messages.Fenced():
                self._regroup.on_fenced(event, now)
            case messages.Offered():
                self._rendezvous.on_offered(event, now)
            case messages.Formed():
                if self._rendezvous.on_formed(event, now):
                    self._departures.release(now)
                    self._pipeline.begin(now)
                    self._advance(now)
            case messages.GroupFailed():
                self._regroup.on_group_failed(event, now)
            case messages.TrainerFailed():
                self._failures.on_trainer_failed(event, now)
            case Commanded():
                self._on_command(event, now)
            case RankEnded():
                self._pipeline.writes.forget_copy(event.rank)
                side_plans.profile_lost(self._state, event.rank)
                self._failures.on_ended(event, now)
            case RankSilent():
                self._failures.on_silent(event, now)
            case RankReturned():
                self._on_returned(event.rank, now)
            case Departing(why=why):
                self._departures.want(why)
                if not self._let_depart(now) and self.stage != "leaving":
                    self._advance(now)
            case NodeReturned(rank=rank):
                if self._departures.come_back(rank):
                    self._restarts.start_returned(rank, now)
            case Computing(rank=rank):
                self._restarts.computes(rank)
            case Quorum(lacking=lacking):
                self._on_quorum(lacking, now)
            case Ticked():
                self._on_tick(now)

    def _on_sealed(self, sealed: messages.Sealed, now: float) -> None:
        """A rank that has other data than the others is refused, like one with another model."""
        at = self.ranks.get(sealed.rank)
        if at is None or self.stage == "leaving":
            return
        before = at.sealed
        differs = self._pipeline.data.on_sealed(sealed)
        if differs and sealed.rank not in self._rendezvous.live:
            return  # it says so again when it is to take part
        if differs and self._restarts.can_spare(sealed.rank):
            self._failures.refuse({sealed.rank: differs}, now)
        elif differs:
            raise CannotGoOnError(differs)
        elif sealed != before:
            self._advance(now)

    def _let_depart(self, now: float) -> bool:
        """Release ranks that leave; True if some left just now, as a paused run has no boundary to wait for."""
        is_paused = self.durable.mode == "paused" and self.stage == "formed" and self._pipeline.is_still
        leaves = is_paused and bool(self._departures.due)
        if leaves:
            self._departures.apply(self.progress.step + 1)
            self._state.persist()
        self._departures.release(now)
        return leaves

    def _on_quorum(self, lacking: str, now: float) -> None:
        if bool(lacking) != bool(self._state.lacking):
            self._state.happen(StepsStopped(lacking), "error" if lacking else "good")
        self._state.lacking = lacking
        self._advance(now)

    def _on_loaded(self, rank: int, ready: messages.Ready, generation: messages.Generation | None, now: float) -> None:
        known = self.ranks[rank].ready if rank in self.ranks else None
        if ready.profile is not None:
            self._pipeline.rates.calibrated(rank, ready.profile)
        copied = copied_bytes(self._state.config, ready.backend, ready.device, ready.parameters)
        self._pipeline.peaks.loaded(ready, copied)
        if known is None and self.stage == "loading" and self.progress.step == self.durable.first_step:
            self._take_profile(ready)
        if self._rendezvous.meet(rank, ready, generation):
            self._regroup.begin(now)
        elif rank in self._rendezvous.returning and known is None:
            if generation is not None:  # the same process as before
                self._ask_for_reports(rank)
            self._advance(now)

    def _on_preflight(self, rank: int, preflight: messages.Preflight) -> None:
        """While ranks of a new group load and calibrate: refuse at once what the group would be refused for."""
        probed = self._rendezvous.take_preflight(rank, preflight)
        if len(probed) > 1:
            side_plans.check_preflights(self._state, probed)

    def _take_profile(self, ready: messages.Ready) -> None:
        """Before the first step: the micro-batch that the run file leaves to a rank's profile."""
        edit = fastest_micro(self.durable.settings, self.config, ready)
        if edit is not None:
            self._state.persist(settings=edit.settings)
            self._state.happen(edit.change)

    def _ask_for_reports(self, rank: int) -> None:
        """A rank that takes part no more repeats its newest reports, so that no part of a step is missing."""
        if self.stage in ("fencing", "offering", "forming", "formed"):
            self._state.decide(Tell(rank, messages.Fence(run=self.run, generation=self.durable.generation)))

    def _on_report(self, report: messages.Report, now: float) -> None:
        done = self._pipeline.on_report(report, now)
        if done is None or self.stage == "leaving":  # then every command has its outcome
            return
        if report.kind == "train":
            self._restarts.stepped(done.ranks)
            if self.durable.mode == "running" and done.plan.finishes is None:
                self._proposals.ask(self._stepped(done))
        if report.kind == "probe":
            self._failures.refuse(side_plans.probe(self._state, done.plan, done.reports), now)
        of = self._pipeline
        failed = side_plans.conclude(self._state, of.rates, self._proposals, of.writes, done.plan, done.reports)
        self._call_stop_off(failed)
        self._advance(now)

    def _call_stop_off(self, failed: str) -> None:
        """A stop that wants a checkpoint, and that has `failed` to get it."""
        if failed and self.durable.mode == "stopping" and self.stage != "leaving":
            self._commands.call_stop_off(failed)

    def _conclude_write(self, now: float) -> None:
        """A checkpoint may be complete: another one may be due, or the run's end."""
        self._call_stop_off(self._pipeline.writes.conclude())
        if self.stage != "leaving":
            self._advance(now)

    def _stepped(self, done: PlanInFlight) -> Stepped:
        """What policies may ask about a step; nothing is worked out before."""
        of, ranks = self._pipeline, done.ranks
        asked = partial(of.rates.of, ranks), partial(of.peaks.of, ranks), partial(of.most_micro, ranks)
        return Stepped(done.plan, done.reports, *asked)

    def _on_returned(self, rank: int, now: float) -> None:
        """Whatever was said on the lost connection is asked for again by a fence, or said again."""
        at = self.ranks.get(rank)
        if self.stage == "leaving" and at is not None and not at.ended:
            self._shutdown.tell(rank)
        elif self.stage == "fencing" and rank in self._rendezvous.awaited:
            self._ask_for_reports(rank)  # the fence was sent over the connection that is lost
        elif self.stage not in ("loading", "leaving") and rank in self._rendezvous.live:
            self._state.happen(NodeState(self.durable.settings.label(rank), "trainer-back"), "warning")
            self._regroup.form_again(now)
        elif rank in self._rendezvous.returning:
            self._ask_for_reports(rank)

    def _on_command(self, command: Commanded, now: float) -> None:
        command = self._proposals.arrived(command)
        if isinstance(command.args, verbs.Stop) and self.goes_back:
            self._shutdown.stop_instead(command.id)
            return
        if isinstance(command.args, verbs.Admit) and self.stage != "leaving":
            after = self._restarts.try_again(command.node, now)
            if after:
                made = CommandApplied(command.node or "", after)
                self._state.end(command.id, "applied", self.progress.step, made=made)
                return
        self._commands.take(command, self.state, now)
        if self.durable.mode == "stopping" and self.stage == "loading" and not self._rendezvous.adopts:
            self._shutdown.leave("stopped")  # the trainers are still loading: there is nothing to save
        self._advance(now)

    def _on_tick(self, now: float) -> None:
        for rank in self._rendezvous.unanswered(now, self._rendezvous.silent_seconds(now)):
            self._failures.on_silent(RankSilent(rank, "has not answered a fence"), now)
        late = self._rendezvous.overdue(now) or self._pipeline.deadlines.overdue(now)
        if late:
            self._regroup.leave(late, now)
        self._let_depart(now)
        if self.stage != "leaving":
            self._restarts.start_due(now)
        self._pipeline.deadlines.tell_slow(now)
        self._failures.look_for_hung(now)
        if self._commands.expire(now):
            self._advance(now)
        self._give_up_stop(now)

    def _give_up_stop(self, now: float) -> None:
        """A stop ends, even if ranks are hung or unreachable."""
        lost_seconds, deadlines = self._stop_timeout.lost_seconds(now), self._pipeline.deadlines
        if lost_seconds:
            writing = self._pipeline.writes.ranks
            owes = bool(writing) or self._pipeline.periodic.owes_checkpoint(self.progress.step)
            awaited = deadlines.awaited or writing
            self._shutdown.give_up(self._not_heard(awaited, now), lost_seconds, owes_checkpoint=owes)

    def _not_heard(self, awaited: list[int], now: float) -> list[int]:
        """Those among the awaited that say nothing at all; all of them if each is still heard from."""
        silent_seconds = self._rendezvous.silent_seconds(now)
        return [rank for rank in awaited if silent_seconds.get(rank, inf) > AWAY_SECONDS] or awaited

    def _advance(self, now: float) -> None:
        """Issue the next plan, or do what the boundary asks for instead."""
        resumes, self._commands.wants_new_generation = self._commands.wants_new_generation, False
        match "form" if resumes else self._pipeline.advance(now):
            case "form":
                self._pipeline.abandon()
                if resumes:
                    self._pipeline.take_back(now)
                self._rendezvous.form(self._rendezvous.members, now)
            case "pause":
                self._commands.enter_pause(now)
            case "stopped" | "finished" as final:
                self._shutdown.leave(final)
            case None:
                pass
