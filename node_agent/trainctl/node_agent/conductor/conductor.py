"""The conductor: the pure state machine that turns reports and commands into step plans. Its clock is in its state.

It is the single writer of plans, so a change is atomic on all ranks by construction. Its parts share one state:
`group` makes generations, `failures` leads from one to the next or ends the run, `pipeline` issues plans and commits
steps, `restarts` has ranks leave and come back, `commands` obeys commands.
"""

from collections.abc import Iterable, Mapping
from math import inf

from trainctl.node_agent.conductor import side_plans
from trainctl.node_agent.conductor.commands import Commands
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
from trainctl.node_agent.conductor.failures import Failures, RunEnding, StopTimeout
from trainctl.node_agent.conductor.group import Group
from trainctl.node_agent.conductor.pipeline import Pipeline
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.restarts import Departures, Restarts
from trainctl.node_agent.conductor.stages import Stage
from trainctl.node_agent.conductor.state import (
    CannotGoOnError,
    ConductorState,
    Final,
    NobodyLeftError,
    PlanInFlight,
    Progress,
)
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.planning.share_edits import AWAY_SECONDS, fastest_micro
from trainctl.protocol import messages
from trainctl.protocol.batch.memory_estimate import copied_bytes
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import NodeState, StepsStopped


class Conductor:
    """Conducts one run until all its ranks have left. Its parts are read by its views."""

    def __init__(
        self,
        run: str,
        config: RunFile,
        durable: Durable,
        progress: Progress,
        recent: Iterable[messages.StepPlan] | None = None,
    ) -> None:
        """`recent`: the newest train plans of the record, when a run continues where another conductor left it; its
        trainers then live. None: the trainers are being started."""
        self.run, self.config = run, config
        self.shared = state = ConductorState(run, config, durable, progress, adopts=recent is not None)
        self.progress, self.ranks = state.progress, state.ranks
        self._followed: Durable | None = None  # the durable state whose changes have been followed
        self.proposals, self.departures = Proposals(state), Departures(state)
        self.pipeline = Pipeline(state, self.proposals, self.departures, recent or ())
        self.deadlines, self.writes = self.pipeline.deadlines, self.pipeline.writes
        self.restarts = Restarts(state, self.proposals)
        self.commands = Commands(state, self.pipeline, self.proposals, self.restarts)
        self.ending = RunEnding(state)
        self._stop_timeout = StopTimeout(state, self.deadlines, self.writes)
        self._group = Group(state, self.pipeline, self.restarts)
        self._failures = Failures(state, self.deadlines, self.restarts, self.ending, self._group)
        self.hangs = self._failures.hangs

    # ------------------------------------------------------------ the outside

    def handle(self, event: Input, now: float) -> list[Decision]:
        """Decisions that follow from `event` at `now` (seconds of a monotonic clock)."""
        state = self.shared
        state.now = now
        if state.stage == "over":  # only commands still get an answer
            if isinstance(event, Commanded) and isinstance(event.args, verbs.Stop) and self.goes_back:
                self.ending.stop_instead(event.id)
                state.decide(Ended("stopped", self.reason))
            elif isinstance(event, Commanded):
                self.commands.refuse(event, "run", f"the run is {self.final}")
            return state.take()
        if isinstance(event, messages.Message) and (at := state.ranks.get(event.rank)) is not None:
            at.heard = now
        try:
            self._dispatch(event)
            if state.durable.writing is not None and self.writes.look():
                self._on_write_done()
        except NobodyLeftError as error:
            self.ending.go_back(str(error))
        except CannotGoOnError as error:
            self.ending.fail(str(error))
        if state.durable.rollback is not None and state.final is None:
            self.ending.roll_back(f"rollback to step {state.durable.rollback.step}")
        self.ending.end_without_ranks()
        if state.durable is not self._followed:
            self._follow_changes()
        return state.take()

    def _follow_changes(self) -> None:
        """The event has changed the durable state, as every outcome of a command does; or the run is stopping."""
        state = self.shared
        self._stop_timeout.look()
        if state.ends:
            self.proposals.note_ends()
        self._followed = state.durable if state.durable.mode != "stopping" else None

    @property
    def durable(self) -> Durable:
        return self.shared.durable

    @property
    def stage(self) -> Stage:
        return self.shared.stage

    @property
    def final(self) -> Final | None:
        """Return how the run ended, None until it is to end."""
        return self.shared.final

    @property
    def goes_back(self) -> bool:
        """Return whether the run, though over for this conductor, is to be taken up from its newest checkpoint."""
        return self.shared.goes_back

    @property
    def reason(self) -> str:
        """Return why the run failed, or makes no steps; empty if neither."""
        lacking = self.shared.lacking or self.shared.waiting
        return self.shared.reason or (lacking if self.final is None else "")

    @property
    def state(self) -> messages.RunState:
        """The run's state in the words that clients see."""
        if self.goes_back:
            return "starting"
        if self.final is not None:
            return self.final if self.stage == "over" or self.final == "failed" else "stopping"
        if self.durable.mode == "stopping":
            return "stopping"
        if self.shared.pending.wants_pause:
            return "paused" if self.durable.mode == "paused" else "pausing"
        return "running" if self.stage == "formed" and not self.shared.lacking else "starting"

    def leave_out(self, ranks: Mapping[int, str]) -> None:
        """Say why ranks are lost from the beginning."""
        for rank, why in ranks.items():
            self.ranks[rank].why = why

    # ------------------------------------------------------------ events

    def _dispatch(self, event: Input) -> None:
        match event:  # by how often they come
            case messages.Soon():
                if self.pipeline.in_flight.on_soon(event):
                    self._advance()
            case messages.Report():
                done = self.pipeline.on_report(event)
                if done is not None and self.stage != "leaving":  # then every command has its outcome
                    self._on_plan_done(done)
            case messages.Ready():
                self._on_loaded(event.rank, event, None)
            case messages.Alive():
                self._on_alive(event)
            case messages.Sealed():
                self._on_sealed(event)
            case messages.CheckpointProgress():
                self.writes.on_progress(event)
            case messages.Checkpointed():
                if self.writes.on_checkpointed(event):
                    self._on_write_done()
            case messages.CheckpointCopy():
                self.writes.on_copy(event)
            case messages.ProfileWritten():
                side_plans.profiled(self.shared, event)
            case messages.Fenced():
                self._group.on_fenced(event)
            case messages.Offered():
                self._group.on_offered(event)
            case messages.Formed():
                if self._group.on_formed(event):
                    self.departures.release()
                    self.pipeline.begin()
                    self._advance()
            case messages.GroupFailed():
                self._group.on_group_failed(event)
            case messages.TrainerFailed():
                self._failures.on_trainer_failed(event)
            case Commanded():
                self._on_command(event)
            case RankEnded():
                self.writes.copies.pop(event.rank, None)
                side_plans.profile_failed(self.shared, event.rank, "its trainer ended before the trace was written")
                self._failures.on_ended(event)
            case RankSilent():
                self._failures.on_silent(event)
            case RankReturned():
                self._on_returned(event.rank)
            case Departing(why=why):
                self.departures.want(why)
                self._let_depart()
                if self.stage != "leaving":
                    self._advance()
            case NodeReturned(rank=rank):
                if self.departures.come_back(rank):
                    self.restarts.start_returned(rank)
            case Computing(rank=rank):
                self.restarts.computes(rank)
            case Quorum(lacking=lacking):
                self._on_quorum(lacking)
            case Ticked():
                self._on_tick()

    def _on_alive(self, alive: messages.Alive) -> None:
        if (at := self.ranks.get(alive.rank)) is not None:
            at.doing = f"{alive.phase} of step {alive.step}"
            at.loading = alive.detail
            self.deadlines.stalls.heard(alive)
        if alive.preflight is not None:
            # While ranks of a new group load and calibrate: refuse at once what the group would be refused for.
            probed = self._group.take_preflight(alive.rank, alive.preflight)
            if len(probed) > 1:
                side_plans.check_preflights(self.shared, probed)
        if alive.ready is not None:
            self._on_loaded(alive.rank, alive.ready, alive.generation)

    def _on_sealed(self, sealed: messages.Sealed) -> None:
        """A rank that has other data than the others is refused, like one with another model."""
        at = self.ranks.get(sealed.rank)
        if at is None or self.stage == "leaving":
            return
        before = at.sealed
        differs = self.pipeline.data.on_sealed(sealed)
        if differs and sealed.rank not in self.shared.live:
            return  # it says so again when it is to take part
        if differs and self.restarts.can_spare(sealed.rank):
            self._failures.refuse({sealed.rank: differs})
        elif differs:
            raise CannotGoOnError(differs)
        elif sealed != before:
            self._advance()

    def _let_depart(self) -> None:
        """Release ranks that leave; a paused run has no boundary to wait for."""
        is_paused = self.durable.mode == "paused" and self.stage == "formed" and self.pipeline.in_flight.is_empty
        if is_paused and self.departures.due:
            self.departures.apply(self.progress.step + 1)
            self.shared.persist()
        self.departures.release()

    def _on_quorum(self, lacking: str) -> None:
        if bool(lacking) != bool(self.shared.lacking):
            self.shared.happen(StepsStopped(lacking), "error" if lacking else "good")
        self.shared.lacking = lacking
        self._advance()

    def _on_loaded(self, rank: int, ready: messages.Ready, generation: messages.Generation | None) -> None:
        is_known = rank in self.ranks and self.ranks[rank].ready is not None
        if ready.profile is not None:
            self.pipeline.rates.calibrated(rank, ready.profile)
        copied = copied_bytes(self.config, ready.backend, ready.device, ready.parameters)
        self.pipeline.peaks.loaded(ready, copied)
        if not is_known and self.stage == "loading" and self.progress.step == self.durable.first_step:
            edit = fastest_micro(self.durable.settings, self.config, ready)
            if edit is not None:  # before the first step, the micro-batch that the run file leaves to its profile
                self.shared.persist(settings=edit.settings)
                self.shared.happen(edit.change)
        if self._group.meet(rank, ready, generation):
            self._group.begin()
        elif rank in self.shared.returning and not is_known:
            if generation is not None:  # the same process as before
                self._ask_for_reports(rank)
            self._advance()

    def _ask_for_reports(self, rank: int) -> None:
        """A rank that takes part no more repeats its newest reports, so that no part of a step is missing."""
        if self.stage in ("fencing", "offering", "forming", "formed"):
            self.shared.decide(Tell(rank, messages.Fence(run=self.run, generation=self.durable.generation)))

    def _on_plan_done(self, done: PlanInFlight) -> None:
        """All ranks have reported a plan."""
        if done.plan.kind == "train":
            self.restarts.stepped(done.ranks)
            if self.durable.mode == "running" and done.plan.finishes is None:
                self.proposals.ask(self.pipeline.stepped(done))
        if done.plan.kind == "probe":
            self._failures.refuse(side_plans.probe(self.shared, done.plan, done.reports))
        self._call_end_off(self.pipeline.side_plans.take_results(done.plan, done.reports))
        self._advance()

    def _call_end_off(self, failed: str) -> None:
        """An end that wants a checkpoint, whose write has `failed` on all ranks."""
        step, side_plans = self.shared.planned_step, self.pipeline.side_plans
        is_its_own = side_plans.done.get("checkpoint") == step and side_plans.owes_checkpoint(step)
        if failed and is_its_own and self.shared.is_ending and self.stage != "leaving":
            self.commands.call_end_off(failed)

    def _on_write_done(self) -> None:
        """A checkpoint may be complete: another one may be due, or the run's end."""
        self._call_end_off(self.writes.end())
        if self.stage != "leaving":
            self._advance()

    def _on_returned(self, rank: int) -> None:
        """Ask again, by a fence, for what was said on the lost connection, or say it again."""
        at = self.ranks.get(rank)
        if self.stage == "leaving" and at is not None and not at.ended:
            self.ending.dismiss(rank)
        elif self.stage == "fencing" and rank in self.shared.awaited:
            self._ask_for_reports(rank)  # the fence was sent over the connection that is lost
        elif self.stage not in ("loading", "leaving") and rank in self.shared.live:
            self.shared.happen(NodeState(self.durable.settings.label(rank), "trainer-back"), "warning")
            self._group.form_again()
        elif rank in self.shared.returning:
            self._ask_for_reports(rank)

    def _on_command(self, command: Commanded) -> None:
        command = self.proposals.arrived(command)
        if isinstance(command.args, verbs.Stop) and self.goes_back:
            self.ending.stop_instead(command.id)
            return
        self.commands.take(command, self.state)
        if self.durable.mode == "stopping" and self.stage == "loading" and not self.shared.adopts:
            self.ending.dismiss_ranks("stopped")  # the trainers are still loading: there is nothing to save
        self._advance()

    def _on_tick(self) -> None:
        for rank in self._group.unanswered():
            self._failures.on_silent(RankSilent(rank, "has not answered a fence"))
        late = self._group.overdue() or self.deadlines.overdue()
        if late:
            self._group.fail_generation(late)
        self._let_depart()
        if self.stage != "leaving":
            for rank in self.restarts.start_due():
                self.deadlines.stalls.forget(rank)
        self.deadlines.report_slow()
        self._failures.look_for_hung()
        if self.commands.expire():
            self._advance()
        self._give_up_stop()

    def _give_up_stop(self) -> None:
        """A stop ends, even if ranks are hung or unreachable: without those that say nothing at all, or without all
        that are awaited if each is still heard from."""
        lost_seconds = self._stop_timeout.lost_seconds()
        if lost_seconds:
            writing, silent_seconds = self.writes.ranks, self.shared.silent_seconds()
            owes = bool(writing) or self.pipeline.side_plans.owes_checkpoint(self.progress.step)
            awaited = self.deadlines.awaited or writing
            silent = [rank for rank in awaited if silent_seconds.get(rank, inf) > AWAY_SECONDS]
            self.ending.give_up(silent or awaited, lost_seconds, owes_checkpoint=owes)

    def _advance(self) -> None:
        """Issue the next plan, or do what the boundary asks for instead."""
        resumes = self.commands.wants_new_generation
        self.commands.wants_new_generation = False
        match "form" if resumes else self.pipeline.advance():
            case "form":
                self.pipeline.abandon()
                if resumes:
                    self.pipeline.take_back()
                self._group.form(self.shared.members)
            case "pause":
                self.commands.enter_pause()
            case "stopped" | "finished" as final:
                self.ending.dismiss_ranks(final)
            case None:
                pass
