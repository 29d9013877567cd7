"""The pipeline of a run: what is planned and issued next, and how it continues from what a fence leaves.

A plan is issued when every rank has said that it is about to need one (`Soon`), so a command waits for no more than the
step in progress, and the plan arrives while that step still synchronises and updates.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Literal

import msgspec

from trainctl.node_agent.autopilot.policy import Replayed, Stepped, barred_size
from trainctl.node_agent.conductor import side_plans
from trainctl.node_agent.conductor.background_writes import BackgroundWrites
from trainctl.node_agent.conductor.deadlines import Deadlines
from trainctl.node_agent.conductor.events import Issue, caused
from trainctl.node_agent.conductor.in_flight import Commits, Half, InFlight
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.restarts import Departures
from trainctl.node_agent.conductor.side_plans import SidePlans
from trainctl.node_agent.conductor.state import EXPIRED, ConductorState, NobodyLeftError, PlanInFlight, SideKind
from trainctl.node_agent.planning import edits, plans, share_edits
from trainctl.node_agent.planning.durable import Settings
from trainctl.node_agent.planning.rank_models import MemoryPeaks, Rates
from trainctl.node_agent.planning.share_edits import Facts
from trainctl.protocol.config.policies import AUTHOR
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Fenced, Report, Sealed, StepPlan, verbs
from trainctl.protocol.messages.events import RankChanged


class DataSupply:
    """Supply of data from a growing file: how much each rank can train on, and whether all ranks have the same of it.

    A step is planned only when all live ranks have its samples, so ranks that wait for data wait for a plan: commands,
    and everything else that happens between steps, go on as usual.
    """

    def __init__(self, state: ConductorState) -> None:
        self._state = state
        self._known: dict[int, tuple[str, int]] = {}  # by number of chunks: their digest, and the rank that said so

    def on_sealed(self, sealed: Sealed) -> str:
        """Take what a rank has. Gives why it can't take part, if another rank had other chunks before it."""
        digest, rank = self._known.setdefault(sealed.chunks, (sealed.digest, sealed.rank))
        if digest != sealed.digest:
            names = self._state.settings.label(sealed.rank), self._state.settings.label(rank)
            return f"the growing data of {names[0]} and {names[1]} differ within their first {sealed.chunks} chunks"
        self._state.ranks[sealed.rank].sealed = sealed
        return ""

    def lacking(self, stop: int) -> str:
        """Return what a growing file lacks for the positions below `stop`; empty if all live ranks have them."""
        live = [at.sealed for at in self._state.live.values()]
        if all(sealed is not None and (sealed.ended or sealed.samples >= stop) for sealed in live):
            return ""
        smallest = min(sealed.samples if sealed is not None else 0 for sealed in live)
        return f"waiting for data: {smallest:,} samples sealed, the next step needs {stop:,}"

    @property
    def samples(self) -> int | None:
        """Samples that all live ranks have; None if the file doesn't grow."""
        sealed = [at.sealed for at in self._state.live.values()]
        return min((each.samples for each in sealed if each is not None), default=0) if any(sealed) else None


Wish = Literal["form", "pause", "stopped", "finished"]
"""Action of the conductor at a boundary that has no plan to issue."""


class Pipeline:
    """Issues plans and takes what ranks report on them."""

    def __init__(
        self, state: ConductorState, proposals: Proposals, departures: Departures, recent: Iterable[StepPlan]
    ) -> None:
        """`recent`: the newest train plans of the record, oldest first."""
        self._state, self._proposals, self._departures = state, proposals, departures
        self.rates, self.peaks = Rates(), MemoryPeaks()
        self._commits, self.in_flight = Commits(state, recent), InFlight(state)
        self.writes, self.data = BackgroundWrites(state), DataSupply(state)
        self.side_plans = SidePlans(state, proposals, self.rates, self.writes)
        self.deadlines = Deadlines(state, self.in_flight, self.rates)
        self._half: Half | None = None
        self._unfinished: tuple[StepPlan, Half | None] | None = None  # a step to be finished, or made again

    def facts(self) -> Facts:
        state = self._state
        models = self.rates.of(state.ranks)
        ready = {rank: ready for rank, ready in state.ready.items() if rank not in state.durable.departed}
        return Facts(models, state.members, ready, state.silent_seconds(), self.most_micro(state.ranks))

    def most_micro(self, ranks: Iterable[int]) -> dict[int, int]:
        """The largest micro-batch of calibrated ranks whose own is chosen: by memory, and by what failed lately."""
        settings, kept = self._state.settings.ranks, self._state.durable.policies.get("micro-batch")
        limits = {rank: self.peaks.most_micro(rank) for rank in ranks if settings[rank].auto_micro}
        sizes = {rank: most for rank, most in limits.items() if most is not None}
        barred = {rank: barred_size(kept.memory, rank, self._state.progress.step) for rank in sizes} if kept else {}
        return {rank: min(most, max(1, (barred.get(rank) or most + 1) - 1)) for rank, most in sizes.items()}

    # ------------------------------------------------------------ the next plan

    def advance(self) -> Wish | None:
        """Issue the next plan if its time has come, or say what is to be done instead."""
        state = self._state
        if state.stage != "formed" or not self.in_flight.may_issue:
            return None
        state.waiting = ""
        self.side_plans.schedule_ending(state.planned_step)
        if self._unfinished is not None and "probe" not in state.pending.scheduled:
            self._issue_unfinished(*self._unfinished)
            return None
        self._end_evaluations_of_nothing()
        is_writing, stopping = self.writes.now is not None, state.durable.mode == "stopping"
        kind = state.pending.next_side({"checkpoint"} if is_writing else ())
        if kind is None:
            if stopping or (state.planned_step >= state.config.run.steps and not state.pending.wants_pause):
                is_done = self.in_flight.is_empty and not is_writing
                return ("stopped" if stopping else "finished") if is_done else None
            if state.pending.wants_pause:
                return "pause" if self.in_flight.is_empty else None
            if state.lacking:
                return None
            if (state.wants_new_group or self._departures.due or state.returning) and not self._change_group():
                return None
        if not state.is_current:
            return "form"
        if kind is not None:
            self._issue_side(kind)
        elif self._is_supplied():
            self._apply_staged()
            plan = self._next_train_plan()
            if state.durable.paused_ids:
                state.keep(paused_ids=())
            self._issue(plan)
        return None

    def _end_evaluations_of_nothing(self) -> None:
        """Fail the commands that were taken while it wasn't known that no sample is held out."""
        commands = self._state.pending.side["evaluate"]
        if commands and (why := side_plans.why_no_evaluation(self._state)):
            self._state.end_all(commands, "failed", self._state.progress.step, why)

    def _is_supplied(self) -> bool:
        """Return whether all ranks have the samples of the next step. Commands that it carries don't wait with it: as
        in a pause, the next plan is journaled with them."""
        state = self._state
        state.waiting = self._lacks_data()
        carried = any(command.step > state.planned_step for command in state.durable.carried.values())
        if state.waiting and (state.pending.staged or carried) and self.in_flight.is_empty:
            self.hold_next_plan()
            state.waiting = self._lacks_data()
        return not state.waiting

    def _lacks_data(self) -> str:
        """Return what is missing for the next step with the edits that it takes up."""
        if not self._state.config.data.growing:
            return ""
        return self.data.lacking(self._state.planned_cursor + self._state.folded(self.facts()).global_batch)

    def _change_group(self) -> bool:
        """Take up edits that change the live ranks, once the step in progress, of the group as it is, is done."""
        if self.in_flight.is_empty:
            self._apply_staged()
            self._departures.apply(self._state.planned_step + 1)
            self.take_back()
            self._state.persist()
        return self.in_flight.is_empty

    def take_back(self) -> None:
        """Ranks that were lost and are there again; one that doesn't fit any more stays out."""
        state = self._state
        for rank in state.returning:
            label = state.settings.label(rank)
            if state.silent_seconds().get(rank, 0.0) > share_edits.AWAY_SECONDS:
                state.ranks[rank].forget()  # gone once more: it is back when it says so
                continue
            try:
                edit = share_edits.take_back(state.settings, rank, self.facts(), state.config)
            except InvalidInputError as error:
                state.keep(settings=share_edits.give_up(state.settings, rank))
                state.happen(RankChanged((label,), "not-admitted", error.problem), "error", state.planned_step)
                continue
            self._take_settings(edit.settings)
            change = msgspec.structs.replace(edit.change, returned=label)
            state.happen(change, "good", state.planned_step + 1, verb="admit")

    def _next_train_plan(self) -> StepPlan:
        step, durable = self._state.planned_step + 1, self._state.durable
        carried = [id for id, command in durable.carried.items() if command.step == step]
        self._state.keep(seq=durable.seq + 1)
        ids = dict.fromkeys([*durable.paused_ids, *carried])
        return self._maker(step, ids).train()

    def _maker(self, step: int, commands: Iterable[str]) -> plans.PlanMaker:
        state = self._state
        return plans.PlanMaker(state.run, state.durable, state.config, step, state.planned_cursor, tuple(commands))

    def _issue_unfinished(self, plan: StepPlan, half: Half | None) -> None:
        """The step that the last generation left: what its batch lacks, or all of it. Only the comparison of models
        comes before it, for ranks may be new."""
        self._unfinished = None
        self._state.keep(seq=self._state.durable.seq + 1)
        durable = self._state.durable
        self._issue(plans.finishing(plan, durable, *half) if half is not None else plans.again(plan, durable))

    def hold_next_plan(self) -> None:
        """While paused the next plan is journaled at once, and with it the commands in it are applied."""
        self._apply_staged()
        plan = self._next_train_plan()
        self._state.keep(paused_ids=plan.commands)
        self._state.decide(Issue(plan, self._state.durable, held=True))
        self._state.end_carried(plan.step)

    def _issue_side(self, kind: SideKind) -> None:
        commands = self._state.pending.take_side(kind)
        for command in commands:
            self._state.carry(command, self._state.planned_step)
        self._state.keep(seq=self._state.durable.seq + 1)
        maker = self._maker(self._state.planned_step, (command.id for command in commands))
        match kind:
            case "probe" | "sync":
                plan = maker.plan(kind)
            case "measure":
                plan = maker.measure()
            case "evaluate":
                plan = maker.evaluate(self._state.any_ready.held_out)
            case "sample":
                args = commands[0].args if commands else verbs.SampleModel()  # without a command, as the run file says
                assert isinstance(args, verbs.SampleModel)
                plan = maker.sample(args, commands[0].node if commands else None)
            case "defragment":
                plan = maker.defragment({command.node for command in commands})
            case "profile":
                args = commands[0].args
                assert isinstance(args, verbs.Profile)
                plan = maker.profile(args)
            case "checkpoint":
                plan = maker.checkpoint(self.writes.failing)
        self._issue(plan)

    def _issue(self, plan: StepPlan) -> None:
        if plan.kind == "train":
            self._commits.issued(plan)
            self._state.planned_step, self._state.planned_cursor = plan.step, plan.cursor + plan.global_batch
            self.side_plans.schedule_periodic(plan.step)
        self.in_flight.add(plan)
        self._state.decide(Issue(plan, self._state.durable))

    def _apply_staged(self) -> None:
        """Fold the staged edits into the settings; the next step carries them."""
        state, step = self._state, self._state.planned_step + 1
        staged, state.pending.staged = state.pending.staged, []
        if not staged:
            return
        facts = self.facts()
        for command in staged:
            if command.expires <= state.now:
                state.end(command.id, "expired", reason=EXPIRED)
                continue
            try:
                facts = dataclasses.replace(facts, by_person=not command.by.startswith(AUTHOR))
                edit = edits.apply(state.settings, command.args, command.node, step, state.config, facts)
            except InvalidInputError as error:  # an edit before it expired, and this one stood on it
                state.end(command.id, "failed", reason=error.problem, field=error.where)
                continue
            self._take_settings(edit.settings)
            state.carry(command, step, caused(edit.change, command.reason))

    def _take_settings(self, settings: Settings) -> None:
        if settings.global_batch != self._state.settings.global_batch:
            mean_weight = self._state.any_ready.mean_weight
            self._state.keep(divisor=plans.divisor(settings.global_batch, mean_weight))
        self._state.keep(settings=settings)

    # ------------------------------------------------------------ what ranks say

    def on_report(self, report: Report) -> PlanInFlight | None:
        """The plan that the report completes, if it is the last one of it."""
        in_flight = self.in_flight.on_report(report)
        if in_flight is None:
            return None
        self.deadlines.stalls.done(report.rank, report.kind)
        if report.kind == "train":
            if self._commits.count(report):
                self._state.failed_formations = 0
            if report.replays:
                self._proposals.ask(Replayed(in_flight.plan, report))
        if not in_flight.is_done:
            return None
        is_profiled = self._state.durable.is_profiled(report.step)  # its time and memory are the profiler's too
        if report.kind == "train" and in_flight.plan.finishes is None and not is_profiled:
            version = in_flight.plan.plan_version
            self.rates.reported(in_flight.reports, version)
            self.peaks.reported(in_flight.reports, version)
        if report.kind == "checkpoint":
            self.peaks.copied(in_flight.plan.writers)
        self.side_plans.done[report.kind] = in_flight.plan.step
        return in_flight

    def stepped(self, done: PlanInFlight) -> Stepped:
        """Return what policies may ask about a step; nothing is worked out before."""
        models = partial(self.rates.of, done.ranks), partial(self.peaks.of, done.ranks)
        return Stepped(done.plan, done.reports, *models, partial(self.most_micro, done.ranks))

    # ------------------------------------------------------------ across generations

    def abandon(self) -> None:
        """The generation of all plans under way is left: what was wanted of them is wanted of the next one."""
        self._state.waiting, writing = "", self.writes.now
        for plan in self.in_flight.take_all():
            if plan.kind == "sample":
                side_plans.sample_failed(self._state, plan, side_plans.INTERRUPTED["sample"])
            elif plan.kind != "train" and not plan.commands:
                self._state.pending.scheduled.add(plan.kind)
        for id, carried in list(self._state.durable.carried.items()):
            if carried.verb in side_plans.INTERRUPTED:
                self._state.end(id, "failed", carried.step, side_plans.INTERRUPTED[carried.verb])
            elif carried.verb in self._state.pending.side and id not in (writing.commands if writing else ()):
                self._state.put_back(id)

    def recover(self, answers: list[Fenced]) -> set[int]:
        """Commit what the answers to a fence say was done, and note what is left half-done.

        Gives the ranks that have the state of the last committed step. Raises NobodyLeftError if one of them is beyond
        what the record can know.
        """
        state, progress, members = self._state, self._state.progress, self._state.members
        if members:  # others report steps of a part of the run that they have left
            answers = [answer for answer in answers if answer.rank in members]
        for report in sorted((report for answer in answers for report in answer.reports), key=lambda each: each.step):
            if report.kind == "train" and self._commits.count(report):
                state.failed_formations = 0
        for answer in answers:
            if answer.last_step > progress.step:
                where = f"{state.node(answer.rank)} is at step {answer.last_step}"
                raise NobodyLeftError(f"{where}, but the record ends at step {progress.step}, as after a power cut")
        retracts = bool(answers) and max(answer.last_step for answer in answers) == progress.step - 1
        if retracts:
            self._commits.retract()
        at_step = {answer.rank for answer in answers if answer.last_step == progress.step}
        standing = at_step & members if members else at_step
        state.planned_step, state.planned_cursor = progress.step, progress.cursor
        was_passed = progress.step + 1 in self._commits.plans
        self.side_plans.start_over(progress.step, was_passed=was_passed, owes_checkpoint=self.writes.owes_checkpoint)
        if retracts:
            self.writes.retract()
        self._half = self._commits.half_done(answers) if len(standing) == len(answers) else None
        if state.durable.retracted > progress.step:
            state.keep(retracted=progress.step + 1)  # of a later one no one can have had the sum
        elif self._half is None:
            self._commits.plans.pop(progress.step + 1, None)  # it is planned again
        return standing

    def begin(self) -> None:
        """A generation has been formed: complete the batch that the accumulators hold a part of, if they do."""
        self.side_plans.schedule_probe()
        half, self._half, self._unfinished = self._half, None, None
        plan = self._commits.plans.get(self._state.progress.step + 1)
        self._state.end_carried(self._state.progress.step)
        if plan is not None and (half is not None or self._state.durable.retracted == plan.step):
            self._unfinished = plan, half
        else:
            self.side_plans.schedule_first()
