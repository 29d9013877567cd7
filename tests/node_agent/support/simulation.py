"""An agent around a real Conductor with simulated ranks: what it decides is carried out, in any order that links allow.

Everything that was decided is kept and checked as it comes: who may commit what, and that nothing is done twice.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from tests.node_agent.support.simulated_ranks import RUN, TORN, SimRank, SimWorld

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.in_flight import MIN_REDUCE_SECONDS
from trainctl.node_agent.conductor.state import Progress
from trainctl.node_agent.planning.durable import Durable, RankSetting, Settings
from trainctl.node_agent.runs import restore
from trainctl.protocol import messages as m
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.config import run_file, run_tables
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import CheckpointWritten, RunStateChanged

TICK_SECONDS = 15.0
IN_FLIGHT_SECONDS = 0.025
"""Seconds: what was kept no longer ago may be lost with the machine that kept it."""


def config(steps: int = 20, batch: int = 8, **tables: dict) -> run_tables.RunFile:
    """With even shares that stay so unless `tables` say otherwise: most tests begin with the first step."""
    policy = {"rebalance": {"mode": "off"}, **tables.pop("policy", {})}
    group = {"first_shares": "even", **tables.pop("group", {})}
    raw = {
        "run": {"name": RUN, "steps": steps},
        "model": {"path": "/model"},
        "data": {"path": "/data"},
        "batch": {"global": batch, "micro": 4},
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
        "checkpoint": {"at_end": False},
        "group": group,
        "policy": policy,
        **tables,
    }
    return run_file.parse(raw)


def durable(nodes: tuple[str, ...] = ("a",), batch: int = 8) -> Durable:
    counts = apportion(batch, dict.fromkeys(range(len(nodes)), 1.0))
    ranks = {rank: RankSetting(node, counts[rank], 4) for rank, node in enumerate(nodes)}
    return Durable(Settings(1, batch, ranks), m.Generation(1, 0), 0, probed=())


class Copy(NamedTuple):
    """A run's record as a follower may have it."""

    at: float
    journal: Durable
    plans: tuple[m.StepPlan, ...]
    commits: tuple[m.StepCommitted, ...]
    ended: int  # commands

    @property
    def seq(self) -> int:
        return self.plans[-1].seq if self.plans else 0


class Simulation:
    """Delivers between a conductor and its ranks; a stride is one message delivered or one piece of work done."""

    def __init__(self, run_config: run_tables.RunFile, kept: Durable | None = None, seed: int = 0) -> None:
        self.config = run_config
        self.journal = kept or durable(batch=run_config.batch.global_)
        self.conductor = Conductor(RUN, run_config, self.journal, Progress())
        self.world = SimWorld(seed)
        self.ranks = {rank: SimRank(rank, self.world) for rank in self.journal.settings.ranks}
        self.random = random.Random(seed)
        self.now = 0.0
        self.listens_since = 0.0
        self.strides = 0
        self.faults = 0  # since the last commit: what may keep a group from forming
        self.lost: set[int] = set()  # ranks whose node is off for good
        self.plans: list[m.StepPlan] = []  # held ones included
        self.sent_plans: list[m.StepPlan] = []
        self.commits: list[m.StepCommitted] = []
        self.parts: set[tuple[int, int]] = set()
        self.ends: dict[str, d.CommandEnded] = {}
        self.happened: list[m.Event] = []
        self.nobody_left = False
        self.retracted: list[m.StepCommitted] = []
        self.starts = 0
        self.drifts: list[d.Drifted] = []
        self.evaluated: list[int] = []
        self.ended: d.Ended | None = None
        self.next_id = 0
        self.sent: dict[str, d.Commanded] = {}
        self.started = False
        self.promotions = 0
        self.proposed: list[d.Proposed] = []
        self.lacking = ""  # what is missing for a majority of nodes
        self._copies: deque[Copy] = deque(maxlen=40)  # what the followers' records may hold, the newest last
        self._taken = 0  # the newest plan that a rank has been given by its agent, which had journaled it
        self.crash_after: int | None = None  # decisions the agent still carries out before it is killed
        self.rollbacks = 0  # taken up
        self.skips: dict[int, int] = {}  # positions skipped after a step
        self.undone: set[str] = set()  # commands that were applied at steps which a rollback has undone
        self._tellers: dict[m.Generation, Conductor] = {}
        self._train_plans: set[tuple[m.Generation, int]] = set()
        self._newest_plan: dict[int, m.Generation] = {}  # by step: the newest generation it was planned in

    def begin(self) -> "Simulation":
        self.started = True
        for rank in self.ranks.values():
            rank.load()
        return self

    # ------------------------------------------------------------ the agent

    def feed(self, event) -> None:
        """Do what an agent does with an event, unless it is killed on the way."""
        for decision in self.conductor.handle(event, self.now):
            if self.crash_after is not None:
                if self.crash_after == 0:
                    self._carry_out_in_part(decision)
                    self.restart_agent()
                    return
                self.crash_after -= 1
            self.carry_out(decision)
            self._copies.append(self._copy())

    def _copy(self) -> Copy:
        return Copy(self.now, self.journal, tuple(self.plans[-32:]), tuple(self.commits), len(self.ends))

    def carry_out(self, decision) -> None:
        match decision:
            case d.Issue(plan, kept, held):
                self._check_settings(kept.settings)
                self.journal = kept
                self.plans.append(plan)
                if not held:
                    self._send_plan(plan)
            case d.Persist(kept):
                self._check_settings(kept.settings)
                self.journal = kept
            case d.Tell(rank, message):
                if not isinstance(message, m.Leave):
                    teller = self._tellers.setdefault(message.generation, self.conductor)
                    assert teller is self.conductor, f"two conductors spoke for {message.generation}"
                self._send(rank, message)
            case d.Start(rank):
                if self.ranks[rank].gone and rank not in self.lost:  # beside one that lives no other is started
                    self.starts += 1
                    self.ranks[rank].restart()
            case d.Kill(rank):
                if self.ranks[rank].connected and not self.ranks[rank].gone:
                    self.end_rank(self.ranks[rank], clean=False)
            case d.Retract(step):
                assert self.commits[-1].step == step
                assert all(
                    rank.last_step < step
                    or rank.gone
                    or rank.rank not in self.conductor.ranks
                    or rank.rank not in self.conductor.durable.members
                    for rank in self.ranks.values()
                )
                self.retracted.append(self.commits.pop())
                self.parts = {part for part in self.parts if part[0] != step}
            case d.Commit(step, first):
                self._check_commit(step)
                self.commits.append(step)
                self.faults = 0
                self._add_part(first)
            case d.RankDone(part, step):
                assert step in self.commits and part.step == step.step
                self._add_part(part)
            case d.Drifted():
                self.drifts.append(decision)
            case d.Evaluated(step, _, _, _):
                self.evaluated.append(step)
            case d.CommandEnded():
                assert decision.id not in self.ends, "a command ended twice"
                self.ends[decision.id] = decision
            case d.Happened():
                fields = {field.name: getattr(decision, field.name) for field in dataclasses.fields(decision)}
                self.happened.append(m.Event(id=len(self.happened) + 1, at=0.0, **fields))
                ends = isinstance(decision.data, RunStateChanged) and decision.data.after
                if ends == "failed" or "going back" in (ends or ""):
                    self.nobody_left = not self._standing()
            case d.Proposed():
                self.proposed.append(decision)
            case d.Ended():
                self.ended = decision

    def _carry_out_in_part(self, decision) -> None:
        """A plan is journaled after the settings it was made from, and sent to one rank after another."""
        done = self.random.randrange(4)
        if not isinstance(decision, d.Issue) or decision.held or not done:
            return
        self.journal = decision.durable
        if done == 2:
            self.plans.append(decision.plan)
        elif done == 3:
            self.carry_out(decision)
            for work in decision.plan.work[self.random.randrange(len(decision.plan.work)) :]:
                if self.ranks[work.rank].connected and not self.ranks[work.rank].gone:
                    self.ranks[work.rank].down.pop()

    def _send_plan(self, plan: m.StepPlan) -> None:
        assert self._tellers.get(plan.generation) is self.conductor, "a plan of a generation that it didn't form"
        self.sent_plans.append(plan)
        if plan.kind == "train":
            models = [self.ranks[work.rank].model for work in plan.work]
            assert max(models) - min(models) <= 1e-4, f"step {plan.step} by ranks of unlike models"
            begun = plan.finishes is not None or plan.step <= self.journal.retracted  # by ranks that had the data
            ranks = [self.ranks[work.rank] for work in plan.work]
            assert begun or all(rank.has_data(plan) for rank in ranks if rank.generation == plan.generation), plan
            assert not self.lacking or plan.finishes is not None or plan.step <= self.journal.retracted
            self._check_train_plan(plan)
        for work in plan.work:
            self._send(work.rank, plan)

    def _send(self, rank: int, message) -> None:
        if self.ranks[rank].connected and not self.ranks[rank].gone:
            self.ranks[rank].down.append(message)

    def _add_part(self, part: m.RankStep) -> None:
        assert (part.step, part.rank) not in self.parts, "a part was told twice"
        self.parts.add((part.step, part.rank))

    def _standing(self) -> list[int]:
        """Ranks that live, work and have the state of the last step."""
        step, kept = self.conductor.progress.step, self.conductor.durable
        members = kept.settings.live.keys() & kept.members
        return [
            rank.rank for rank in self.ranks.values()
            if not (rank.gone or rank.silent or rank.hung) and rank.connected and rank.rank in members
            and (rank.last_step, rank.state) == (step, self.world.states.get(step))
        ]  # fmt: skip

    # ------------------------------------------------------------ what must hold

    def _check_settings(self, settings: Settings) -> None:
        counts = {rank: setting.share for rank, setting in settings.live.items()}
        assert counts and min(counts.values()) >= 1 and sum(counts.values()) == settings.global_batch
        for setting in settings.ranks.values():
            assert setting.out or 1 <= setting.micro_in_force <= setting.share, setting
            assert not setting.out or not setting.share, setting

    def _check_train_plan(self, plan: m.StepPlan) -> None:
        assert (plan.generation, plan.step) not in self._train_plans, "two plans for one step of a generation"
        self._train_plans.add((plan.generation, plan.step))
        self._newest_plan[plan.step] = max(plan.generation, self._newest_plan.get(plan.step, plan.generation))
        if plan.step - 1 in self.world.batches:
            assert plan.cursor == sum(self.world.batches[plan.step - 1]) + self.skips.get(plan.step - 1, 0)
        if plan.finishes is None and plan.step != self.journal.retracted:
            settings = self.journal.settings
            assert all(work.micro_batch <= settings.ranks[work.rank].share for work in plan.work), plan
            assert {work.rank: sum(piece.count for piece in work.ranges) for work in plan.work} == {
                rank: setting.share for rank, setting in settings.live.items()
            }

    def _check_commit(self, step: m.StepCommitted) -> None:
        before = self.commits[-1] if self.commits else None
        assert step.step == (before.step + 1 if before else 1), "steps are committed one after another"
        skipped = self.skips.get(step.step - 1, 0)
        assert step.cursor == (before.cursor if before else 0) + skipped + step.global_batch, "the cursor has no gaps"
        assert before is None or step.generation >= before.generation
        assert step.generation >= self._newest_plan[step.step], "committed by an older generation than planned it last"
        assert step.step in self.world.states, "no rank has made this step"

    def check_commands(self) -> None:
        """Every one ended, or waits for a resume; every edit that was applied is in the plans from its step
        on, and in none before."""
        waits = self.conductor.goes_back
        assert {*self.ends} <= {*self.sent} if waits else {*self.ends} == {*self.sent}
        versions = {commit.step: commit.plan_version for commit in self.commits}
        for id, end in self.ends.items():
            if id in self.undone:
                continue
            starts = (end.after or "").startswith("restarted")  # no plan changes before it is back
            if end.state == "applied" and self.sent[id].verb in EDITING and end.step in versions and not starts:
                former = versions.get(end.step - 1, 0)
                is_new = end.plan_version > former if end.before != end.after else end.plan_version >= former
                assert is_new and versions[end.step] >= end.plan_version, end

    def check_periodic(self) -> None:
        """Check that whatever the run file wants beside training ran at its steps, and at no other."""
        every = {
            "evaluate": self.config.evaluate.every_steps, "sync": self.config.group.sync_weights_every,
            "checkpoint": self.config.checkpoint.every_steps,
        }  # fmt: skip
        last = self.commits[-1].step if self.commits else 0
        for plan in self.sent_plans:
            if plan.kind in every and not plan.commands:
                if self.ended is not None and self.ended.state == "failed" and plan.step == last + 1:
                    continue  # of a step that nobody came to make
                redone = plan.step in {step.step for step in self.retracted}
                # A lead that is gone now was about to end the run there, and its successor had a step to make again.
                ended = plan.kind == "checkpoint" and plan.generation.term < self.journal.generation.term
                late = plan.kind == "checkpoint" and any(rank.background for rank in self.ranks.values())
                assert late or plan.step == last or redone or ended or plan.step % every[plan.kind] == 0, plan
        assert {step for step in range(1, last) if every["evaluate"] and step % every["evaluate"] == 0} <= set(
            self.evaluated
        )

    def check_writes(self) -> None:
        """A run that has ended by itself waits for its checkpoints."""
        if self.ended is not None and self.ended.state == "finished":
            assert self.journal.writing is None
        written = [event.data.step for event in self.happened if isinstance(event.data, CheckpointWritten)]
        assert set(self.journal.checkpoints) <= set(written)

    def check_alike(self) -> None:
        """After quiescence: all live ranks at the last step, with one and the same state."""
        settings, step = self.conductor.durable.settings, self.conductor.progress.step
        for rank in settings.live:
            at = self.ranks[rank]
            assert (at.last_step, at.cursor) == (step, self.conductor.progress.cursor)
            assert at.state == self.world.states[step] != TORN

    # ------------------------------------------------------------ commands

    def command(self, verb: str, node: str | None = None, if_plan: int | None = None, ttl: float = 1e9, **args) -> str:
        self.next_id += 1
        id = f"c{self.next_id}"
        typed = verbs.check(verb, args, node)
        self.sent[id] = d.Commanded(id, verb, typed, "anna", node, if_plan, self.now + ttl)
        self.feed(self.sent[id])
        return id

    def _take_proposed(self) -> None:
        """A policy's command, as the agent's journal takes it: the same id is taken once."""
        proposed = self.proposed.pop(0)
        if proposed.id not in self.sent:
            command = d.Commanded(**dataclasses.asdict(proposed) | {"args": proposed.args}, expires=self.now + 60.0)
            self.sent[proposed.id] = command
            self.feed(command)

    # ------------------------------------------------------------ time and order

    def talk(self) -> "Simulation":
        """Deliver all that is on the links, both ways, before anybody works."""
        while True:
            told = [rank for rank in self.ranks.values() if rank.connected and (rank.up or rank.down)]
            if not told:
                return self
            for rank in told:
                self.hear(rank) if rank.up else self.order(rank)

    def choices(self) -> list[Callable[[], None]]:
        """All that could happen next."""
        found: list[Callable[[], None]] = [self._take_proposed] if self.proposed else []
        for rank in self.ranks.values():
            if rank.connected and rank.up:
                found.append(lambda rank=rank: self.hear(rank))
            if rank.connected and rank.down and not rank.gone and not rank.silent:
                found.append(lambda rank=rank: self.order(rank))
            if rank.can_work:
                found.append(rank.work)
            if rank.can_seal:
                found.append(rank.seal)
            if rank.can_write:
                found.append(rank.write)
            if not rank.loaded and not rank.gone and not rank.silent and self.started:
                found.append(rank.load)
        return found

    def hear(self, rank: SimRank) -> None:
        """The oldest message of a rank reaches the agent."""
        self.feed(rank.up.popleft())

    def order(self, rank: SimRank) -> None:
        """The oldest order on a link reaches its rank."""
        if isinstance(rank.down[0], m.StepPlan):
            self._taken = max(self._taken, rank.down[0].seq)
        rank.take_order()
        if rank.gone:
            self.end_rank(rank, clean=True)

    def end_rank(self, rank: SimRank, *, clean: bool, memory: str = "") -> None:
        rank.gone, rank.silent = True, False
        rank.down.clear()
        if rank.group is not None:
            rank.group.broken = True
            rank.group = None
        rank.exit = d.RankEnded(rank.rank, clean, "exited with 0" if clean else "was ended by signal 9", memory)
        rank.up.append(rank.exit)

    def stride(self) -> bool:
        """One thing, by chance; False if nothing is left to do."""
        found = self.choices()
        if not found:
            return False
        self.strides += 1
        self._pass(0.01)
        self.random.choice(found)()
        return True

    def _pass(self, seconds: float) -> None:
        """A trainer that is there says so every second, whatever it does."""
        before, self.now = self.now, self.now + seconds
        for rank in self.ranks.values():
            if int(self.now) > int(before) and rank.connected and not rank.gone and not rank.silent:
                rank.up.append(rank.alive())
                if rank.chunks:
                    rank.up.append(rank.sealed())
                if rank.background and (said := rank.of_write()) is not None:
                    rank.up.append(said)

    def run(self, strides: int = 100_000) -> "Simulation":
        """Until nothing moves but the clock."""
        while strides and self.stride():
            strides -= 1
        return self

    def until(self, condition: Callable[[], bool]) -> "Simulation":
        for _ in range(100_000):
            if condition():
                return self
            assert self.stride(), f"stuck in {self.conductor.stage} at step {self.conductor.progress.step}"
        raise AssertionError("it never comes to that")

    def until_step(self, step: int) -> "Simulation":
        return self.until(lambda: self.conductor.progress.step >= step)

    def tick(self, seconds: float = 0.0) -> None:
        self._pass(seconds)
        self._notice_silent(seconds)
        self.feed(d.Ticked())
        self._give_up_lost()

    def _notice_silent(self, seconds: float) -> None:
        """As an agent does, of a trainer and of another node."""
        for rank in self.ranks.values():
            heard = max(self.conductor.ranks[rank.rank].heard or 0.0, self.listens_since)
            silent_seconds = self.now - heard
            is_long = silent_seconds >= self.conductor.restarts.silence_limit_seconds(
                rank.rank, in_touch=rank.connected
            )
            if is_long and seconds and (rank.silent or not rank.connected) and not rank.gone:
                alone = not any(other.connected for other in self.ranks.values() if other is not rank)
                why = "has been silent for 5 s" if rank.connected else "no agent answers"
                self.feed(d.RankSilent(rank.rank, why, silent_seconds, rank.connected, alone))

    def _give_up_lost(self) -> None:
        """As an agent does at the end of a run with a node that is silent."""
        for rank in sorted(self.lost):
            if self.conductor.final is not None and not self.conductor.ranks[rank].ended:
                self.feed(d.RankEnded(rank, False, "has been unreachable for 31 s"))

    def settle(self) -> "Simulation":
        """No more faults: all links come back, what was stopped goes on, what hangs is found by its deadline, and a
        growing file ends."""
        if self.world.chunks is not None:
            self.world.chunks, self.world.data_ended = self.world.chunks or 1, True
        self.crash_after = None
        if self.lacking:
            self.lack("")
        for rank in self.ranks.values():
            rank.silent = rank.hung = False
            self.reconnect(rank)
        for _ in range(60):
            self.run()
            if self.ended is not None or self.conductor.state == "paused":
                return self
            self.tick(TICK_SECONDS)
        raise AssertionError(f"no quiescence: {self.conductor.stage} at step {self.conductor.progress.step}")

    def finish(self) -> "Simulation":
        """To the end of the run."""
        self.settle()
        if self.ended is None:
            self.check_alike()
            self.command("resume")
            self.settle()
        assert self.ended is not None
        return self

    # ------------------------------------------------------------ faults

    def disconnect(self, rank: SimRank, kept: int = 0) -> None:
        """A connection is lost, and what was on it but for the `kept` newest that the rank had not sent yet."""
        if rank.connected:
            self.faults += 1
            rank.connected = False
            rank.down.clear()
            self._lose(rank, kept)

    def kill(self, rank: SimRank) -> None:
        """SIGKILL; a sum that it was in may come out for some."""
        if not rank.gone:
            self.faults += 1
            self.end_rank(rank, clean=False)

    def starve(self, rank: SimRank) -> None:
        """The kernel kills it for memory."""
        if not rank.gone:
            self.faults += 1
            self.end_rank(rank, clean=False, memory="the kernel killed it for memory (oom_kill 0 → 1)")

    def stop(self, rank: SimRank) -> None:
        """SIGSTOP."""
        if not rank.gone:
            self.faults += 1
            rank.silent = True

    def lose(self, rank: SimRank) -> None:
        """Its node is powered off, and stays so."""
        self.disconnect(rank)
        self.lost.add(rank.rank)
        if rank.group is not None:
            rank.group.broken = True
        rank.plans.clear()
        rank.failed = True

    def break_group(self, rank: SimRank) -> None:
        """A sum that some may have got and others not."""
        if rank.group is not None:
            self.faults += 1
            rank.group.broken = True

    def jump(self, seconds: float) -> None:
        """Time passes while messages are on their way, so that what was asked for may be overdue."""
        self.faults += seconds >= MIN_REDUCE_SECONDS
        self.tick(seconds)

    def reconnect(self, rank: SimRank) -> None:
        if not rank.connected and rank.rank not in self.lost:
            rank.connected = True
            rank.up.appendleft(d.RankReturned(rank.rank))
            if not rank.gone:
                rank.up.append(rank.alive())

    @staticmethod
    def _lose(rank: SimRank, kept: int) -> None:
        """Lose messages on their way up, but for the newest; that a process has ended is seen, not said."""
        said = [message for message in rank.up if not isinstance(message, d.RankEnded | d.RankReturned)]
        rank.up.clear()
        rank.up.extend(said[len(said) - min(kept, len(said)) :])
        if rank.exit is not None:
            rank.up.append(rank.exit)

    def restart_agent(self) -> None:
        """The agent is killed: what was journaled is all that its successor knows; the ranks live on."""
        self._succeed()

    def promote(self, lead: SimRank) -> None:
        """The lead's machine, with a rank on it, is gone all at once, and another node conducts: from a copy that lacks
        the last of what was kept, but no plan that a rank was given. A rank's node can be reached again later."""
        if self.ended is not None or self.conductor.final is not None or len(self.ranks) < 2:
            return
        self.promotions += 1
        self.kill(lead)
        self.disconnect(lead)
        for rank in self.ranks.values():
            if rank is not lead and rank.rank not in self.lost:
                rank.connected = True
        late = [copy for copy in self._copies if copy.seq >= self._taken and self.now - copy.at < IN_FLIGHT_SECONDS]
        copy = self.random.choice([*late, self._copy()])
        self._copies.clear()
        recent = restore.recent_plans(copy.journal, copy.plans)
        self.journal = restore.taken_over(copy.journal, self.journal.generation.term + 1, recent)
        # Plans that only the old lead had are nowhere any more.
        self.plans = [plan for plan in self.plans if plan.seq <= copy.seq]
        self.commits = list(copy.commits)
        self.parts = {part for part in self.parts if part[0] <= len(self.commits)}
        # The successor knows nothing of what was sent in the same moment, unless a plan that it has carries it.
        for id in [*self.ends][copy.ended :]:
            del self.ends[id]
            if id not in copy.journal.carried:
                del self.sent[id]
        self._succeed()
        if lead.rank in self.conductor.ranks and self.ended is None:
            self.feed(d.RankSilent(lead.rank, "its node's agent is gone, and another node was promoted"))

    def take_up(self) -> bool:
        """Takes up a run that a rollback has ended, from the checkpoint that it names: another conductor, and other
        trainers that have loaded it. False if there is none."""
        asked = self.journal.rollback
        if self.ended is None or not self.conductor.goes_back or asked is None or self.lost:
            return False
        assert asked.step in self.journal.checkpoints
        assert all(rank.gone or self.conductor.ranks[rank.rank].ended for rank in self.ranks.values())
        self.rollbacks += 1
        self.commits = self.commits[: asked.step]
        self.parts = {part for part in self.parts if part[0] <= asked.step}
        self.sent_plans = [plan for plan in self.sent_plans if plan.step <= asked.step]
        self.undone |= {id for id, end in self.ends.items() if (end.step or 0) > asked.step}
        self.skips = {step: count for step, count in self.skips.items() if step <= asked.step}
        count = asked.skip_batches * self.journal.settings.global_batch
        self.skips[asked.step] = self.skips.get(asked.step, 0) + count
        self.world.go_back(asked.step)
        cursor = (self.commits[-1].cursor if self.commits else 0) + self.skips[asked.step]
        for rank in self.ranks.values():
            rank.restart()
            rank.up.clear()
            rank.connected, rank.last_step, rank.cursor = True, asked.step, cursor
            rank.state = self.world.states[asked.step]
        self._begin_again(asked.step, cursor)
        return True

    def _begin_again(self, step: int, cursor: int) -> None:
        """A conductor for trainers that are being started; it has the settings of now."""
        self.journal = msgspec.structs.replace(
            self.journal, seq=self.plans[-1].seq, mode="paused" if self.journal.mode == "paused" else "running",
            carried={}, paused_ids=(), members=(), probed=(), retracted=0, rollback=None, writing=None,
            checkpoints=tuple(at for at in self.journal.checkpoints if at <= step), written=step,
            went_back=self.journal.generation,
        )  # fmt: skip
        self.conductor = Conductor(RUN, self.config, self.journal, Progress(step, cursor))
        self.ended, self.crash_after, self.listens_since = None, None, self.now
        self.nobody_left = False
        self._copies.clear()
        if self.lacking:
            self.feed(d.Quorum(self.lacking))

    def lack(self, lacking: str) -> None:
        """A majority of nodes becomes unreachable, or comes back."""
        self.lacking = lacking
        self.feed(d.Quorum(lacking))

    def _succeed(self) -> None:
        """Another conductor, from what is kept."""
        self.crash_after = None
        self.faults += 1
        last = self.commits[-1] if self.commits else None
        step, cursor = (last.step, last.cursor) if last else (0, 0)
        progress = Progress(step, cursor + self.skips.get(step, 0))
        recent = restore.recent_plans(self.journal, self.plans[-32:])
        carried = {id: command for id, command in self.journal.carried.items() if id not in self.ends}
        seq = self.plans[-1].seq if self.plans else 0
        self.journal = msgspec.structs.replace(self.journal, carried=carried, seq=seq)
        self.conductor = Conductor(RUN, self.config, self.journal, progress, recent)
        self.listens_since = self.now
        for rank in self.ranks.values():
            rank.down.clear()
            self._lose(rank, self.random.randrange(3))
            if rank.connected and not rank.gone:
                rank.up.append(rank.alive())
        for id, command in self.sent.items():
            if id not in self.ends and id not in self.conductor.durable.carried:
                self.feed(dataclasses.replace(command, again=True))
        if self.lacking:
            self.feed(d.Quorum(self.lacking))


EDITING = ("resize-batch", "set-global-batch", "set-lr", "rebalance", "drain", "admit")


def check_ledger(simulation: Simulation) -> None:
    """Every position of every committed step was in the sum that made it, once, and the cursor never jumps."""
    cursor = 0
    for number, commit in enumerate(simulation.commits, 1):
        assert commit.step == number
        cursor += simulation.skips.get(number - 1, 0)
        assert simulation.world.batches[commit.step] == (cursor, commit.global_batch)
        cursor = commit.cursor
    identities = [(plan.generation, plan.seq) for plan in simulation.plans]
    assert len(set(identities)) == len(identities)
