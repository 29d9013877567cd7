"""The conductor: the pure state machine that turns reports and commands into step plans; the clock is an argument.

It is the single writer of plans, so a change is atomic on all ranks by construction. Its parts share one book:
`formation` makes generations and `regroup` leads from one to the next, `course` issues plans and commits steps,
`losses` does what ranks that are gone ask for, `orders` obeys commands, `ending` ends the run.
"""

from math import inf

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor import side_plans
from trainctl.node_agent.conductor.commands import Orders
from trainctl.node_agent.conductor.failures import Losses
from trainctl.node_agent.conductor.hangs import Hangs
from trainctl.node_agent.conductor.patience import Patience
from trainctl.node_agent.conductor.pending import Desk
from trainctl.node_agent.conductor.pipeline import Course
from trainctl.node_agent.conductor.regroup import Regroup
from trainctl.node_agent.conductor.rendezvous import Formation, Rank
from trainctl.node_agent.conductor.restarts import Attendance
from trainctl.node_agent.conductor.shutdown import Ending, Final
from trainctl.node_agent.conductor.state import Book, CannotGoOnError, NobodyLeftError, Progress, Stage
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.planning.lr_schedule import rate
from trainctl.node_agent.planning.share_edits import AWAY_SECONDS
from trainctl.protocol import messages as m
from trainctl.protocol.config.run_file import RunFile
from trainctl.protocol.messages import verbs


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
        self._book = book = Book(run, config, durable, progress)
        self._desk = Desk()
        self._desk.wants_pause = durable.mode == "paused"
        self._formation = Formation(book, recent is not None)
        self._course = Course(book, self._formation, self._desk, recent or ())
        self._orders = Orders(book, self._desk, self._course, self._formation)
        self._ending = Ending(book, self._desk, self._formation, recent is not None)
        self._patience = Patience(book, self._course.waits)
        self._attendance = Attendance(book, self._formation)
        waits = self._course.waits
        self.hangs = Hangs(book, self._formation, waits, self._attendance, self._ending)
        self._regroup = Regroup(book, self._formation, self._course, self._attendance)
        self._losses = Losses(book, self._formation, waits, self._attendance, self.hangs, self._ending, self._regroup)

    # ------------------------------------------------------------ the outside

    def handle(self, event: d.Input, now: float) -> list[d.Decision]:
        """Decisions that follow from `event` at `now` (seconds of a monotonic clock)."""
        if self.stage == "over":
            if isinstance(event, d.Commanded) and isinstance(event.args, verbs.Stop) and self.goes_back:
                self._ending.stop_instead(event.id)
                self._book.decide(d.Ended("stopped", self.reason))
            elif isinstance(event, d.Commanded):
                self._orders.refuse(event, "run", f"the run is {self.final}")
            return self._book.take()
        if isinstance(event, m.Message) and event.rank in self.ranks:
            self.ranks[event.rank].heard = now
        try:
            self._dispatch(event, now)
        except NobodyLeftError as error:
            self._ending.go_back(str(error))
        except CannotGoOnError as error:
            self._ending.fail(str(error))
        self._patience.look(now)
        return self._book.take()

    @property
    def durable(self) -> Durable:
        return self._book.durable

    @property
    def progress(self) -> Progress:
        return self._book.progress

    @property
    def stage(self) -> Stage:
        return self._book.stage

    @property
    def final(self) -> Final | None:
        return self._ending.final

    @property
    def reason(self) -> str:
        """Why the run failed, or makes no steps; empty if neither."""
        return self._ending.reason or (self._book.lacking if self.final is None else "")

    @property
    def ranks(self) -> dict[int, Rank]:
        """All of the run's, drained ones included."""
        return self._formation.ranks

    @property
    def engine(self) -> str:
        """What the newest generation sums by; "none" for one rank alone."""
        return self._formation.engine

    @property
    def is_mixed(self) -> bool:
        """Whether live ranks are of unlike backends."""
        return len({at.ready.backend for at in self._formation.live.values() if at.ready is not None}) > 1

    @property
    def goes_back(self) -> bool:
        """Whether the run, though over for this conductor, is to be taken up from its newest checkpoint."""
        return self._ending.goes_back

    @property
    def state(self) -> m.RunState:
        """The run's state in the words that clients see."""
        if self.goes_back:
            return "starting"
        if self.final is not None:
            return self.final if self.stage == "over" or self.final == "failed" else "stopping"
        if self.durable.mode == "stopping":
            return "stopping"
        if self._desk.wants_pause:
            return "paused" if self.durable.mode == "paused" else "pausing"
        return "running" if self.stage == "formed" and not self._book.lacking else "starting"

    @property
    def learning_rate(self) -> float:
        """Of the step in progress, or of the next one."""
        step = min(self.progress.step + 1, self.config.run.steps)
        return rate(self.durable.settings.lr, self.config.optimizer, self.config.run.steps, step)

    def silent_seconds(self, now: float) -> dict[int, float]:
        """For how long nothing was heard of each rank that has ever said something."""
        return self._formation.silent_seconds(now)

    def patience_seconds(self, rank: int) -> float:
        """How long a trainer may say nothing; the longest while it loads for the first time."""
        return self._attendance.patience_seconds(rank)

    def draining(self, rank: int) -> str:
        """Until when the group has a rank of a node whose drain was accepted; empty if there is no such drain."""
        node = self.durable.settings.ranks[rank].node
        staged = any(isinstance(command.args, verbs.Drain) and command.node == node for command in self._desk.staged)
        return self._course.waits.end_of_part if staged else ""

    def is_starting(self, rank: int) -> bool:
        """Whether a lost rank's trainer has been started again and is to load yet."""
        return self._attendance.is_starting(rank)

    def ready(self, rank: int) -> m.Ready | None:
        """What a rank said of itself when it had loaded, None before."""
        return self.ranks[rank].ready

    # ------------------------------------------------------------ events

    def _dispatch(self, event: d.Input, now: float) -> None:
        match event:
            case m.Ready():
                self._on_loaded(event.rank, event, None, now)
            case m.Alive():
                if event.rank in self.ranks:
                    self.ranks[event.rank].doing = f"{event.phase} of step {event.step}"
                    self._course.waits.standstills.heard(event, now)
                if event.ready is not None:
                    self._on_loaded(event.rank, event.ready, event.generation, now)
            case m.Soon():
                if self._course.on_soon(event, now):
                    self._advance(now)
            case m.Report():
                self._on_report(event, now)
            case m.Fenced():
                self._regroup.on_fenced(event, now)
            case m.Offered():
                self._formation.on_offered(event, now)
            case m.Formed():
                if self._formation.on_formed(event, now):
                    self._course.begin(now)
                    self._advance(now)
            case m.GroupFailed():
                self._regroup.on_group_failed(event, now)
            case m.TrainerFailed():
                self._losses.on_trainer_failed(event, now)
            case d.Commanded():
                self._on_command(event, now)
            case d.RankEnded():
                self._losses.on_ended(event, now)
            case d.RankSilent():
                self._losses.on_silent(event, now)
            case d.RankReturned():
                self._on_returned(event.rank, now)
            case d.Quorum(lacking=lacking):
                self._on_quorum(lacking, now)
            case d.Ticked():
                self._on_tick(now)

    def _on_quorum(self, lacking: str, now: float) -> None:
        if bool(lacking) != bool(self._book.lacking):
            text = f"no more steps: {lacking}" if lacking else "enough nodes are in reach: steps are made again"
            self._book.happen("run", "error" if lacking else "good", text)
        self._book.lacking = lacking
        self._advance(now)

    def _on_loaded(self, rank: int, ready: m.Ready, generation: m.Generation | None, now: float) -> None:
        known = self.ranks[rank].ready if rank in self.ranks else None
        if self._formation.meet(rank, ready, generation):
            self._regroup.begin(now)
        elif rank in self._formation.returning and known is None:
            if generation is not None:  # the same process as before
                self._ask_for_reports(rank)
            self._advance(now)

    def _ask_for_reports(self, rank: int) -> None:
        """A rank that takes part no more repeats its newest reports, so that no part of a step is missing."""
        if self.stage in ("fencing", "offering", "forming", "formed"):
            self._book.decide(d.Tell(rank, m.Fence(run=self.run, generation=self.durable.generation)))

    def _on_report(self, report: m.Report, now: float) -> None:
        done = self._course.on_report(report, now)
        if done is None or self.stage == "leaving":  # then every command has its outcome
            return
        if report.kind == "train":
            for rank in done.ranks:
                self._attendance.stepped(rank)
        if report.kind == "probe":
            self._losses.refuse(side_plans.probe(self._book, done.plan, done.reports), now)
        failed = side_plans.conclude(self._book, self._course.rates, done.plan, done.reports)
        if failed and self.durable.mode == "stopping":
            self._orders.call_stop_off(failed)
        self._advance(now)

    def _on_returned(self, rank: int, now: float) -> None:
        """Whatever was said on the lost connection is asked for again by a fence, or said again."""
        at = self.ranks.get(rank)
        if self.stage == "leaving" and at is not None and not at.ended:
            self._ending.tell(rank)
        elif self.stage not in ("loading", "leaving") and rank in self._formation.live:
            self._book.happen("agent", "warning", f"back in touch with {self.durable.settings.label(rank)}'s trainer")
            self._regroup.anew(now)
        elif rank in self._formation.returning:
            self._ask_for_reports(rank)

    def _on_command(self, command: d.Commanded, now: float) -> None:
        if isinstance(command.args, verbs.Stop) and self.goes_back:
            self._ending.stop_instead(command.id)
            return
        if isinstance(command.args, verbs.Admit) and self.stage != "leaving":
            after = self._attendance.try_again(command.node, now)
            if after:
                self._book.end(command.id, "applied", self.progress.step, after=after)
                return
        self._orders.take(command, self.state, now)
        if self.durable.mode == "stopping" and self.stage == "loading" and not self._formation.adopts:
            self._ending.leave("stopped")  # the trainers are still loading: there is nothing to save
        self._advance(now)

    def _on_tick(self, now: float) -> None:
        for rank in self._formation.unanswered(now, self.silent_seconds(now)):
            self._losses.on_silent(d.RankSilent(rank, "has not answered a fence"), now)
        late = self._formation.overdue(now) or self._course.waits.overdue(now)
        if late:
            self._regroup.leave(late, now)
        if self.stage != "leaving":
            self._attendance.start_due(now)
        self._course.waits.tell_slow(now)
        self._losses.look_for_hung(now)
        if self._orders.expire(now):
            self._advance(now)
        self._lose_patience(now)

    def _lose_patience(self, now: float) -> None:
        """A stop ends, whoever is hung or out of reach."""
        lost_seconds, waits = self._patience.lost_seconds(now), self._course.waits
        if lost_seconds:
            owes_checkpoint = self._course.agenda.owes_checkpoint(self.progress.step)
            self._ending.give_up(self._not_heard(waits.awaited, now), lost_seconds, owes_checkpoint=owes_checkpoint)

    def _not_heard(self, awaited: list[int], now: float) -> list[int]:
        """Those among the awaited that say nothing at all; all of them if each is still heard of."""
        silent_seconds = self.silent_seconds(now)
        return [rank for rank in awaited if silent_seconds.get(rank, inf) > AWAY_SECONDS] or awaited

    def _advance(self, now: float) -> None:
        """Issue the next plan, or do what the boundary asks for instead."""
        resumes, self._orders.wants_new_generation = self._orders.wants_new_generation, False
        match "form" if resumes else self._course.advance(now):
            case "form":
                self._course.abandon()
                if resumes:
                    self._course.take_back(now)
                self._formation.form(self._formation.members, now)
            case "pause":
                self._orders.enter_pause(now)
            case "stopped" | "finished" as final:
                self._ending.leave(final)
            case None:
                pass
