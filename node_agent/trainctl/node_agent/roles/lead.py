"""Work of an agent as the lead of a run: start it on all its nodes, lead it, and bring it to its end."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Collection
from typing import Protocol

import msgspec

from trainctl.node_agent.conductor.events import CommandEnded, RankEnded, RankReturned, RankSilent
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records.agent_db import KnownRun
from trainctl.node_agent.roles.drains import DrainingNodes, awaited_seconds
from trainctl.node_agent.roles.peer_events import PeerEvents
from trainctl.node_agent.roles.rank_hosting import RankHosting
from trainctl.node_agent.roles.role import AgentRole, Leading, WaitingToRestart
from trainctl.node_agent.roles.transfer import Adoption, Transfer
from trainctl.node_agent.runs import restore
from trainctl.node_agent.runs.command_journal import Answer, CommandJournal, Handlers
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.runs.late_events import LateNotes
from trainctl.node_agent.runs.launch import Launch
from trainctl.node_agent.runs.recovery import Recovery
from trainctl.node_agent.runs.session import RunListener, Session
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import BusyError, InvalidInputError, RefusedError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import LeadChanged, NodeState, Notice, RunStateChanged
from trainctl.protocol.record.paths import RunPaths

ENDING_SECONDS = 10.0
BUSY_SECONDS = 1.0
"""Seconds until a record that another process has locked is looked at again."""
FINISH_SECONDS = 5.0
"""Seconds the end of a run waits for nodes whose copies of the record are behind."""


class _Alerts(Protocol):
    """Follows the run that is led, and carries out commands about alerts."""

    def ended(self, session: Session) -> None: ...
    def read(self, reading: messages.HostReading) -> None: ...
    def obey(self, command: messages.Command, args: verbs.Acknowledge | verbs.Mute) -> CommandEnded: ...


class _References(Protocol):
    """Collects a reference's log-probabilities from the ranks that load, and hands them on."""

    async def take(self, session: Session, ask: messages.ReferenceAsk) -> None: ...
    def ended(self) -> None: ...
    def close(self) -> None: ...


@dataclasses.dataclass
class _Awaited:
    """A run that was active when the last agent of this node ended, and whose record is locked."""

    known: KnownRun
    problem: str
    due: float  # by time.monotonic
    early: list[tuple[messages.FromTrainer, bool]] = dataclasses.field(default_factory=list)  # what its trainers said


class Lead:
    """Leads at most one run; `session` is that run while it is active."""

    def __init__(
        self,
        context: AgentContext,
        role: AgentRole,
        hosting: RankHosting,
        alerts: _Alerts,
        answer: Answer,
        *,
        guests: GuestRuns,
        references: _References,
    ) -> None:
        """`alerts` is given a run's end while its record can still be written, and other machines' readings."""
        self._context, self._db, self.role, self._alerts = context, context.db, role, alerts
        self._references = references
        others = {name: entry for name, entry in context.cluster.nodes.items() if name != context.node}
        late_notes = LateNotes(context.node, self._db, context.publisher.publish, role, guests)
        self._peer_events = PeerEvents(context, self, alerts.read, late_notes.take)
        self.peers = Peers(context.zmq_context, others, self._peer_events, context.credentials)
        self.launch = Launch(context, self.peers, role.name)
        self._recovery = Recovery(context, self.peers, self._begin_again)
        self.transfer = Transfer(context, role, self.peers, self.launch, hosting, self.take_over)
        self._draining = DrainingNodes(context, role, self.peers)
        self._adoption = Adoption(context, role, self.peers, self.launch)
        handlers = Handlers(self.start_run, self._stop_waiting, self.transfer.promote, late_notes.note, alerts.obey)
        self.journal = CommandJournal(context.db, answer, role, handlers, guests)
        self.last_run: str | None = None  # the newest to have been opened by this agent
        self.superseded = ""  # why another node must be leading this agent's run, empty if none is known to
        self._ended = asyncio.Event()  # set when the run may have ended
        self._awaited: _Awaited | None = None

    @property
    def session(self) -> Session | None:
        """The run that is led, until its record is closed."""
        return self.role.session

    # ------------------------------------------------------------ starting

    async def start_run(self, command: messages.Command, args: verbs.StartRun) -> str:
        """Start a new run, or an old one again. Raises InvalidInputError or RefusedError; leaves nothing then."""
        ending = self.session
        if ending is not None and ending.conductor.final is not None:  # over but for its trainers' exit
            await self.role.wait_while(lambda: self.session is ending, ENDING_SECONDS)
        self.check_start(command)
        self.role.check_no_work()
        self.role.start(args.resume)
        waited = self.role.waiting
        try:
            run = await self._begin(self._opening(command, args))
        except (InvalidInputError, RefusedError, OSError):
            if self.role.is_starting:
                self.role.finish()
            raise
        self._recovery.forget()
        if waited is not None and waited.run != run:
            self._db.set_run_state(waited.run, "failed", self._recovery.reason)
            await self.journal.fail_open("another run was started instead", waited.run)
        return run

    def check_start(self, command: messages.Command) -> None:
        """Raises InvalidInputError unless this agent is free to start a run."""
        if command.node not in (None, self._context.node):
            raise InvalidInputError("node", f"no node {command.node!r} in this agent's cluster")
        if self.session is not None:
            why = "is active" if self.session.conductor.final is None else "is still ending; try again in a moment"
            raise InvalidInputError("run", f"{self.session.run} {why} (one run at a time)")
        if self.role.is_starting:
            raise InvalidInputError("run", "another run is starting; try again in a moment")
        self._adoption.check_free()

    async def _opening(self, command: messages.Command, args: verbs.StartRun) -> restore.Opening:
        if args.resume is None and args.branch is not None:
            return await self.launch.branch(args, command)
        if args.resume is None:
            return await self.launch.new(run_file.parse(args.config or {}, "config"), command)
        taken = await self._adoption.take(command, args)
        opening = await self.launch.old(
            args.resume, command.id, command.by, taken.without, from_step=args.from_step, steps=args.steps
        )
        opening.conductor.leave_out(taken.without)
        return dataclasses.replace(opening, notices=(*taken.notices, *opening.notices))

    async def _begin(self, opened: Awaitable[restore.Opening]) -> str:
        try:
            opening = await opened
            session = self._open(opening, time.time())
        finally:
            early = self.launch.done()
        for event in opening.kept:
            self._context.publisher.publish(event)
        for notice in opening.notices:
            session.happened(Notice(notice), "warning")
        for remark in opening.remarks:
            session.happened(Notice(remark))
        self._context.publisher.publish(session.view)
        for node in self.remote(session).values():
            self.give_copy(session, node)
        await session.start_trainers(opening.resume_from)
        for node, said in early:
            await self._peer_events.said(node, said)
        return session.run

    async def take_up(self, known: KnownRun) -> None:
        """Lead again a run that was active when the last agent of this node ended.

        If another process has its record locked, that is done later, and its trainers wait. Raises InvalidInputError
        if that takes a node that this agent's cluster hasn't.
        """
        waited, self._awaited = self._awaited, None
        try:
            opening = self.launch.surviving(known)
        except BusyError as error:
            if waited is None:
                self.role.start(known.run)
            self._awaited = _Awaited(known, str(error), time.monotonic() + BUSY_SECONDS)
            self._awaited.early = waited.early if waited is not None else []
            return
        except InvalidInputError as error:
            if waited is not None:
                self.role.finish()
            self._db.set_run_state(known.run, "failed", str(error))
            return
        self.launch.check_nodes(opening)
        await self._go_on(opening, known)
        if waited is not None:
            for answer, returned in waited.early:
                await self.heard(answer, returned=returned)
            for node, said in self.launch.done():
                await self._peer_events.said(node, said)

    @property
    def awaits(self) -> str | None:
        """Return what a run that is to be taken up waits for."""
        return self._awaited.problem if self._awaited is not None else None

    async def take_over(self, known: KnownRun, term: int, before: str) -> int:
        """Lead, from `term` on, a run that the node `before` led; gives the step it stands at.

        Raises InvalidInputError if the record doesn't allow it; then nothing is led.
        """
        opening = self.launch.surviving(known, term)
        self.launch.check_nodes(opening)
        self._db.saw(opening.conductor.durable.generation)
        session = await self._go_on(opening, known)
        handed_over = self.peers.is_open(before)
        session.happened(LeadChanged(before, self._context.node, term), "info" if handed_over else "warning")
        for link in self.peers.links.values():
            link.renew()
        if not handed_over:
            for rank in [rank for rank, node in self.remote(session).items() if node == before]:
                await session.feed(RankSilent(rank, f"{before}'s agent is gone, and another node was promoted"))
        return session.conductor.progress.step

    async def _go_on(self, opening: restore.Opening, known: KnownRun) -> Session:
        session = self._open(opening, known.started_at)
        for notice in opening.notices:
            session.happened(Notice(notice), "error")
        await session.watch_trainers()
        await self.journal.conduct_again(session)
        return session

    async def let_go(self, successor: str) -> tuple[KnownRun, int | None]:
        """Lead the run no more, for another node's agent does; the trainers stay as they are. Returns the run and this
        node's rank in it, if it has one. Raises RefusedError if the run is just being started, or ends."""
        session, run = self.session, self.role.run
        if run is None or self.role.is_starting:
            raise RefusedError("a run is starting; try again in a moment")
        if session is not None and session.conductor.stage in ("leaving", "over"):
            raise RefusedError(f"{session.run} is ending")
        self._recovery.forget()
        self.superseded = ""
        known = next(row for row in self._db.runs() if row.run == run)
        ranks = restore.kept_ranks(RunPaths(known.directory))
        rank = next((rank for rank, node in ranks.items() if node == self._context.node), None)
        if session is not None:
            session.happened(LeadChanged(self._context.node, successor))
            await session.copies.flush()
            await session.copies.close()  # from here to the end without a pause: a trainer always has its conductor
            if self.session is not session:
                raise RefusedError(f"{session.run} has already been handed over")
            session.close(kept_on="" if rank is not None else successor)
        self.role.let_go()
        return known, rank

    def moved(self, node: str, address: str) -> None:
        """Another node's agent says where it is: it is reached there if it can't be where it was."""
        link = self.peers.links.get(node)
        if link is not None and link.address != address and not link.line.open:
            if self.session is not None:
                self.session.happened(NodeState(node, "moved", address), "info", node)
            link.move(address)

    def give_copy(self, session: Session, node: str) -> None:
        """Have a node's copy of the record brought up to date, by what it last reported of it."""
        link = self.peers.links[node]
        hosted = next((hosted for hosted in link.ranks if hosted.run == session.run), None)
        if hosted is not None:
            session.copies.begin(node, hosted)

    def _open(self, opening: restore.Opening, started_at: float) -> Session:
        listener = RunListener(self.journal.end, self._db.saw, self.journal.propose, self._ended.set)
        session = self.launch.session(opening, started_at, listener)
        self.role.lead(session)
        self.last_run, self.superseded = session.run, ""
        self._db.set_run_state(session.run, "starting")
        return session

    # ------------------------------------------------------------ leading

    async def heard(self, answer: messages.FromTrainer, *, returned: bool, node: str | None = None) -> bool:
        """Take what a trainer of a node (None: this one) said; False if it is of no run that is led here. `returned`:
        earlier messages to it may be lost."""
        session = self.session
        if self._awaited is not None and answer.run == self._awaited.known.run:
            self._awaited.early.append((answer, returned))
            return True
        if session is None or answer.run != session.run or self._node(answer.rank) != (node or self._context.node):
            return False
        if returned:
            await session.feed(RankReturned(answer.rank))
        if isinstance(answer, messages.ReferenceAsk):
            await self._references.take(session, answer)
        else:
            await session.feed(answer)
        return True

    def slept(self, seconds: float, woke_at: float) -> None:
        """This machine has slept."""
        self._peer_events.slept(self._context.node, seconds, woke_at)

    @property
    def is_steady(self) -> bool:
        """Return whether its run makes steps or is paused, all its ranks and nodes are there, and no command waits."""
        session, links = self.session, self.peers.links.values()
        if session is None or self.superseded or any(link.leaving or not link.line.open for link in links):
            return False
        return session.is_steady

    async def watch(self) -> None:
        """Notice ranks that have ended and commands that expire; call it a few times a second."""
        session = self.session
        if session is None:
            await self._draining.rest()
            if self._awaited is not None and time.monotonic() >= self._awaited.due:
                await self.take_up(self._awaited.known)
                if self.session is None and self._awaited is None:
                    await self.journal.fail_open()
            await self._restart()
            return
        await session.watch_trainers()
        await session.lacks(self.superseded or (self.peers.lacking() if self._context.cluster.quorum else ""))
        await self._give_up_lost(session)
        stop = await self._draining.watch(session)
        if stop is not None and session is self.session:
            self.journal.propose(stop)
        await session.tick()

    async def _give_up_lost(self, session: Session) -> None:
        """The end of a run doesn't wait forever for a node that can't be reached; its trainer ends when it can."""
        for rank, node in self.remote(session).items():
            link = self.peers.links[node]
            most_seconds = awaited_seconds(goes_back=session.conductor.goes_back, leaving=bool(link.leaving))
            if session.conductor.final is not None and link.silent_seconds > most_seconds:
                why = f"has been unreachable for {link.silent_seconds:.0f} s"
                await session.feed(RankEnded(rank, False, why))

    async def serve(self) -> None:
        """Close the record of each run that has ended."""
        while True:
            await self._ended.wait()
            self._ended.clear()
            match self.role.now:
                case Leading(session) if session.ended is not None:
                    await self._close(session, session.ended.state, session.ended.reason)

    async def _close(self, session: Session, state: messages.RunState, reason: str) -> None:
        """Let go of a run none of whose ranks is left, and tell the nodes that hosted them."""
        self._references.ended()
        due = self._recovery.take(session, reason) if session.conductor.goes_back else None
        waiting = WaitingToRestart(session.run, due) if due is not None else None
        self.role.close(waiting)
        if waiting is None:
            self._db.set_run_state(session.run, state, reason)
            ended = RunStateChanged("", state, step=session.conductor.progress.step)
            session.happened(ended, "error" if state == "failed" else "good")
            # A run that goes back no more is still shown as one that starts.
            self._context.publisher.publish(msgspec.structs.replace(session.view, state=state, reason=reason))
        self._alerts.ended(session)
        await session.copies.flush()
        await session.copies.close(FINISH_SECONDS)
        if self.session is not session:
            return  # it was dropped meanwhile, for another node had led it to its end
        session.close()
        self.role.finish()
        self._context.link.forget(session.run)
        for rank, node in self.remote(session).items():
            await self.peers.links[node].end_rank(session.run, rank, state, reason)

    async def _restart(self) -> None:
        """Take a run up from its newest checkpoint, all of whose ranks were lost; one that can't be has failed."""
        now = self.role.now
        if not isinstance(now, WaitingToRestart) or time.monotonic() < now.due:
            return
        self.role.restart()
        due = await self._recovery.take_up(now.run, self.superseded)
        if due is not None:
            self.role.put_off(WaitingToRestart(now.run, due))
        elif self.role.is_starting:
            self.role.finish()
            await self.journal.fail_open("the run ended before the command took effect", now.run)

    def _stop_waiting(self, command: messages.Command) -> int | None:
        """Have the run that waits to be resumed end instead. Returns its last step; None if there is none, or not that
        one."""
        now = self.role.now
        if not isinstance(now, WaitingToRestart) or command.run not in (None, now.run):
            return None
        self.role.let_go()
        return self._recovery.stop(now.run, command)

    async def _begin_again(self, run: str, without: Collection[int]) -> Session | None:
        open_commands = [row for row in self._db.open_commands() if row.run == run]
        starting = next((row for row in open_commands if verbs.args_type(row.verb) is verbs.StartRun), None)
        await self._begin(self.launch.old(run, None, without=without, starting=starting))
        if self.session is not None:
            await self.journal.conduct_again(self.session, "the run went back before the command took effect")
        return self.session

    def close(self) -> None:
        """Let the record go; the trainers stay as they are, for the next agent of this node."""
        self.transfer.close()
        self._references.close()
        if self.session is not None:
            self.session.close()

    async def drop(self, run: str, state: messages.RunState, reason: str) -> None:
        """Have nothing to do any more with a run that another node has led to its end."""
        session = self.session
        self.role.let_go()
        self._recovery.forget()
        if session is not None:
            for rank, port in session.ports.items():
                if session.conductor.durable.settings.ranks[rank].node == self._context.node:
                    await port.end()
            session.close()
            await session.copies.close()
            self._context.publisher.publish(msgspec.structs.replace(session.view, state=state, reason=reason))
            self._context.link.forget(run)
        self._db.set_run_state(run, state, reason)
        self.superseded = ""
        await self.journal.fail_open()

    def remote(self, session: Session) -> dict[int, str]:
        """The node of each rank that another agent hosts."""
        ranks = session.conductor.durable.settings.ranks
        return {rank: ranks[rank].node for rank in sorted(ranks) if ranks[rank].node in self.peers.links}

    def _node(self, rank: int) -> str | None:
        setting = self.session.conductor.durable.settings.ranks.get(rank) if self.session is not None else None
        return setting.node if setting is not None else None

    def is_rank_of(self, node: str, run: str, rank: int) -> bool:
        return self.session is not None and run == self.session.run and self._node(rank) == node
