"""The pipeline of a run: what is planned and issued next, and how it continues from what a fence leaves.

A plan is issued when every rank has said that it is about to need one (`Soon`), so a command waits for no more than the
step in progress, and the plan arrives while that step still synchronises and updates.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from trainctl.node_agent.autopilot.policy import Replayed, barred_size
from trainctl.node_agent.conductor import side_plans
from trainctl.node_agent.conductor.background_writes import BackgroundWrites
from trainctl.node_agent.conductor.deadlines import Deadlines
from trainctl.node_agent.conductor.events import Commanded, Issue, caused
from trainctl.node_agent.conductor.group import Rendezvous
from trainctl.node_agent.conductor.in_flight import Commits, Half, InFlight, PlanInFlight
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.restarts import Departures
from trainctl.node_agent.conductor.side_plans import PeriodicPlans
from trainctl.node_agent.conductor.state import EXPIRED, ConductorState, NobodyLeftError, Pending, SideKind
from trainctl.node_agent.planning import edits, plans, ranges, share_edits
from trainctl.node_agent.planning.durable import Settings
from trainctl.node_agent.planning.peak_memory import MemoryPeaks
from trainctl.node_agent.planning.share_edits import Facts
from trainctl.node_agent.planning.throughput import Rates
from trainctl.protocol.config.policies import AUTHOR
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Fenced, PlanKind, Report, Sealed, StepPlan, verbs
from trainctl.protocol.messages.events import RankChanged


class DataSupply:
    """How much of a growing file each rank can train on, and whether all ranks have the same of it.

    A step is planned only when all live ranks have its samples, so ranks that wait for data wait for a plan: commands,
    and everything else that happens between steps, go on as usual.
    """

    def __init__(self, state: ConductorState, rendezvous: Rendezvous) -> None:
        self._state, self._rendezvous = state, rendezvous
        self._known: dict[int, tuple[str, int]] = {}  # by number of chunks: their digest, and the rank that said so

    def on_sealed(self, sealed: Sealed) -> str:
        """Take what a rank has. Gives why it can't take part, if another rank had other chunks before it."""
        digest, rank = self._known.setdefault(sealed.chunks, (sealed.digest, sealed.rank))
        if digest != sealed.digest:
            names = self._state.settings.label(sealed.rank), self._state.settings.label(rank)
            return f"the growing data of {names[0]} and {names[1]} differ within their first {sealed.chunks} chunks"
        self._rendezvous.ranks[sealed.rank].sealed = sealed
        return ""

    def lacking(self, stop: int) -> str:
        """What a growing file lacks for the positions below `stop`, in words; empty if all live ranks have them."""
        live = [at.sealed for at in self._rendezvous.live.values()]
        if all(sealed is not None and (sealed.ended or sealed.samples >= stop) for sealed in live):
            return ""
        least = min(sealed.samples if sealed is not None else 0 for sealed in live)
        return f"waiting for data: {least:,} samples sealed, the next step needs {stop:,}"

    @property
    def samples(self) -> int | None:
        """Samples that all live ranks have; None if the file doesn't grow."""
        sealed = [at.sealed for at in self._rendezvous.live.values()]
        return min((one.samples for one in sealed if one is not None), default=0) if any(sealed) else None


Wish = Literal["form", "pause", "stopped", "finished"]
"""What the conductor must do at a boundary that has no plan to issue."""


class Pipeline:
    """Issues plans and takes what ranks say of them."""

    def __init__(
        self, state: ConductorState, rendezvous: Rendezvous, pending: Pending, proposals: Proposals,
        departures: Departures, recent: tuple[StepPlan, ...],
    ) -> None:  # fmt: skip
        """`recent`: the newest train plans of the record, oldest first."""
        self._state, self._rendezvous, self._pending, self._proposals = state, rendezvous, pending, proposals
        self._departures = departures
        self.periodic, self.rates = PeriodicPlans(state, rendezvous, pending, proposals), Rates()
        self._commits, self._in_flight = Commits(state, recent), InFlight()
        self.writes = BackgroundWrites(state, rendezvous, pending)
        self.on_soon = self._in_flight.on_soon  # True if the next plan may be due
        self.data = DataSupply(state, rendezvous)
        self.peaks = MemoryPeaks()
        self.deadlines = Deadlines(state, rendezvous, self._in_flight, self.rates)
        self.planned_step, self._planned_cursor = state.progress.step, state.progress.cursor
        self._half: Half | None = None
        self._unfinished: tuple[StepPlan, Half | None] | None = None  # a step to be finished, or made again

    def facts(self, now: float) -> Facts:
        """What edits may have to know."""
        of = self._rendezvous
        models = self.rates.of(of.ranks)
        return Facts(models, of.members, of.ready, of.silent_seconds(now), self.most_micro(of.ranks))

    def most_micro(self, ranks: Iterable[int]) -> dict[int, int]:
        """The largest micro-batch of calibrated ranks whose own is chosen: by memory, and by what failed lately."""
        settings, kept = self._state.settings.ranks, self._state.durable.policies.get("micro-batch")
        found = {rank: self.peaks.most_micro(rank) for rank in ranks if settings[rank].auto_micro}
        sizes = {rank: most for rank, most in found.items() if most is not None}
        barred = {rank: barred_size(kept.memory, rank, self._state.progress.step) for rank in sizes} if kept else {}
        return {rank: min(most, max(1, (barred.get(rank) or most + 1) - 1)) for rank, most in sizes.items()}

    def has_planned(self, kind: PlanKind) -> bool:
        """Whether a plan of this kind is under way."""
        return self._in_flight.has(kind)

    @property
    def is_still(self) -> bool:
        return not self._in_flight and self._state.progress.step == self.planned_step

    # ------------------------------------------------------------ the next plan

    def advance(self, now: float) -> Wish | None:
        """Issue the next plan if its time has come, or say what is to be done instead."""
        if self._state.stage != "formed" or not self._in_flight.may_issue:
            return None
        self._state.waiting = ""
        self.periodic.schedule_ending(self.planned_step)
        if self._unfinished is not None and "probe" not in self._pending.scheduled:
            self._issue_unfinished(*self._unfinished, now)
            return None
        is_writing, stopping = self.writes.now is not None, self._state.durable.mode == "stopping"
        kind = self._pending.next_side({"checkpoint"} if is_writing else ())
        if kind is None:
            if stopping or self.planned_step >= self._state.config.run.steps:
                if is_writing:
                    return None
                return ("stopped" if stopping else "finished") if self.is_still else None
            if self._pending.wants_pause:
                return "pause" if self.is_still else None
            if self._state.lacking:
                return None
            if self._wants_new_group(now) and not self._change_group(now):
                return None
        if not self._rendezvous.is_current:
            return "form"
        if kind is not None:
            self._issue_side(kind, now)
        elif self._is_supplied(now):
            self._issue_train(now)
        return None

    def _wants_new_group(self, now: float) -> bool:
        return bool(self._pending.wants_new_group(now) or self._departures.due or self._rendezvous.returning)

    def _is_supplied(self, now: float) -> bool:
        """Whether all ranks have the samples of the next step. Commands that it carries don't wait with it: as in a
        pause, the next plan is journaled with them."""
        lacks = self._lacks_data(now)
        if lacks and self._carries and self.is_still:
            self.hold_next_plan(now)
            lacks = self._lacks_data(now)
        self._state.waiting = lacks
        return not lacks

    @property
    def _carries(self) -> bool:
        """Whether the next plan has commands."""
        carried = self._state.durable.carried.values()
        return bool(self._pending.staged) or any(one.step > self.planned_step for one in carried)

    def _lacks_data(self, now: float) -> str:
        """What is missing for the next step with the edits that it takes up."""
        config = self._state.config
        if not config.data.growing:
            return ""
        after = self._pending.folded(self._state.settings, self.planned_step + 1, config, self.facts(now), now)
        return self.data.lacking(self._planned_cursor + after.global_batch)

    def _change_group(self, now: float) -> bool:
        """Take up edits that change the live ranks, once the step in progress, of the group as it is, is done."""
        if self.is_still:
            self._apply_staged(now)
            self._departures.apply(self.planned_step + 1)
            self.take_back(now)
            self._state.persist()
        return self.is_still

    def take_back(self, now: float) -> None:
        """Ranks that were lost and are there again; one that doesn't fit any more stays out."""
        for rank in self._rendezvous.returning:
            label = self._state.settings.label(rank)
            if self._rendezvous.silent_seconds(now).get(rank, 0.0) > share_edits.AWAY_SECONDS:
                self._rendezvous.ranks[rank].forget()  # gone once more: it is back when it says so
                continue
            try:
                edit = share_edits.take_back(self._state.settings, rank, self.facts(now), self._state.config)
            except InvalidInputError as error:
                self._state.keep(settings=share_edits.give_up(self._state.settings, rank))
                refused = RankChanged((label,), "not-admitted", error.problem)
                self._state.happen(refused, "error", self.planned_step)
                continue
            self._take_settings(edit.settings)
            change = msgspec.structs.replace(edit.change, returned=label)
            self._state.happen(change, "good", self.planned_step + 1, verb="admit")

    def _issue_train(self, now: float) -> None:
        self._apply_staged(now)
        plan = self._next_train_plan()
        if self._state.durable.paused_ids:
            self._state.keep(paused_ids=())
        self._issue(plan, now)

    def _next_train_plan(self) -> StepPlan:
        step, durable = self.planned_step + 1, self._state.durable
        carried = [id for id, command in durable.carried.items() if command.step == step]
        self._state.keep(seq=durable.seq + 1)
        ids = list(dict.fromkeys([*durable.paused_ids, *carried]))
        return plans.train(self._state.run, self._state.durable, self._state.config, step, self._planned_cursor, ids)

    def _issue_unfinished(self, plan: StepPlan, half: Half | None, now: float) -> None:
        """The step that the last generation left: what its batch lacks, or all of it. Only the comparison of models
        comes before it, for ranks may be new."""
        self._unfinished = None
        self._state.keep(seq=self._state.durable.seq + 1)
        durable = self._state.durable
        self._issue(plans.finishing(plan, durable, *half) if half is not None else plans.again(plan, durable), now)

    def hold_next_plan(self, now: float) -> None:
        """While paused the next plan is journaled at once, and with it the commands in it are applied."""
        self._apply_staged(now)
        plan = self._next_train_plan()
        self._state.keep(paused_ids=plan.commands)
        self._state.decide(Issue(plan, self._state.durable, held=True))
        self._state.conclude(plan.step)

    def _issue_side(self, kind: SideKind, now: float) -> None:
        commands = self._pending.take_side(kind)
        for command in commands:
            self._state.carry(command, self.planned_step)
        self._state.keep(seq=self._state.durable.seq + 1)
        where = (self._state.run, self._state.durable, self.planned_step, self._planned_cursor)
        ids = [command.id for command in commands]
        match kind:
            case "probe":
                self._issue(plans.probe(*where), now)
            case "measure":
                self._issue(plans.measure(*where), now)
            case "sync":
                self._issue(plans.sync(*where), now)
            case "evaluate":
                self._issue(plans.evaluate(*where, self._rendezvous.any_ready().held_out, ids), now)
            case "sample":
                self._issue_sample(commands, now)
            case "defragment":
                self._issue(plans.defragment(*where, {command.node for command in commands}, ids), now)
            case "profile":
                asked = commands[0].args
                assert isinstance(asked, verbs.Profile)
                self._issue(plans.profile(*where, asked, ids), now)
            case "checkpoint":
                self._issue(plans.checkpoint(*where, ids, self.writes.failing), now)

    def _issue_sample(self, commands: list[Commanded], now: float) -> None:
        """What one command asks; without one, what the run file does."""
        asked, node = verbs.SampleModel(), None
        for command in commands:
            assert isinstance(command.args, verbs.SampleModel)
            asked, node = command.args, command.node
        where = self._state.run, self._state.durable, self._state.config, self.planned_step, self._planned_cursor
        self._issue(plans.sample(*where, asked, node, [command.id for command in commands]), now)

    def _issue(self, plan: StepPlan, now: float) -> None:
        if plan.kind == "train":
            self._commits.issued(plan)
            self.planned_step, self._planned_cursor = plan.step, plan.cursor + plan.global_batch
            self.periodic.schedule_periodic(plan.step)
        self._in_flight.add(plan, now)
        self._state.decide(Issue(plan, self._state.durable))

    def _apply_staged(self, now: float) -> None:
        """Fold the staged edits into the settings; the next step carries them."""
        staged = self._pending.take_staged()
        if not staged:
            return
        step, config, facts = self.planned_step + 1, self._state.config, self.facts(now)
        for command in staged:
            if command.expires <= now:
                self._state.end(command.id, "expired", reason=EXPIRED)
                continue
            try:
                by_person = not command.by.startswith(AUTHOR)
                known = facts._replace(by_person=by_person)
                edit = edits.apply(self._state.settings, command.args, command.node, step, config, known)
            except InvalidInputError as error:  # an edit before it expired, and this one stood on it
                self._state.end(command.id, "failed", reason=error.problem, field=error.where)
                continue
            self._take_settings(edit.settings)
            self._state.carry(command, step, caused(edit.change, command.reason))

    def _take_settings(self, settings: Settings) -> None:
        if settings.global_batch != self._state.settings.global_batch:
            mean_weight = self._rendezvous.any_ready().mean_weight
            self._state.keep(divisor=ranges.divisor(settings.global_batch, mean_weight))
        self._state.keep(settings=settings)

    # ------------------------------------------------------------ what ranks say

    def on_report(self, report: Report, now: float) -> PlanInFlight | None:
        """The plan that the report completes, if it is the last one of it."""
        in_flight = self._in_flight.on_report(report, now)
        if in_flight is None:
            return None
        self.deadlines.stalls.done(report.rank, report.kind)
        if report.kind == "train":
            if self._commits.count(report):
                self._rendezvous.failures = 0
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
        self.periodic.note_done(in_flight.plan)
        return in_flight

    # ------------------------------------------------------------ across generations

    def abandon(self) -> None:
        """The generation of all plans under way is left: what was wanted of them is wanted of the next one."""
        self._state.waiting = ""
        for plan in self._in_flight.take_all():
            if plan.kind == "sample":
                side_plans.sample_interrupted(self._state, plan)
            elif plan.kind != "train" and not plan.commands:
                self._pending.scheduled.add(plan.kind)
        for id, carried in list(self._state.durable.carried.items()):
            if carried.verb in side_plans.INTERRUPTED:
                self._state.end(id, "failed", carried.step, side_plans.INTERRUPTED[carried.verb])
            elif carried.verb in self._pending.side and id not in self.writes.commands:
                self._pending.put_back(id, carried)
                self._state.uncarry(id)

    def recover(self, answers: list[Fenced]) -> set[int]:
        """Commit what the answers to a fence say was done, and note what is left half-done.

        Gives the ranks that have the state of the last committed step. Raises NobodyLeftError if one of them is beyond
        what the record can know.
        """
        progress, members = self._state.progress, self._rendezvous.members
        if members:  # what others say of steps is of a part of the run that they are not in any more
            answers = [answer for answer in answers if answer.rank in members]
        for report in sorted((report for answer in answers for report in answer.reports), key=lambda each: each.step):
            if report.kind == "train" and self._commits.count(report):
                self._rendezvous.failures = 0
        for answer in answers:
            if answer.last_step > progress.step:
                where = f"{self._state.node(answer.rank)} is at step {answer.last_step}"
                raise NobodyLeftError(f"{where}, but the record ends at step {progress.step}, as after a power cut")
        retracts = bool(answers) and max(answer.last_step for answer in answers) == progress.step - 1
        if retracts:
            self._commits.retract()
        at_step = {answer.rank for answer in answers if answer.last_step == progress.step}
        standing = at_step & members if members else at_step
        self.planned_step, self._planned_cursor = progress.step, progress.cursor
        was_passed = self._commits.plan(progress.step + 1) is not None
        self.periodic.start_over(progress.step, was_passed=was_passed, owes_checkpoint=self.writes.owes_checkpoint)
        if retracts:
            self.writes.retract()
        self._half = self._commits.half_done(answers) if len(standing) == len(answers) else None
        if self._state.durable.retracted > progress.step:
            self._state.keep(retracted=progress.step + 1)  # of a later one no one can have had the sum
        elif self._half is None:
            self._commits.forget(progress.step + 1)
        return standing

    def begin(self, now: float) -> None:
        """A generation has been formed: complete the batch that the accumulators hold a part of, if they do."""
        self.periodic.schedule_probe()
        half, self._half, self._unfinished = self._half, None, None
        plan = self._commits.plan(self._state.progress.step + 1)
        self._state.conclude(self._state.progress.step)
        if plan is not None and (half is not None or self._state.durable.retracted == plan.step):
            self._unfinished = plan, half
        else:
            self.periodic.schedule_first()
