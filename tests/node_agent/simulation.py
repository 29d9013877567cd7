"""A group of simulated ranks around a real Conductor: what a trainer does, without a model, in any order."""

import dataclasses
import random
from collections import deque

import msgspec

from trainctl.node_agent import decisions as d
from trainctl.node_agent import shares
from trainctl.node_agent.book import Progress
from trainctl.node_agent.conductor import Conductor
from trainctl.node_agent.settings import Durable, RankSetting, Settings
from trainctl.protocol import messages as m
from trainctl.protocol import runfile, verbs

RUN = "sim"


def config(steps: int = 20, batch: int = 8, **tables: dict) -> runfile.RunFile:
    raw = {
        "run": {"name": RUN, "steps": steps},
        "model": {"path": "/model"},
        "data": {"path": "/data"},
        "batch": {"global": batch, "micro": 4},
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
        "checkpoint": {"at_end": False},
        **tables,
    }
    return runfile.parse(raw)


def durable(nodes: tuple[str, ...] = ("a",), batch: int = 8) -> Durable:
    counts = shares.apportion(batch, dict.fromkeys(range(len(nodes)), 1.0))
    ranks = {rank: RankSetting(node, counts[rank], min(4, counts[rank])) for rank, node in enumerate(nodes)}
    return Durable(Settings(1, batch, ranks), m.Generation(1, 0), 0)


@dataclasses.dataclass
class SimRank:
    """What a trainer keeps: its generation, its plans, its last step and what its accumulators hold."""

    rank: int
    generation: m.Generation | None = None
    last_step: int = 0
    plans: deque = dataclasses.field(default_factory=deque)
    accumulated: bool = False
    held: tuple[m.Range, ...] = ()
    held_from: m.Generation | None = None
    gone: bool = False
    disk_full: bool = False
    reports: list = dataclasses.field(default_factory=list)
    done: list = dataclasses.field(default_factory=list)  # (step, positions) of every update applied

    def ready(self) -> m.Ready:
        return m.Ready(
            run=RUN, rank=self.rank, pid=1, backend="torch", device="cpu", parameters=1, samples=100, held_out=10,
            mean_weight=4.0, layout_digest="l", model_digest="m", data_digest="d", last_step=self.last_step, cursor=0,
        )  # fmt: skip

    def take(self, message, others=()) -> list:
        match message:
            case m.Form():
                self.generation = message.generation
                self.plans.clear()
                self.accumulated = False
                return [m.Formed(run=RUN, rank=self.rank, generation=message.generation)]
            case m.Fence():
                if self.accumulated and any(other.last_step > self.last_step for other in others):
                    self.work(others)  # the reduce has happened: an update in progress finishes first
                self.generation = None
                return [
                    m.Fenced(
                        run=RUN, rank=self.rank, generation=message.generation, last_step=self.last_step,
                        held_from=self.held_from, held=self.held, reports=tuple(self.reports[-8:]),
                    )
                ]  # fmt: skip
            case m.StepPlan():
                if message.generation == self.generation:
                    self.plans.append(message)
            case m.Leave():
                self.gone = True
        return []

    def work(self, others=()) -> list:
        """One stride: accumulate, then (the reduce lets nobody through before all have) update."""
        if not self.plans or self.generation is None:
            return []
        plan = self.plans[0]
        mine = next(work for work in plan.work if work.rank == self.rank)
        if plan.kind == "train" and not self.accumulated:
            before = self.held if plan.finishes is not None else ()
            self.held, self.held_from = (*before, *mine.ranges), plan.finishes or plan.generation
            self.accumulated = True
            return [m.Soon(run=RUN, rank=self.rank, generation=plan.generation, seq=plan.seq)]
        if plan.kind == "train" and not all(
            rank.last_step >= plan.step or (rank.accumulated and rank.last_step == plan.step - 1) for rank in others
        ):
            return []
        self.plans.popleft()
        count = sum(piece.count for piece in (self.held if plan.kind == "train" else mine.ranges))
        writes = self.rank in plan.writers and not self.disk_full
        report = m.Report(
            run=RUN, rank=self.rank, generation=plan.generation, seq=plan.seq, kind=plan.kind, step=plan.step,
            loss_sum=2.0, weight=1.0, own_weight=1.0, own_samples=count, micro_batch=mine.micro_batch,
            checkpoint=m.CheckpointInfo("p", plan.step, 1, 0.0) if writes else None,
        )  # fmt: skip
        if plan.kind == "train":
            self.done.append((plan.step, self.held))
            self.last_step, self.accumulated, self.held, self.held_from = plan.step, False, (), None
            self.reports.append(report)
        return [report]


class Simulation:
    """Delivers between a conductor and its ranks; keeps everything that was decided."""

    def __init__(self, run_config: runfile.RunFile, kept: Durable | None = None, seed: int = 0) -> None:
        self.config = run_config
        self.journal = kept or durable(batch=run_config.batch.global_)
        self.conductor = Conductor(RUN, run_config, self.journal, Progress())
        self.ranks = {rank: SimRank(rank) for rank in self.journal.settings.ranks}
        self.random = random.Random(seed)
        self.now = 0.0
        self.inbox: deque = deque()
        self.plans: list[m.StepPlan] = []
        self.commits: list[m.StepCommitted] = []
        self.ends: dict[str, d.CommandEnded] = {}
        self.happened: list[d.Happened] = []
        self.ended: d.Ended | None = None
        self.next_id = 0
        self.sent: dict[str, d.Commanded] = {}
        self.crash_after: int | None = None  # decisions the agent still carries out before it is killed

    def begin(self) -> "Simulation":
        for rank in self.ranks.values():
            self.feed(rank.ready())
        return self

    def feed(self, event) -> None:
        """What an agent does with an event, unless it is killed on the way."""
        for decision in self.conductor.handle(event, self.now):
            if self.crash_after is not None:
                if self.crash_after == 0:
                    self.crash_after = None
                    self.restart_agent()
                    return
                self.crash_after -= 1
            self.carry_out(decision)

    def carry_out(self, decision) -> None:
        match decision:
            case d.Issue(plan, kept, held):
                self.journal = kept
                self.plans.append(plan)
                if not held:
                    for work in plan.work:
                        self.deliver(work.rank, plan)
            case d.Persist(kept):
                self.journal = kept
            case d.Tell(rank, message):
                self.deliver(rank, message)
            case d.Commit(step, _):
                self.commits.append(step)
            case d.CommandEnded():
                assert decision.id not in self.ends, "a command ended twice"
                self.ends[decision.id] = decision
            case d.Happened():
                self.happened.append(decision)
            case d.Ended():
                self.ended = decision

    def deliver(self, rank: int, message) -> None:
        self.inbox.extend(self.ranks[rank].take(message, self.ranks.values()))
        if self.ranks[rank].gone:
            self.inbox.append(d.RankEnded(rank, True, "exited with 0"))

    def command(self, verb: str, node: str | None = None, if_plan: int | None = None, ttl: float = 1e9, **args) -> str:
        self.next_id += 1
        id = f"c{self.next_id}"
        typed = verbs.check(verb, args, node)
        self.sent[id] = d.Commanded(id, verb, typed, "anna", node, if_plan, self.now + ttl)
        self.feed(self.sent[id])
        return id

    def stride(self) -> bool:
        """Deliver one thing or let one rank work; False if nothing is left to do."""
        choices = [rank for rank in self.ranks.values() if rank.plans and rank.generation is not None]
        if self.inbox and (not choices or self.random.random() < 0.6):
            self.feed(self.inbox.popleft())
            return True
        if not choices:
            return False
        self.inbox.extend(self.random.choice(choices).work(self.ranks.values()))
        return True

    def run(self, strides: int = 10_000) -> "Simulation":
        while strides and self.stride():
            strides -= 1
        return self

    def until_step(self, step: int) -> "Simulation":
        while self.conductor.progress.step < step:
            assert self.stride(), f"stuck at step {self.conductor.progress.step}"
        return self

    def restart_agent(self) -> None:
        """The agent is killed: what was journaled is all that its successor knows; the ranks live on."""
        self.inbox.clear()
        last = self.commits[-1] if self.commits else None
        progress = Progress(last.step, last.cursor, last.tokens_total) if last else Progress()
        recent = tuple(plan for plan in self.plans[-32:] if plan.kind == "train")
        carried = {id: command for id, command in self.journal.carried.items() if id not in self.ends}
        self.journal = msgspec.structs.replace(self.journal, carried=carried)
        self.conductor = Conductor(RUN, self.config, self.journal, progress, recent)
        for rank in self.ranks.values():
            alive = m.Alive(
                run=RUN, rank=rank.rank, generation=rank.generation, step=rank.last_step, phase="idle",
                ready=rank.ready(),
            )  # fmt: skip
            if not rank.gone:
                self.feed(alive)
        for id, command in self.sent.items():
            if id not in self.ends and id not in self.conductor.durable.carried:
                self.feed(dataclasses.replace(command, again=True))
        for rank in self.ranks.values():
            if rank.gone:
                self.feed(d.RankEnded(rank.rank, True, "exited with 0"))


def check_ledger(simulation: Simulation) -> None:
    """Every position of every committed step was computed by exactly one rank, once, and the cursor never jumps."""
    cursor = 0
    for commit in simulation.commits:
        pieces = sorted(
            piece
            for rank in simulation.ranks.values()
            for step, held in rank.done
            if step == commit.step
            for piece in held
        )
        at = cursor
        for piece in pieces:
            assert piece.start == at, (commit.step, pieces)
            at = piece.stop
        assert at == commit.cursor == cursor + commit.global_batch
        cursor = at
    assert [commit.step for commit in simulation.commits] == list(range(1, len(simulation.commits) + 1))
    identities = [(plan.generation, plan.seq) for plan in simulation.plans]
    assert len(set(identities)) == len(identities)
