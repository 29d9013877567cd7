"""The course of a run: what is planned and issued next, and how it goes on from what a fence leaves.

A plan is issued when every rank has said that it is about to need one (`Soon`), so a command waits for no more than the
step in progress, and the plan arrives while that step still synchronises and updates.
"""

from typing import Literal

import msgspec

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.commits import Half, Tally
from trainctl.node_agent.conductor.deadlines import Waits
from trainctl.node_agent.conductor.in_flight import Outstanding, UnderWay
from trainctl.node_agent.conductor.pending import EXPIRED, Desk
from trainctl.node_agent.conductor.periodic import Agenda
from trainctl.node_agent.conductor.rendezvous import Formation
from trainctl.node_agent.conductor.state import Book, CannotGoOnError
from trainctl.node_agent.planning import edits, plans, ranges, share_edits
from trainctl.node_agent.planning.durable import Settings
from trainctl.node_agent.planning.share_edits import Facts
from trainctl.node_agent.planning.throughput import Rates
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError

Wish = Literal["form", "pause", "stopped", "finished"]
"""What a boundary asks of the conductor where it has no plan to issue."""


class Course:
    """Issues plans into the book and takes what ranks say of them."""

    def __init__(self, book: Book, formation: Formation, desk: Desk, recent: tuple[m.StepPlan, ...]) -> None:
        """`recent`: the newest train plans of the record, oldest first."""
        self._book, self._formation, self._desk = book, formation, desk
        self.agenda, self.rates = Agenda(book, formation, desk), Rates()
        self._tally, self._under_way = Tally(book, recent), UnderWay()
        self.waits = Waits(book, formation, self._under_way, self.rates)
        self.planned_step, self._planned_cursor = book.progress.step, book.progress.cursor
        self._half: Half | None = None

    def facts(self, now: float) -> Facts:
        """What edits may have to know."""
        of = self._formation
        return Facts(self.rates.of(of.ranks), of.members, of.ready, of.silent_seconds(now))

    @property
    def is_still(self) -> bool:
        return not self._under_way and self._book.progress.step == self.planned_step

    # ------------------------------------------------------------ the next plan

    def advance(self, now: float) -> Wish | None:
        """Issue the next plan if its time has come, or say what is to be done instead."""
        if self._book.stage != "formed" or not self._under_way.may_issue:
            return None
        self.agenda.schedule_ending(self.planned_step)
        kind, stopping = self._desk.next_side(), self._book.durable.mode == "stopping"
        if kind is None:
            if stopping or self.planned_step >= self._book.config.run.steps:
                return ("stopped" if stopping else "finished") if self.is_still else None
            if self._desk.wants_pause:
                return "pause" if self.is_still else None
            if self._book.lacking:
                return None
            if (self._desk.wants_new_group(now) or self._formation.returning) and not self._change_group(now):
                return None
        if not self._formation.is_current:
            return "form"
        self._issue_side(kind, now) if kind is not None else self._issue_train(now)
        return None

    def _change_group(self, now: float) -> bool:
        """Take up edits that change the live ranks, once the step in progress, of the group as it is, is done."""
        if self.is_still:
            self._apply_staged(now)
            self.take_back(now)
            self._book.persist()
        return self.is_still

    def take_back(self, now: float) -> None:
        """Ranks that were lost and are there again; one that doesn't fit any more stays out."""
        for rank in self._formation.returning:
            label = self._book.settings.label(rank)
            if self._formation.silent_seconds(now).get(rank, 0.0) > share_edits.AWAY_SECONDS:
                self._formation.ranks[rank].forget()  # gone once more: it is back when it says so
                continue
            try:
                edit = share_edits.take_back(self._book.settings, rank, self.facts(now), self._book.config)
            except InvalidInputError as error:
                self._book.keep(settings=share_edits.give_up(self._book.settings, rank))
                self._book.happen("rank", "error", f"{label} cannot join again: {error.problem}", self.planned_step)
                continue
            self._take_settings(edit.settings)
            text = f"{label} joins again: {edit.before} → {edit.after}"
            step = self.planned_step + 1
            self._book.decide(d.Happened("rank", "good", "auto", text, step, "admit", edit.before, edit.after))

    def _issue_train(self, now: float) -> None:
        self._apply_staged(now)
        plan = self._next_train_plan()
        self._book.keep(paused_ids=())
        self._issue(plan, now)

    def _next_train_plan(self) -> m.StepPlan:
        step, durable = self.planned_step + 1, self._book.durable
        carried = [id for id, command in durable.carried.items() if command.step == step]
        self._book.keep(seq=durable.seq + 1)
        ids = list(dict.fromkeys([*durable.paused_ids, *carried]))
        return plans.train(self._book.run, self._book.durable, self._book.config, step, self._planned_cursor, ids)

    def hold_next_plan(self, now: float) -> None:
        """While paused the next plan is journaled at once, and with it the commands in it are applied."""
        self._apply_staged(now)
        plan = self._next_train_plan()
        self._book.keep(paused_ids=plan.commands)
        self._book.decide(d.Issue(plan, self._book.durable, held=True))
        self._book.conclude(plan.step)

    def _issue_side(self, kind: str, now: float) -> None:
        commands = self._desk.take_side(kind)
        for command in commands:
            self._book.carry(command, self.planned_step)
        self._book.keep(seq=self._book.durable.seq + 1)
        where = (self._book.run, self._book.durable, self.planned_step, self._planned_cursor)
        ids = [command.id for command in commands]
        match kind:
            case "probe":
                self._issue(plans.probe(*where), now)
            case "measure":
                self._issue(plans.measure(*where), now)
            case "sync":
                self._issue(plans.sync(*where), now)
            case "evaluate":
                self._issue(plans.evaluate(*where, self._formation.any_ready().held_out, ids), now)
            case _:
                self._issue(plans.checkpoint(*where, ids), now)

    def _issue(self, plan: m.StepPlan, now: float) -> None:
        if plan.kind == "train":
            self._tally.issued(plan)
            self.planned_step, self._planned_cursor = plan.step, plan.cursor + plan.global_batch
            self.agenda.schedule_periodic(plan.step)
        self._under_way.add(plan, now)
        self._book.decide(d.Issue(plan, self._book.durable))

    def _apply_staged(self, now: float) -> None:
        """Fold the staged edits into the settings; the next step carries them."""
        staged = self._desk.take_staged()
        if not staged:
            return
        step, config, facts = self.planned_step + 1, self._book.config, self.facts(now)
        for command in staged:
            if command.expires <= now:
                self._book.end(command.id, "expired", reason=EXPIRED)
                continue
            try:
                edit = edits.apply(self._book.settings, command.args, command.node, step, config, facts)
            except InvalidInputError as error:  # an edit before it expired, and this one stood on it
                self._book.end(command.id, "failed", reason=error.problem, field=error.where)
                continue
            self._take_settings(edit.settings)
            self._book.carry(command, step, edit.before, edit.after)

    def _take_settings(self, settings: Settings) -> None:
        if settings.global_batch != self._book.settings.global_batch:
            mean_weight = self._formation.any_ready().mean_weight
            self._book.keep(divisor=ranges.divisor(settings.global_batch, mean_weight))
        self._book.keep(settings=settings)

    # ------------------------------------------------------------ what ranks say

    def on_soon(self, soon: m.Soon, now: float) -> bool:
        """True if the next plan may be due."""
        return self._under_way.on_soon(soon, now)

    def on_report(self, report: m.Report, now: float) -> Outstanding | None:
        """The plan that the report completes, if it is the last one of it."""
        under_way = self._under_way.on_report(report, now)
        if under_way is None:
            return None
        self.waits.standstills.done(report.rank, report.kind)
        if report.kind == "train":
            self._count(report)
            self._note_replays(report, under_way.plan)
        if under_way.reports.keys() != under_way.ranks:
            return None
        if report.kind == "train" and under_way.plan.finishes is None:
            self.rates.reported(under_way.reports.values())
        self.agenda.note_done(under_way.plan)
        return under_way

    def _count(self, report: m.Report) -> None:
        if self._tally.count(report):
            self._formation.failures = 0

    def _note_replays(self, report: m.Report, plan: m.StepPlan) -> None:
        """A rank that ran out of memory goes on with the micro-batch that fitted, whatever its share will be."""
        setting = self._book.settings.ranks[report.rank]
        if not report.replays or not 0 < report.micro_batch < setting.micro_batch:
            return
        smaller = msgspec.structs.replace(setting, micro_batch=report.micro_batch)
        ranks = {**self._book.settings.ranks, report.rank: smaller}
        self._book.persist(settings=self._book.settings.edited(ranks=ranks))
        planned = next(work.micro_batch for work in plan.work if work.rank == report.rank)
        before, after = str(planned), str(report.micro_batch)
        text = f"resize-batch {setting.node} {before} → {after}: out of memory, the micro-batch was run again"
        self._book.decide(d.Happened("rank", "warning", "auto", text, report.step, "resize-batch", before, after))

    # ------------------------------------------------------------ across generations

    def abandon(self) -> None:
        """The generation of all plans under way is left: what was wanted of them is wanted of the next one."""
        for plan in self._under_way.take_all():
            if plan.kind != "train" and not plan.commands:
                self._desk.scheduled.add(plan.kind)
        for id, carried in list(self._book.durable.carried.items()):
            if carried.verb in self._desk.side:
                self._desk.put_back(id, carried)
                self._book.uncarry(id)

    def recover(self, answers: list[m.Fenced]) -> set[int]:
        """Commit what the answers to a fence say was done, and note what is left half-done.

        Gives the ranks that have the state of the last committed step. Raises CannotGoOnError if one of them is beyond
        what the record can know.
        """
        progress, members = self._book.progress, self._formation.members
        if members:  # what others say of steps is of a part of the run that they are not in any more
            answers = [answer for answer in answers if answer.rank in members]
        for report in sorted((report for answer in answers for report in answer.reports), key=lambda each: each.step):
            if report.kind == "train":
                self._count(report)
        for answer in answers:
            if answer.last_step > progress.step:
                where = f"{self._book.node(answer.rank)} is at step {answer.last_step}"
                raise CannotGoOnError(f"{where}, the record at step {progress.step}; resume the run from a checkpoint")
        if answers and max(answer.last_step for answer in answers) == progress.step - 1:
            self._tally.retract()
        at_step = {answer.rank for answer in answers if answer.last_step == progress.step}
        standing = at_step & members if members else at_step
        self.planned_step, self._planned_cursor = progress.step, progress.cursor
        self.agenda.start_over(progress.step, was_passed=self._tally.plan(progress.step + 1) is not None)
        self._half = self._tally.half_done(answers) if len(standing) == len(answers) else None
        if self._book.durable.retracted > progress.step:
            self._book.keep(retracted=progress.step + 1)  # of a later one nobody can have had the sum
        elif self._half is None:
            self._tally.forget(progress.step + 1)
        return standing

    def begin(self, now: float) -> None:
        """A generation has been formed: complete the batch that the accumulators hold a part of, if they do."""
        self.agenda.schedule_probe()
        half, self._half = self._half, None
        plan = self._tally.plan(self._book.progress.step + 1)
        self._book.conclude(self._book.progress.step)
        if half is not None and plan is not None:
            self._book.keep(seq=self._book.durable.seq + 1)
            self._issue(plans.finishing(plan, self._book.durable, *half), now)
        elif plan is not None and self._book.durable.retracted == plan.step:
            self._book.keep(seq=self._book.durable.seq + 1)
            self._issue(plans.again(plan, self._book.durable), now)
        else:
            self.agenda.schedule_first()
