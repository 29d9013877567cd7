"""What an agent does as the lead of a run: starts it on all its nodes, conducts it, and sees it to its end."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.records.agent_db import KnownRun
from trainctl.node_agent.records.replication import beyond
from trainctl.node_agent.roles.adoption import Taken
from trainctl.node_agent.roles.peer_events import Neighbours
from trainctl.node_agent.roles.transfer import LetGo
from trainctl.node_agent.runs import restore
from trainctl.node_agent.runs.command_journal import Answer, CommandOffice
from trainctl.node_agent.runs.context import Equipment
from trainctl.node_agent.runs.launch import Launch
from trainctl.node_agent.runs.recovery import GoingBack
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import verbs
from trainctl.protocol.record.paths import RunPaths

ENDING_SECONDS = 10.0
LOST_SECONDS = 30.0
"""How long the end of a run waits for a node that can't be reached."""
GONE_SECONDS = 5.0
"""The same for a run that goes back to its checkpoint: then every rank begins anew anyway."""
FINISH_SECONDS = 5.0
"""How long the end of a run waits for nodes whose copies of the record are behind."""


class Lead:
    """Conducts at most one run; `session` is that run while it is active."""

    def __init__(self, equipment: Equipment, answer: Answer) -> None:
        self._own, self._ledger = equipment, equipment.ledger
        others = {name: entry for name, entry in equipment.cluster.nodes.items() if name != equipment.node}
        self._neighbours = Neighbours(equipment, self)
        self.peers = Peers(equipment.context, others, self._neighbours, equipment.credentials)
        self.launch = Launch(equipment, self.peers)
        self._going_back = GoingBack(equipment, self.peers, self._begin_again)
        self.office = CommandOffice(equipment.ledger, answer, self.start_run, self._going_back.stop)
        self.session: Session | None = None
        self._closing: Session | None = None  # that session, while copies of its record are brought up to date
        self.last_run: str | None = None  # the newest to have been opened by this agent
        self.is_beginning = False
        self.superseded = ""  # why another node must be conducting this agent's run, empty if none is known to
        self._idle = asyncio.Event()  # set when a run has just ended
        self.check_free: Callable[[], None]
        """Raises InvalidInputError while this node takes part in a run that another one conducts."""
        self.agree: Callable[[m.Command, verbs.StartRun], Awaitable[Taken]]
        """Agrees with other nodes that a run which has ended is taken up here."""
        self.on_end: Callable[[Session], None] = lambda _: None
        """Told of a run that has ended here, while its record can still be written."""
        self.on_reading: Callable[[m.HostReading], None] = lambda _: None
        """Told of what other nodes' agents read of their machines."""

    @property
    def is_busy(self) -> bool:
        """Whether a run is conducted, or waits to be taken up again."""
        return self.session is not None or self._going_back.run is not None or self.is_beginning

    @property
    def run(self) -> str | None:
        """The run that is conducted, or about to be."""
        return self.session.run if self.session is not None else self.launch.hosting or self._going_back.run

    @property
    def going_back(self) -> str | None:
        """The run that waits to be taken up again."""
        return self._going_back.run

    # ------------------------------------------------------------ starting

    async def start_run(self, command: m.Command, args: verbs.StartRun) -> str:
        """Start a new run, or an old one again. Raises InvalidInputError or RefusedError, and then nothing is left of
        it on any node."""
        if command.node not in (None, self._own.node):
            raise InvalidInputError("node", f"no node {command.node!r} in this agent's cluster")
        await self._see_off_ending_run()
        if self.session is not None:
            why = "is active" if self.session.conductor.final is None else "is still ending, try again in a moment"
            raise InvalidInputError("run", f"{self.session.run} {why}; one run at a time")
        if self.is_beginning:
            raise InvalidInputError("run", "another run is just being started, try again in a moment")
        self.check_free()
        if args.config is not None:
            config = run_file.parse(args.config, "config")
            run = await self._begin(lambda: self.launch.new(config, command))
        else:
            run = await self._begin(lambda: self._old(command, args))
        given_up = self._going_back.forget()
        if given_up is not None and given_up != run:
            self._ledger.set_run_state(given_up, "failed", self._going_back.reason)
        return run

    async def _old(self, command: m.Command, args: verbs.StartRun) -> restore.Opening:
        run = self.launch.hosting = args.resume or ""  # no other node is agreed with meanwhile that it takes it up
        taken = await self.agree(command, args)
        opening = await self.launch.old(run, command.id, command.by, taken.without)
        for rank in taken.without:
            opening.conductor.ranks[rank].why = "was out of reach when the run was taken up"
        return opening._replace(notices=(*taken.notices, *opening.notices))

    async def _begin(self, opened: Callable[[], Awaitable[restore.Opening]]) -> str:
        self.is_beginning = True
        try:
            opening = await opened()
            session = self._open(opening, time.time())
        finally:
            self.is_beginning = False
            early = self.launch.done()
        for notice in opening.notices:
            session.note(d.Happened("run", "warning", "auto", notice, session.conductor.progress.step))
        self._own.publisher.publish(session.view)
        for node in self.remote(session).values():
            self.give_copy(session, node)
        await session.start_trainers(opening.resume_from)
        for node, said in early:
            await self._neighbours.say(node, said)
        return session.run

    async def _see_off_ending_run(self) -> None:
        """A run that is over but for its trainers' exit is waited for, so that the next can follow it at once."""
        if self.session is not None and self.session.conductor.final is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ENDING_SECONDS):
                    await self._idle.wait()

    async def take_up(self, known: KnownRun) -> None:
        """Conduct again a run that was active when the last agent of this node ended.

        Raises InvalidInputError if that takes a node that this agent's cluster hasn't.
        """
        try:
            opening = self.launch.surviving(known)
        except InvalidInputError as error:
            self._ledger.set_run_state(known.run, "failed", str(error))
            return
        self.launch.check_nodes(opening)
        await self._go_on(opening, known)

    async def take_over(self, known: KnownRun, term: int, before: str) -> int:
        """Conduct, from `term` on, a run that the node `before` conducted; gives the step it stands at.

        Raises InvalidInputError if the record doesn't allow it; then nothing is conducted.
        """
        opening = self.launch.surviving(known, term)
        self.launch.check_nodes(opening)
        self._ledger.saw(opening.conductor.durable.generation)
        session = await self._go_on(opening, known)
        text = f"{self._own.node} conducts the run from here on, in term {term}; before it {before} did"
        handed_over = before in self.peers.links and self.peers.links[before].line.open
        severity: m.Severity = "info" if handed_over else "warning"
        session.note(d.Happened("agent", severity, "auto", text, session.conductor.progress.step))
        for link in self.peers.links.values():
            link.renew()
        if not handed_over:
            for rank in [rank for rank, node in self.remote(session).items() if node == before]:
                await session.feed(d.RankSilent(rank, f"the agent of {before} is gone, and another one was promoted"))
        return session.conductor.progress.step

    async def _go_on(self, opening: restore.Opening, known: KnownRun) -> Session:
        session = self._open(opening, known.started_at)
        await session.watch_trainers()
        await self.office.conduct_again(session)
        return session

    def beyond(self, other: m.HostedRank) -> list[m.Kept]:
        """What the record of the run that is conducted has beyond a claimant's. Raises RefusedError if that is much."""
        if self.session is None:
            return []
        own = m.HostedRank(self.session.run, 0, None, *self.session.recorder.newest())
        return beyond(self.session.recorder, self.session.paths, own, other)

    async def let_go(self, successor: str) -> LetGo:
        """Conduct the run no more, for another node's agent does; the trainers stay as they are. Raises RefusedError
        if it is just being started, or ends."""
        session, waiting = self.session, self._going_back.run
        if self.is_beginning or (session is None and waiting is None):
            raise RefusedError("a run is just being started")
        if session is not None and session.conductor.stage in ("leaving", "over"):
            raise RefusedError(f"{session.run} is ending")
        run = session.run if session is not None else waiting
        self._going_back.forget()
        self.superseded = ""
        known = next(row for row in self._ledger.runs() if row.run == run)
        ranks = restore.kept_ranks(RunPaths(known.directory))
        if session is not None:
            text = f"{successor} conducts the run from here on"
            session.note(d.Happened("agent", "info", "auto", text, session.conductor.progress.step))
            await session.copies.flush()
            await session.copies.close()  # from here to the end without a pause: a trainer always has its conductor
            if self.session is not session:
                raise RefusedError(f"{session.run} has been let go of already")
            self.session = self.office.session = None
            session.close()
        return LetGo(known, next((rank for rank, node in ranks.items() if node == self._own.node), None))

    def moved(self, node: str, address: str) -> None:
        """Another node's agent says where it is: it is reached there if it can't be where it was."""
        link = self.peers.links.get(node)
        if link is not None and link.address != address and not link.line.open:
            if self.session is not None:
                text = f"the agent of {node} is at {address} now"
                self.session.note(d.Happened("agent", "info", node, text, self.session.conductor.progress.step))
            link.move(address)

    def give_copy(self, session: Session, node: str) -> None:
        """Have a node's copy of the record brought up to date, by what it last told of it."""
        link = self.peers.links[node]
        hosted = next((hosted for hosted in link.ranks if hosted.run == session.run), None)
        if hosted is not None:
            session.copies.begin(node, hosted)

    def _open(self, opening: restore.Opening, started_at: float) -> Session:
        self.session = self.launch.session(opening, started_at, self.office.end)
        run = self.session.run
        self.office.session, self.last_run, self.superseded = self.session, run, ""
        self._idle.clear()
        self._ledger.set_run_state(run, "starting")
        return self.session

    # ------------------------------------------------------------ conducting

    async def heard(self, answer: m.FromTrainer, *, returned: bool) -> bool:
        """What a trainer of this node said; False if it is of no run that is conducted here."""
        session = self.session
        if session is None or answer.run != session.run or self._node(answer.rank) != self._own.node:
            return False
        await self.take(session, answer, returned=returned)
        return True

    async def take(self, session: Session, answer: m.FromTrainer, *, returned: bool) -> None:
        """What a trainer of the run that is conducted said; `returned`: what it was told before may be lost."""
        if returned:
            await session.feed(d.RankReturned(answer.rank))
        await session.feed(answer)
        await self.close_if_ended()

    async def watch(self) -> None:
        """Notice ranks that have ended and commands that expire; call it a few times a second."""
        session = self.session
        if session is None:
            await self._go_back()
            return
        await session.watch_trainers()
        await session.lacks(self.superseded or (self.peers.lacking() if self._own.cluster.quorum else ""))
        await self._give_up_lost(session)
        await session.tick()
        if session is self.session:  # it may have been closed while this waited for its turn
            session.check_record()
        await self.close_if_ended()

    async def _give_up_lost(self, session: Session) -> None:
        """The end of a run doesn't wait for ever for a node that can't be reached; its trainer ends when it can."""
        for rank, node in self.remote(session).items():
            silent_seconds = self.peers.links[node].silent_seconds
            limit_seconds = GONE_SECONDS if session.conductor.goes_back else LOST_SECONDS
            if session.conductor.final is not None and silent_seconds > limit_seconds:
                why = f"has an agent that has been silent for {silent_seconds:.0f} s"
                await session.feed(d.RankEnded(rank, False, why))

    async def close_if_ended(self) -> None:
        """Let go of a run none of whose ranks is left, and tell the nodes that hosted them."""
        session = self.session
        if session is None or session.ended is None or session is self._closing:
            return
        self._closing = session
        state, reason = session.ended.state, session.ended.reason
        if not (session.conductor.goes_back and self._going_back.take(session, reason)):
            self._ledger.set_run_state(session.run, state, reason)
            severity: m.Severity = "error" if state == "failed" else "good"
            text = f"{state} at step {session.conductor.progress.step:,}"
            session.note(d.Happened("run", severity, "auto", text, session.conductor.progress.step))
            # A run that goes back no more is still shown as one that starts.
            self._own.publisher.publish(msgspec.structs.replace(session.view, state=state, reason=reason))
        self.on_end(session)
        await session.copies.flush()
        await session.copies.close(FINISH_SECONDS)
        self._closing = None
        if self.session is not session:
            return  # it was dropped meanwhile, for another node had conducted it to its end
        self.session = self.office.session = None
        session.close()
        self._own.link.forget(session.run)
        for rank, node in self.remote(session).items():
            await self.peers.links[node].end_rank(session.run, rank, state, reason)
        self._idle.set()

    async def _go_back(self) -> None:
        """Take a run up from its newest checkpoint, all of whose ranks were lost; one that can't be has failed."""
        run = None if self.is_beginning else self._going_back.due()
        if run is None:
            return
        self.is_beginning, self.launch.hosting = True, run  # nothing else begins, or is told that there is no such run
        try:
            await self._going_back.take_up(run, self.superseded)
        finally:
            self.is_beginning = False
            self.launch.hosting = None if self.session is None else self.launch.hosting

    async def _begin_again(self, run: str, without: Collection[int]) -> Session | None:
        await self._begin(lambda: self.launch.old(run, None, without=without))
        return self.session

    def close(self) -> None:
        """Let the record go; the trainers stay as they are, for the next agent of this node."""
        if self.session is not None:
            self.session.close()

    async def drop(self, run: str, state: m.RunState, reason: str) -> None:
        """Have nothing to do any more with a run that another node has conducted to its end."""
        session, self.session, self.office.session = self.session, None, None
        self._going_back.forget()
        if session is not None:
            for rank, port in session.ports.items():
                if session.conductor.durable.settings.ranks[rank].node == self._own.node:
                    await port.end()
            session.close()
            await session.copies.close()
            self._own.publisher.publish(msgspec.structs.replace(session.view, state=state, reason=reason))
            self._own.link.forget(run)
        self._ledger.set_run_state(run, state, reason)
        self.superseded = ""
        self._idle.set()
        await self.office.fail_open()

    def remote(self, session: Session) -> dict[int, str]:
        """The node of each rank that another agent hosts."""
        ranks = session.conductor.durable.settings.ranks
        return {rank: ranks[rank].node for rank in sorted(ranks) if ranks[rank].node in self.peers.links}

    def _node(self, rank: int) -> str | None:
        setting = self.session.conductor.durable.settings.ranks.get(rank) if self.session is not None else None
        return setting.node if setting is not None else None

    def is_rank_of(self, node: str, run: str, rank: int) -> bool:
        return self.session is not None and run == self.session.run and self._node(rank) == node

    # ------------------------------------------------------------ what is known of runs

    def directory(self, run: str | None) -> Path | None:
        """Of a run by its id; of the active run, or else the newest, for None."""
        if run is None and self.session is not None:
            return self.session.paths.directory
        known = self._ledger.runs()
        found = next((row for row in known if row.run == (run or self.last_run)), None)
        if found is None and run is None:
            found = next(iter(known), None)
        return found.directory if found is not None else None
