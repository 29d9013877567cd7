"""One agent's commands on their whole way: its real books on disk, simulated ranks, and kills between any two writes.

A kill is an exception out of SQLite's `execute`, before or after its effect: what was committed by then is
all that the next agent has, as after kill -9.
"""

import asyncio
import random
from pathlib import Path
from typing import Any, Self

import zmq
from tests.node_agent.support.records import drop
from tests.node_agent.support.simulated_ranks import RUN, SimRank, SimWorld
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.state import Progress
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records.agent_db import AgentDb, JournaledCommand
from trainctl.node_agent.records.replication import Copies
from trainctl.node_agent.runs import restore
from trainctl.node_agent.runs.command_journal import CommandJournal, Handlers
from trainctl.node_agent.runs.session import LedRun, RunListener, Session
from trainctl.node_agent.trainers.rank_ports import Look
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.wire.codec import decode_order

STRIDES = 20_000


class Killed(BaseException):
    """kill -9."""


class Mortal:
    """A connection whose agent dies at some write."""

    def __init__(self, connection: Any, life: "Life") -> None:
        self._connection, self._life = connection, life

    def execute(self, sql: str, *values: Any) -> Any:
        if sql.startswith("PRAGMA synchronous"):
            return None  # it is the process that dies here, not the machine
        if sql.lstrip().upper().startswith(("SELECT", "PRAGMA")):
            return self._connection.execute(sql, *values)
        self._life.spend()
        done = self._connection.execute(sql, *values)
        self._life.spend()
        return done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self._life.spend()
        self._connection.__exit__(kind, *error)  # commits, or rolls back what a killed process had not committed
        if kind is None:
            self._life.spend()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Life:
    """The moments that an agent has left at which it may be killed; None: it lives on."""

    def __init__(self) -> None:
        self.left: int | None = None

    def spend(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


class SimPort:
    """A session's way to a simulated rank: whatever is said arrives, unless the agent is killed first."""

    def __init__(self, rank: SimRank) -> None:
        self._rank, self.reached_monotonic, self.in_touch = rank, 0.0, True

    def start(self, resume_from: Path | None) -> None:
        self._rank.load()

    async def tell(self, order: m.ToTrainer) -> bool:
        if not self._rank.gone:
            self._rank.down.append(order)
        return not self._rank.gone

    def look(self) -> Look:
        return Look(1)

    def doing(self) -> str:
        return "idle"

    async def end(self) -> None:
        self._rank.gone = True

    async def start_again(self) -> None:
        raise AssertionError("no rank is lost here")

    kill = end


class JournaledAgent:
    """Agents of one node, one after another, and the ranks that outlive them."""

    def __init__(self, folder: Path, ranks: int, seed: int, steps: int = 100_000) -> None:
        self.paths, self._ledger_path = RunPaths(runs_directory(folder) / RUN), folder / "agent.db"
        self.chance, self.loop = random.Random(seed), asyncio.new_event_loop()
        self.context = zmq.Context()
        self.world = SimWorld(seed)
        self.ranks = {rank: SimRank(rank, self.world) for rank in range(ranks)}
        self.replies: list[m.CommandReply] = []
        self.life, self.kills = Life(), 0
        kept = durable(tuple("abcd"[:ranks]), 12)
        recorder = restore.make_directory(self.paths, config(steps, 12))
        restore._keep(recorder, kept)
        conductor = Conductor(RUN, config(steps, 12), kept, Progress())
        self._begin(restore.Opening(conductor, self.paths, recorder, None), add=True)
        for rank in self.ranks.values():
            rank.load()

    def _guests(self) -> GuestRuns:
        return GuestRuns("a", self._ledger_path.parent, self.db, lambda _: None)

    def _begin(self, opening: restore.Opening | None, *, add: bool = False) -> None:
        self.db = AgentDb(self._ledger_path)
        if add:
            self.db.add_run(RUN, RUN, 0.0)
        self.journal = CommandJournal(self.db, self._answer, self, self._handlers(), self._guests())
        if opening is None:
            open_ids = frozenset(row.id for row in self.db.open_commands())
            opening = restore.surviving_run(self.paths, open_ids)
        ports = {rank: SimPort(at) for rank, at in self.ranks.items()}
        publisher = Publisher(self.context.socket(zmq.XPUB), "b" * 16)
        self.recorder = opening.recorder
        self.db._connection.execute("PRAGMA synchronous=OFF")
        self.db._connection = Mortal(self.db._connection, self.life)  # type: ignore[assignment]
        file = self.recorder._writer._file
        file.connection = Mortal(file.connection, self.life)  # type: ignore[assignment]
        copies = Copies(self.recorder, {}, list)
        led = LedRun(opening.conductor, self.paths, opening.recorder, copies, ports, "a", publisher, 0.0)
        self.session = Session(led, RunListener(self.journal.end, self.db.saw, self.journal.propose))

    async def _answer(self, identity: bytes, reply: m.CommandReply) -> None:
        self.replies.append(reply)

    def _handlers(self) -> Handlers:
        def refuse(*_: Any) -> Any:
            raise InvalidInputError("run", "there is no other run here")

        return Handlers(refuse, lambda run: None, refuse, refuse, refuse)

    # ------------------------------------------------------------ what happens

    def take(self, command: m.Command) -> list[m.CommandReply]:
        """The immediate answer to the client; nothing if the agent was killed meanwhile."""
        self.replies.clear()
        self._run(self.journal.take(b"client", command))
        return [*self.replies]

    def feed(self, event: d.Input) -> None:
        self._run(self.session.feed(event))

    def stride(self) -> bool:
        """One thing, by chance; False if nothing is left to do."""
        found = [lambda rank=rank: self.feed(rank.up.popleft()) for rank in self.ranks.values() if rank.up]
        found += [rank.take_order for rank in self.ranks.values() if rank.down]
        found += [rank.work for rank in self.ranks.values() if rank.can_work]
        if found:
            self.chance.choice(found)()
        return bool(found)

    def go_on(self, strides: int) -> None:
        for _ in range(strides):
            if not self.stride():
                return

    def doom(self, moments: int) -> None:
        """Have the agent killed at one of its next writes."""
        self.life.left = moments

    def kill(self) -> None:
        """Now; the next one goes on from what is on the disk."""
        self.kills += 1
        self.life.left = None
        self.db._connection.close()
        drop(self.recorder)
        for rank in self.ranks.values():
            rank.down.clear()
            said = list(rank.up)
            rank.up.clear()
            rank.up.extend(said[len(said) - min(len(said), self.chance.randrange(3)) :])
            rank.up.append(rank.alive())
        self._begin(None)
        self._run(self.journal.conduct_again(self.session))

    def _run(self, work: Any) -> None:
        try:
            self.loop.run_until_complete(self._with_proposals(work))
        except Killed:
            self.kill()

    async def _with_proposals(self, work: Any) -> None:
        """And whatever policies send because of it."""
        await work
        while self.journal._proposing:
            await asyncio.gather(*self.journal._proposing)

    # ------------------------------------------------------------ how it ends

    def until(self, condition: Any) -> None:
        for _ in range(STRIDES):
            if condition():
                return
            if not self.stride():
                self.feed(d.Ticked())
                if not any(rank.up or rank.down or rank.can_work for rank in self.ranks.values()):
                    break
        assert condition(), f"stuck in {self.session.conductor.stage}, {self.session.conductor.state}"

    def step(self) -> int:
        return self.session.conductor.progress.step

    def close(self) -> None:
        self.session.close()
        self.db.close()
        self.context.destroy(linger=0)
        self.loop.close()

    # ------------------------------------------------------------ what must hold

    def planned_steps(self, id: str) -> set[int]:
        """The steps whose plans carry a command."""
        record = open_for_reading(self.paths.record)
        try:
            plans = [decode_order(body) for (body,) in record.execute("SELECT body FROM plans WHERE kind = 'train'")]
        finally:
            record.close()
        return {plan.step for plan in plans if isinstance(plan, m.StepPlan) and id in plan.commands}

    def notes(self) -> list[str]:
        record = open_for_reading(self.paths.record)
        try:
            return [text for (text,) in record.execute("SELECT text FROM events WHERE kind = 'note' ORDER BY id")]
        finally:
            record.close()

    def row(self, id: str) -> JournaledCommand:
        found = self.db.find(id)
        assert found is not None, f"{id} was accepted and is not known"
        return found
