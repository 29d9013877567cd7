"""The conductor: the pure state machine that turns reports and commands into step plans; the clock is an argument.

It is the single writer of plans, so a change is atomic on all ranks by construction. A plan is issued when every rank
has said that it is about to need one (`Soon`), so a command waits for no more than the step in progress, and the plan
arrives while that step still synchronises and updates.
"""

import dataclasses
from typing import Literal

import msgspec

from trainctl.node_agent import conclusions, edits, planner, results, shares
from trainctl.node_agent import decisions as d
from trainctl.node_agent.book import Book, Progress
from trainctl.node_agent.desk import EXPIRED, SIDE_KINDS, Desk
from trainctl.node_agent.schedule import rate
from trainctl.node_agent.settings import Durable, Settings
from trainctl.protocol import messages as m
from trainctl.protocol import verbs
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.runfile import RunFile

Stage = Literal["loading", "fencing", "forming", "formed", "leaving", "over"]
Final = Literal["finished", "stopped", "failed"]
PLANS_KEPT = 4
"""Recent train plans kept for reports that come late; at most two are ever under way."""


@dataclasses.dataclass
class _Rank:
    ready: m.Ready | None = None
    formed: bool = False
    fenced: m.Fenced | None = None
    ended: bool = False


@dataclasses.dataclass(eq=False)
class _Outstanding:
    """A plan that was sent and not yet reported by all its ranks."""

    plan: m.StepPlan
    soon: set[int] = dataclasses.field(default_factory=set)
    reports: dict[int, m.Report] = dataclasses.field(default_factory=dict)

    @property
    def ranks(self) -> set[int]:
        return {work.rank for work in self.plan.work}

    def is_of(self, answer: m.Soon | m.Report) -> bool:
        return (self.plan.generation, self.plan.seq) == (answer.generation, answer.seq) and answer.rank in self.ranks


class Conductor:
    """Conducts one run. `handle` takes an event and gives decisions, to be carried out in order."""

    def __init__(
        self,
        run: str,
        config: RunFile,
        durable: Durable,
        progress: Progress,
        recent: tuple[m.StepPlan, ...] | None = None,
    ) -> None:
        """`recent`: the newest train plans of the record, when a run goes on where another conductor left it; its
        trainers then live. None: the trainers are being started."""
        self.run, self.config = run, config
        self._book = Book(durable, progress)
        self.stage: Stage = "loading"
        self.final: Final | None = None
        self.reason = ""
        self.ranks = {rank: _Rank() for rank in durable.settings.ranks}
        # As first issued: what a fence leaves of a batch is always dealt out from the whole of it.
        self._plans = {plan.step: plan for plan in recent or () if plan.finishes is None}
        self._adopts = recent is not None
        self._planned_step, self._planned_cursor = progress.step, progress.cursor
        self._outstanding: list[_Outstanding] = []
        self._desk = Desk()
        self._wants_pause = durable.mode == "paused"
        self._ending_scheduled = False

    # ------------------------------------------------------------ the outside

    def handle(self, event: d.Input, now: float) -> list[d.Decision]:
        """Decisions that follow from `event` at `now` (seconds of a monotonic clock)."""
        if self.stage == "over":
            if isinstance(event, d.Commanded):
                self._refuse(event, "run", f"the run is {self.final}")
            return self._book.take()
        match event:
            case m.Ready():
                self._on_ready(event)
            case m.Alive():
                self._on_alive(event)
            case m.Soon():
                self._on_soon(event, now)
            case m.Report():
                self._on_report(event, now)
            case m.Fenced():
                self._on_fenced(event)
            case m.Formed():
                self._on_formed(event, now)
            case m.TrainerFailed():
                self._fail(f"rank {event.rank} ({self._node(event.rank)}): {event.reason}")
            case d.Commanded():
                self._on_command(event, now)
            case d.RankEnded():
                self._on_rank_ended(event)
            case d.RankReturned():
                self._on_returned()
            case d.Ticked():
                self._expire(now)
        return self._book.take()

    @property
    def durable(self) -> Durable:
        return self._book.durable

    @property
    def progress(self) -> Progress:
        return self._book.progress

    @property
    def state(self) -> m.RunState:
        """The run's state in the words that clients see."""
        if self.final is not None:
            return self.final if self.stage == "over" or self.final == "failed" else "stopping"
        if self.durable.mode == "stopping":
            return "stopping"
        if self._wants_pause:
            return "paused" if self.durable.mode == "paused" else "pausing"
        return "running" if self.stage == "formed" else "starting"

    @property
    def learning_rate(self) -> float:
        """Of the step in progress, or of the next one."""
        return self._rate_at(min(self.progress.step + 1, self.config.run.steps))

    def ready(self, rank: int) -> m.Ready | None:
        """What a rank said of itself when it had loaded, None before."""
        return self.ranks[rank].ready

    # ------------------------------------------------------------ forming

    def _on_ready(self, ready: m.Ready) -> None:
        if ready.rank not in self.ranks or self.stage != "loading":
            return
        self.ranks[ready.rank].ready = ready
        if all(rank.ready for rank in self.ranks.values()) and self._agrees():
            self._form()

    def _on_alive(self, alive: m.Alive) -> None:
        """A rank that outlived our predecessor: once all are seen, fence whatever generation they were left in."""
        rank = self.ranks.get(alive.rank)
        if rank is None or alive.ready is None or rank.ready is not None or self.stage != "loading":
            return
        rank.ready = alive.ready
        if alive.generation is not None and alive.generation > self.durable.generation:
            self._book.keep(generation=alive.generation)
        if all(other.ready for other in self.ranks.values()):
            self._fence()

    def _agrees(self) -> bool:
        ready = {self._node(rank): state.ready for rank, state in self.ranks.items() if state.ready is not None}
        difference = results.disagreement(ready, self.progress.step)
        if difference is not None:
            self._fail(difference)
        return difference is None

    def _on_returned(self) -> None:
        """Whatever was said on the lost connection is asked for again by a fence."""
        if self.stage in ("fencing", "forming", "formed"):
            self._fence()

    def _fence(self) -> None:
        self._book.keep(generation=self.durable.generation.next())
        self._book.decide(d.Persist(self.durable))
        self.stage = "fencing"
        for rank, state in self.ranks.items():
            state.fenced = None
            self._book.decide(d.Tell(rank, m.Fence(run=self.run, generation=self.durable.generation)))

    def _on_fenced(self, fenced: m.Fenced) -> None:
        rank = self.ranks.get(fenced.rank)
        if rank is None or self.stage != "fencing" or fenced.generation != self.durable.generation:
            return
        rank.fenced = fenced
        if not all(other.fenced for other in self.ranks.values()):
            return
        for answer in self._answers():
            for report in answer.reports:
                if report.kind == "train" and report.step == self.progress.step + 1 and report.step in self._plans:
                    self._commit(report)
        for answer in self._answers():
            if answer.last_step != self.progress.step:
                where = f"{self._node(answer.rank)} is at step {answer.last_step}"
                self._fail(f"{where}, the record at step {self.progress.step}; resume the run from its checkpoint")
                return
        self._planned_step, self._planned_cursor = self.progress.step, self.progress.cursor
        self._schedule_periodic(self.progress.step)
        self._book.happen("agent", "warning", "back in touch with a trainer that went on by itself")
        self._form()

    def _form(self) -> None:
        mean_weight = self._any_ready().mean_weight
        divisor = shares.divisor(self.durable.settings.global_batch, mean_weight)
        self._book.keep(generation=self.durable.generation.next(), divisor=divisor)
        self._outstanding.clear()
        for id, carried in list(self.durable.carried.items()):
            if carried.verb in SIDE_KINDS:
                self._desk.put_back(id, carried)
                self._book.uncarry(id)
        self._book.decide(d.Persist(self.durable))
        self.stage = "forming"
        for rank, state in self.ranks.items():
            state.formed = False
            ranks = tuple(sorted(self.ranks))
            form = m.Form(run=self.run, generation=self.durable.generation, engine="none", ranks=ranks)
            self._book.decide(d.Tell(rank, form))

    def _on_formed(self, formed: m.Formed, now: float) -> None:
        rank = self.ranks.get(formed.rank)
        if rank is None or self.stage != "forming" or formed.generation != self.durable.generation:
            return
        rank.formed = True
        if all(other.formed for other in self.ranks.values()):
            self.stage = "formed"
            count = len(self.ranks)
            self._book.happen(
                "run", "info", f"{self.durable.generation} formed, {count} rank{'s' if count > 1 else ''}"
            )
            self._book.conclude(self.progress.step)
            if not self._finish_batch():
                self._advance(now)

    def _finish_batch(self) -> bool:
        """After a fence: complete the batch that the accumulators hold a part of, if they do."""
        held = {answer.rank: answer.held for answer in self._answers() if answer.held}
        origins = {answer.held_from for answer in self._answers() if answer.held and answer.held_from is not None}
        for state in self.ranks.values():
            state.fenced = None
        plan = self._plans.get(self.progress.step + 1)
        if not held or len(origins) != 1 or plan is None:
            return False
        self._book.keep(seq=self.durable.seq + 1)
        self._issue(planner.finishing(plan, self.durable, held, origins.pop()))
        return True

    # ------------------------------------------------------------ plans

    def _advance(self, now: float) -> None:
        """Issue the next plan if its time has come, or end what is to be ended."""
        if self.stage != "formed" or not self._may_issue:
            return
        self._schedule_ending()
        side = self._desk.next_side()
        if side is not None:
            self._issue_side(side)
        elif self.durable.mode == "stopping" or self._planned_step >= self.config.run.steps:
            if self._is_still:
                self._leave("stopped" if self.durable.mode == "stopping" else "finished")
        elif not self._wants_pause:
            self._issue_train(now)
        elif self._is_still:
            self._enter_pause(now)

    @property
    def _may_issue(self) -> bool:
        """One plan ahead: nothing outstanding, or one train plan whose gradients all ranks have accumulated."""
        if len(self._outstanding) != 1:
            return not self._outstanding
        under_way = self._outstanding[0]
        return under_way.plan.kind == "train" and under_way.soon >= under_way.ranks

    @property
    def _is_still(self) -> bool:
        return not self._outstanding and self.progress.step == self._planned_step

    def _schedule_ending(self) -> None:
        """The last evaluation and checkpoint of a run, once."""
        finishing = self._planned_step >= self.config.run.steps
        if self._ending_scheduled or not (finishing or self.durable.mode == "stopping"):
            return
        self._ending_scheduled = True
        if finishing and self._any_ready().held_out:
            self._desk.scheduled.add("evaluate")
        wanted = self.config.checkpoint.at_end if finishing else self.durable.stop_writes_checkpoint
        if wanted and self._planned_step > 0:
            self._desk.scheduled.add("checkpoint")

    def _schedule_periodic(self, step: int) -> None:
        every = {"evaluate": self.config.evaluate.every_steps, "checkpoint": self.config.checkpoint.every_steps}
        if not self._any_ready().held_out or self.durable.eval_step == step:
            every["evaluate"] = 0
        if 0 < step < self.config.run.steps:
            self._desk.scheduled |= {kind for kind, steps in every.items() if steps and step % steps == 0}

    def _issue_side(self, kind: str) -> None:
        commands = self._desk.take_side(kind)
        for command in commands:
            self._book.carry(command, self._planned_step)
        self._book.keep(seq=self.durable.seq + 1)
        where = (self.run, self.durable, self._planned_step, self._planned_cursor)
        ids = [command.id for command in commands]
        if kind == "evaluate":
            self._issue(planner.evaluate(*where, self._any_ready().held_out, ids))
        else:
            self._issue(planner.checkpoint(*where, ids))

    def _issue_train(self, now: float) -> None:
        self._apply_staged(now)
        plan = self._next_train_plan()
        self._book.keep(paused_ids=())
        self._issue(plan)

    def _next_train_plan(self) -> m.StepPlan:
        step = self._planned_step + 1
        carried = [id for id, command in self.durable.carried.items() if command.step == step]
        self._book.keep(seq=self.durable.seq + 1)
        ids = [*self.durable.paused_ids, *carried]
        return planner.train(self.run, self.durable, self.config, step, self._planned_cursor, ids)

    def _issue(self, plan: m.StepPlan) -> None:
        if plan.kind == "train":
            if plan.finishes is None:
                self._plans[plan.step] = plan
            self._plans.pop(plan.step - PLANS_KEPT, None)
            self._planned_step, self._planned_cursor = plan.step, plan.cursor + plan.global_batch
            self._schedule_periodic(plan.step)
        self._outstanding.append(_Outstanding(plan))
        self._book.decide(d.Issue(plan, self.durable))

    def _apply_staged(self, now: float) -> None:
        """Fold the staged edits into the settings; the next step carries them."""
        step = self._planned_step + 1
        for command in self._desk.take_staged():
            if command.expires <= now:
                self._book.end(command.id, "expired", reason=EXPIRED)
                continue
            try:
                edit = edits.apply(self.durable.settings, command.args, command.node, step, self.config)
            except InvalidInputError as error:  # an edit before it expired, and this one stood on it
                self._book.end(command.id, "failed", reason=error.problem, field=error.where)
                continue
            self._take_settings(edit.settings)
            self._book.carry(command, step, edit.before, edit.after)

    def _take_settings(self, settings: Settings) -> None:
        if settings.global_batch != self.durable.settings.global_batch:
            self._book.keep(divisor=shares.divisor(settings.global_batch, self._any_ready().mean_weight))
        self._book.keep(settings=settings)

    # ------------------------------------------------------------ reports

    def _on_soon(self, soon: m.Soon, now: float) -> None:
        for under_way in self._outstanding:
            if under_way.is_of(soon):
                under_way.soon.add(soon.rank)
                self._advance(now)

    def _on_report(self, report: m.Report, now: float) -> None:
        under_way = next((plan for plan in self._outstanding if plan.is_of(report)), None)
        if under_way is None or report.rank in under_way.reports:
            return
        under_way.reports[report.rank] = report
        if report.kind == "train":
            if len(under_way.reports) == 1:
                self._commit(report)
            else:
                self._book.decide(d.RankDone(results.rank_step(report, self._node(report.rank))))
            self._note_replays(report)
        if set(under_way.reports) == under_way.ranks:
            self._outstanding.remove(under_way)
            if report.kind == "evaluate":
                conclusions.evaluation(self._book, under_way.plan, under_way.reports)
            elif report.kind == "checkpoint":
                failed = conclusions.checkpoint(self._book, under_way.plan, under_way.reports)
                if failed and self.durable.mode == "stopping":
                    self._call_stop_off(failed)
            self._advance(now)

    def _commit(self, report: m.Report) -> None:
        """The first report that a rank has applied a step's update."""
        plan = self._plans[report.step]
        self.progress.step = report.step
        self.progress.cursor = plan.cursor + plan.global_batch
        self.progress.tokens_total += report.weight
        step = results.step_committed(
            report, plan, plan.learning_rate, self.progress.cursor, self.progress.tokens_total
        )
        self._book.decide(d.Commit(step, results.rank_step(report, self._node(report.rank))))
        if report.skipped:
            self._book.happen("run", "warning", f"step {report.step} left the parameters alone: {report.skipped}")
        self._book.conclude(report.step)

    def _note_replays(self, report: m.Report) -> None:
        """A rank that ran out of memory goes on with the micro-batch that fitted."""
        setting = self.durable.settings.ranks[report.rank]
        if not report.replays or not 0 < report.micro_batch < setting.micro_batch:
            return
        smaller = msgspec.structs.replace(setting, micro_batch=report.micro_batch)
        ranks = {**self.durable.settings.ranks, report.rank: smaller}
        self._book.keep(settings=self.durable.settings.edited(ranks=ranks))
        self._book.decide(d.Persist(self.durable))
        before, after = str(setting.micro_batch), str(report.micro_batch)
        text = f"resize-batch {setting.node} {before} → {after}: out of memory, the micro-batch was run again"
        self._book.decide(d.Happened("rank", "warning", "auto", text, report.step, "resize-batch", before, after))

    # ------------------------------------------------------------ commands

    def _on_command(self, command: d.Commanded, now: float) -> None:
        settings = self._desk.folded(self.durable.settings, self._planned_step + 1, self.config, now)
        if command.if_plan is not None and command.if_plan != settings.plan_version:
            self._refuse(command, "if_plan", f"the plan has moved on from {command.if_plan} to {settings.plan_version}")
        elif self.stage == "leaving":
            self._refuse(command, "run", f"the run is {self.state}")
        else:
            self._dispatch(command, settings, now)

    def _dispatch(self, command: d.Commanded, settings: Settings, now: float) -> None:
        match command.args:
            case verbs.Note(text=text):
                self._book.happen("note", "info", text, by=command.by)
                self._book.end(command.id, "applied", self.progress.step)
            case verbs.Pause():
                self._on_pause(command, now)
            case verbs.Resume():
                self._on_resume(command, now)
            case verbs.Stop(checkpoint=checkpoint):
                self._on_stop(command, checkpoint, now)
            case verbs.Evaluate() | verbs.Checkpoint():
                self._on_side_command(command, now)
            case verbs.ResizeBatch() | verbs.SetGlobalBatch() | verbs.SetLr():
                self._on_edit(command, settings, now)
            case _:
                self._refuse(command, "verb", f"{command.verb} is not for a run that is under way")

    def _on_edit(self, command: d.Commanded, settings: Settings, now: float) -> None:
        step = self._planned_step + 1
        if self.durable.mode == "stopping" or step > self.config.run.steps:
            self._refuse(command, "run", "no step is left to carry it")
            return
        try:
            edits.apply(settings, command.args, command.node, step, self.config)
        except InvalidInputError as error:
            self._refuse(command, error.where, error.problem)
            return
        self._desk.staged.append(command)
        if self.durable.mode == "paused" and self._is_still and self.stage == "formed":
            self._hold_next_plan(now)

    def _hold_next_plan(self, now: float) -> None:
        """While paused the next plan is journaled at once, and with it the commands in it are applied."""
        self._apply_staged(now)
        plan = self._next_train_plan()
        self._book.keep(paused_ids=plan.commands)
        self._book.decide(d.Issue(plan, self.durable, held=True))
        self._book.conclude(plan.step)

    def _on_side_command(self, command: d.Commanded, now: float) -> None:
        if command.verb == "evaluate" and any(rank.ready and not rank.ready.held_out for rank in self.ranks.values()):
            self._refuse(command, "verb", "there are no held-out samples: data.held_out keeps none")
            return
        self._desk.side[command.verb].append(command)
        self._advance(now)

    def _on_pause(self, command: d.Commanded, now: float) -> None:
        if self.durable.mode == "stopping" or (self._wants_pause and not command.again):
            self._refuse(command, "verb", f"the run is already {self.state}")
            return
        self._wants_pause = True
        self._desk.pausing.append(command)
        self._advance(now)

    def _enter_pause(self, now: float) -> None:
        if self.durable.mode != "paused":
            self._book.keep(mode="paused")
            self._book.decide(d.Persist(self.durable))
        for id, carried in list(self.durable.carried.items()):
            if carried.verb == "resume":
                self._book.end(id, "failed", self.progress.step, "paused again before a step was run")
        for command in self._desk.pausing:
            self._book.end(command.id, "applied", self.progress.step, before="running", after="paused")
        self._desk.pausing.clear()
        if self._desk.staged:
            self._hold_next_plan(now)

    def _on_resume(self, command: d.Commanded, now: float) -> None:
        if not self._wants_pause:
            self._refuse(command, "verb", f"the run is {self.state}, not paused")
            return
        self._wants_pause = False
        self._fail_pausing("resumed before the pause took effect")
        self._book.carry(command, self._planned_step + 1, "paused", "running")
        was_paused = self.durable.mode == "paused"
        self._book.keep(mode="running")
        self._book.decide(d.Persist(self.durable))
        if was_paused and self.stage == "formed":
            self._form()
        else:
            self._advance(now)

    def _on_stop(self, command: d.Commanded, checkpoint: bool, now: float) -> None:
        if self.durable.mode == "stopping" and not command.again:
            self._refuse(command, "verb", "the run is already stopping")
            return
        self._desk.stopping.append(command)
        self._wants_pause = False
        self._fail_pausing("the run was stopped")
        self._book.keep(mode="stopping", stop_writes_checkpoint=checkpoint)
        self._book.decide(d.Persist(self.durable))
        if self.stage == "loading" and not self._adopts:
            self._leave("stopped")  # the trainers are still loading: there is nothing to save
        self._advance(now)

    def _call_stop_off(self, why: str) -> None:
        """Nothing is lost to a disk that takes no checkpoint: the run pauses, and can be stopped without one."""
        for command in self._desk.stopping:
            self._book.end(command.id, "failed", self.progress.step, f"{why}; paused instead")
        self._desk.stopping.clear()
        self._ending_scheduled, self._wants_pause = False, True
        self._book.keep(mode="running")

    def _expire(self, now: float) -> None:
        for command in self._desk.take_expired(now):
            self._book.end(command.id, "expired", reason=EXPIRED)
        if self._wants_pause and self.durable.mode != "paused" and self.stage == "formed" and not self._desk.pausing:
            self._wants_pause = False
            self._advance(now)

    def _fail_pausing(self, why: str) -> None:
        for pausing in self._desk.pausing:
            self._book.end(pausing.id, "failed", reason=why)
        self._desk.pausing.clear()

    # ------------------------------------------------------------ ending

    def _leave(self, final: Final) -> None:
        self.final, self.stage = final, "leaving"
        for command in self._desk.stopping:
            self._book.end(command.id, "applied", self.progress.step, before="running", after="stopped")
        self._desk.stopping.clear()
        for rank, state in self.ranks.items():
            if not state.ended:
                self._book.decide(d.Tell(rank, m.Leave(run=self.run, reason=self.reason or final)))

    def _on_rank_ended(self, ended: d.RankEnded) -> None:
        rank = self.ranks.get(ended.rank)
        if rank is None or rank.ended:
            return
        rank.ended = True
        if self.stage != "leaving":
            self._end_unasked(ended)
        if all(state.ended for state in self.ranks.values()):
            assert self.final is not None
            self.stage = "over"
            self._end_open(f"the run {self.final} before a step could carry it")
            self._book.decide(d.Ended(self.final, self.reason))

    def _end_unasked(self, ended: d.RankEnded) -> None:
        """It ended as our predecessor had told it to, or of itself."""
        if ended.clean and self._adopts and self.progress.step >= self.config.run.steps:
            self._leave("finished")
        elif ended.clean and self._adopts and self.durable.mode == "stopping":
            self._leave("stopped")
        else:
            self._fail(f"rank {ended.rank} ({self._node(ended.rank)}) {ended.why}")

    def _fail(self, reason: str) -> None:
        if self.stage == "leaving":
            return
        self.reason = reason
        self._book.happen("run", "error", f"failed: {reason}")
        self._end_open(f"the run failed: {reason}")
        self._leave("failed")

    def _end_open(self, why: str) -> None:
        self._book.conclude(self.progress.step)
        for command in self._desk.take_all():
            self._book.end(command.id, "failed", self.progress.step, why)
        for id in list(self.durable.carried):
            self._book.end(id, "failed", self.progress.step, why)

    # ------------------------------------------------------------ small things

    def _refuse(self, command: d.Commanded, field: str, reason: str) -> None:
        self._book.end(command.id, "rejected", reason=reason, field=field)

    def _rate_at(self, step: int) -> float:
        return rate(self.durable.settings.lr, self.config.optimizer, self.config.run.steps, step)

    def _node(self, rank: int) -> str:
        return self.durable.settings.ranks[rank].node

    def _answers(self) -> list[m.Fenced]:
        return [state.fenced for state in self.ranks.values() if state.fenced is not None]

    def _any_ready(self) -> m.Ready:
        return next(state.ready for state in self.ranks.values() if state.ready is not None)
