"""What an agent does as the lead of a run: starts it on all its nodes, conducts it, and sees it to its end."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec

from trainctl.node_agent import decisions as d
from trainctl.node_agent import openings, premises, sources
from trainctl.node_agent.commands import Answer, CommandOffice
from trainctl.node_agent.conductor import Conductor
from trainctl.node_agent.copies import Copies, beyond
from trainctl.node_agent.equipment import Equipment
from trainctl.node_agent.going_back import GoingBack
from trainctl.node_agent.ledger import KnownRun
from trainctl.node_agent.peers import Peers
from trainctl.node_agent.ports import RankPort, RemoteRank, end_rank
from trainctl.node_agent.session import Session
from trainctl.node_agent.sources import Source
from trainctl.node_agent.succession import LetGo
from trainctl.protocol import messages as m
from trainctl.protocol import runfile, verbs
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.paths import RunPaths

ENDING_SECONDS = 10.0
LOST_SECONDS = 30.0
"""How long the end of a run waits for a node that can't be reached."""
GONE_SECONDS = 5.0
"""The same for a run that goes back to its checkpoint: then every rank begins anew anyway."""
FINISH_SECONDS = 5.0
"""How long the end of a run waits for nodes whose copies of the record are behind."""
COMMANDS_HANDED_ON = 50
"""Of a run's commands, the newest, that its other nodes know the outcome of."""


class Lead:
    """Conducts at most one run; `session` is that run while it is active."""

    def __init__(self, equipment: Equipment, answer: Answer) -> None:
        self._own, self._ledger = equipment, equipment.ledger
        others = {name: entry.address for name, entry in equipment.cluster.nodes.items() if name != equipment.node}
        self.peers = Peers(equipment.context, others, self)
        self._going_back = GoingBack(equipment, self.peers, self._begin_again)
        self.office = CommandOffice(equipment.ledger, answer, self.start_run, self._going_back.stop)
        self.session: Session | None = None
        self._closing: Session | None = None  # that session, while copies of its record are brought up to date
        self.last_run: str | None = None  # the newest to have been opened by this agent
        self._hosting: str | None = None  # the run that the other nodes are being asked to host
        self._early: list[tuple[str, m.PeerAnswer | m.PeerExit]] = []  # what its ranks said before it was opened
        self._boots: dict[str, str] = {}  # of the other nodes' agents, as last welcomed
        self._beginning = False
        self._superseded = ""  # why another node must be conducting this agent's run, empty if none is known to
        self._idle = asyncio.Event()  # set when a run has just ended

    @property
    def is_busy(self) -> bool:
        """Whether a run is conducted, or waits to be taken up again."""
        return self.session is not None or self._going_back.run is not None or self._beginning

    @property
    def run(self) -> str | None:
        """The run that is conducted, or about to be."""
        return self.session.run if self.session is not None else self._hosting or self._going_back.run

    # ------------------------------------------------------------ starting

    async def start_run(self, command: m.Command, args: verbs.StartRun) -> str:
        """Start a new run, or an old one again. Raises InvalidInputError or RefusedError, and then nothing is left of
        it on any node."""
        await self._see_off_ending_run()
        if self.session is not None:
            why = "is active" if self.session.conductor.final is None else "is still ending, try again in a moment"
            raise InvalidInputError("run", f"{self.session.run} {why}; one run at a time")
        if self._beginning:
            raise InvalidInputError("run", "another run is just being started, try again in a moment")
        if args.config is not None:
            config = runfile.parse(args.config, "config")
            run = await self._begin(lambda: self._new_run(config, command))
        else:
            run = await self._begin(lambda: self._old_run(args.resume or "", command.id, command.by))
        given_up = self._going_back.forget()
        if given_up is not None and given_up != run:
            self._ledger.set_run_state(given_up, "failed", self._going_back.reason)
        return run

    async def _begin(self, opened: Callable[[], Awaitable[openings.Opening]]) -> str:
        self._beginning = True
        try:
            opening = await opened()
            session = self._open(opening, time.time())
        finally:
            self._beginning = False
            self._hosting, early, self._early = None, self._early, []
        if opening.notice:
            session.note(d.Happened("run", "warning", "auto", opening.notice, session.conductor.progress.step))
        self._own.publisher.publish(session.view)
        for node in self._remote(session).values():
            self._give_copy(session, node)
        await session.start_trainers(opening.resume_from)
        for node, said in early:
            await (self.answered(node, said) if isinstance(said, m.PeerAnswer) else self.exited(node, said))
        return session.run

    async def _new_run(self, config: runfile.RunFile, command: m.Command) -> openings.Opening:
        config = premises.with_nodes(config, self._own.node, tuple(self._own.cluster.nodes))
        opening = await asyncio.to_thread(
            openings.new_run,
            config,
            self._own.node,
            self._own.directory,
            command.id,
            command.by,
            max(1, self._ledger.term),
        )
        durable, run = opening.conductor.durable, opening.conductor.run
        ranks = {rank: setting.node for rank, setting in durable.settings.ranks.items()}
        try:
            await self._host(run, ranks, config, durable.generation, Source(), call_off="starting")
            self._ledger.add_run(run, config.run.name, opening.paths.directory, time.time())
        except (InvalidInputError, RefusedError):
            opening.recorder.close()
            shutil.rmtree(opening.paths.directory, ignore_errors=True)
            raise
        return opening

    async def _old_run(
        self, run: str, starter: str | None, by: str = "auto", without: Collection[int] = ()
    ) -> openings.Opening:
        """`without`: ranks that are lost from the beginning, and join when their nodes are in reach again."""
        known = next((row for row in self._ledger.runs() if row.run == run), None)
        if known is None:
            raise InvalidInputError("resume", f"no run {run!r} on this node")
        paths, cluster = RunPaths(known.directory), tuple(self._own.cluster.nodes)
        config = premises.with_nodes(runfile.read(paths.run_file), self._own.node, cluster)
        ranks = await asyncio.to_thread(openings.kept_ranks, paths) or dict(enumerate(config.nodes))
        for rank, node in ranks.items():
            if node == self._own.node and self._own.host.find(paths, rank) is not None:
                raise InvalidInputError("resume", f"a trainer of {run} is still running; wait for its end")
        generation = self._ledger.generation or openings.FIRST_GENERATION
        out = {ranks[rank] for rank in without}
        source = await asyncio.to_thread(sources.find, paths, self._own.node, out)
        hosted = {rank: node for rank, node in ranks.items() if rank not in without}
        await self._host(run, hosted, config, generation, source, call_off=known.state)
        try:
            return await asyncio.to_thread(
                openings.old_run,
                paths,
                self._own.node,
                cluster,
                source,
                starter,
                by,
                without=without,
                term=max(1, self._ledger.term),
            )
        except InvalidInputError as error:
            await self._call_off(known, hosted, str(error))
            raise

    async def _host(
        self, run: str, ranks: dict[int, str], config: runfile.RunFile, generation: m.Generation, source: Source,
        *, call_off: m.RunState,
    ) -> None:  # fmt: skip
        self._hosting, self._early = run, []  # what was said before was of an earlier life of the run
        await self.peers.host(run, ranks, config, generation, source.step_for, call_off=call_off)

    async def _call_off(self, known: KnownRun, ranks: dict[int, str], reason: str) -> None:
        for rank, node in ranks.items():
            if node in self.peers.links:
                await end_rank(self.peers.links[node], known.run, rank, known.state, reason)

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
            opening = self._surviving(known)
        except InvalidInputError as error:
            self._ledger.set_run_state(known.run, "failed", str(error))
            return
        self._check_nodes(opening)
        await self._go_on(opening, known)

    async def take_over(self, known: KnownRun, term: int, before: str) -> int:
        """Conduct, from `term` on, a run that the node `before` conducted; gives the step it stands at.

        Raises InvalidInputError if the record doesn't allow it; then nothing is conducted.
        """
        opening = self._surviving(known, term)
        self._check_nodes(opening)
        self._ledger.saw(opening.conductor.durable.generation)
        session = await self._go_on(opening, known)
        text = f"{self._own.node} conducts the run from here on, in term {term}; before it {before} did"
        session.note(d.Happened("agent", "warning", "auto", text, session.conductor.progress.step))
        for link in self.peers.links.values():
            link.renew()
        if not (before in self.peers.links and self.peers.links[before].line.open):
            for rank in [rank for rank, node in self._remote(session).items() if node == before]:
                await session.feed(d.RankSilent(rank, f"the agent of {before} is gone, and another one was promoted"))
        return session.conductor.progress.step

    def _surviving(self, known: KnownRun, term: int = 0) -> openings.Opening:
        carried = frozenset(row.id for row in self._ledger.open_commands())
        return openings.surviving_run(RunPaths(known.directory), carried, term)

    def _check_nodes(self, opening: openings.Opening) -> None:
        for setting in opening.conductor.durable.settings.ranks.values():
            if setting.node != self._own.node and setting.node not in self.peers.links:
                run = opening.conductor.run
                opening.recorder.close()
                raise InvalidInputError("--cluster", f"{run} has a rank on {setting.node}, which isn't in it")

    async def _go_on(self, opening: openings.Opening, known: KnownRun) -> Session:
        session = self._open(opening, known.started_at)
        await session.watch_trainers()
        await self.office.conduct_again(session)
        return session

    def check_take_over(self, paths: RunPaths) -> None:
        """Raises InvalidInputError if a run in whose record this is can't be conducted here."""
        runfile.read(paths.run_file)
        for node in openings.kept_ranks(paths).values():
            if node != self._own.node and node not in self.peers.links:
                raise InvalidInputError("--cluster", f"{paths.directory.name} has a rank on {node}, which isn't in it")

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
        if self._beginning or (session is None and waiting is None):
            raise RefusedError("a run is just being started")
        if session is not None and session.conductor.stage in ("leaving", "over"):
            raise RefusedError(f"{session.run} is ending")
        run = session.run if session is not None else waiting
        self._going_back.forget()
        self._superseded = ""
        known = next(row for row in self._ledger.runs() if row.run == run)
        ranks = openings.kept_ranks(RunPaths(known.directory))
        if session is not None:
            text = f"{successor} conducts the run from here on"
            session.note(d.Happened("agent", "warning", "auto", text, session.conductor.progress.step))
            await session.copies.flush()
            await session.copies.close()  # from here to the end without a pause: a trainer always has its conductor
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

    def _give_copy(self, session: Session, node: str) -> None:
        """Have a node's copy of the record brought up to date, by what it last told of it."""
        link = self.peers.links[node]
        hosted = next((hosted for hosted in link.ranks if hosted.run == session.run), None)
        if hosted is not None:
            session.copies.begin(node, hosted)

    def _open(self, opening: openings.Opening, started_at: float) -> Session:
        run = opening.conductor.run
        ports: dict[int, RankPort] = {}
        for rank, setting in opening.conductor.durable.settings.ranks.items():
            link = self.peers.links.get(setting.node)
            if link is None:
                ports[rank] = self._own.rank(opening.paths, rank)
            else:
                ports[rank] = RemoteRank(link, run, rank, self._hosting_order(opening.conductor, rank))
        nodes = {setting.node for setting in opening.conductor.durable.settings.ranks.values()}
        copies = Copies(
            opening.paths, {node: link for node, link in self.peers.links.items() if node in nodes},
            lambda: [row.kept for row in self._ledger.commands_of(run, COMMANDS_HANDED_ON)],
        )  # fmt: skip
        self.session = Session(
            opening.conductor, opening.paths, opening.recorder, self._own.node, ports, self._own.publisher, started_at,
            self.office.end, self._ledger.saw, copies,
        )  # fmt: skip
        self.office.session, self.last_run, self._superseded = self.session, run, ""
        self._idle.clear()
        self._ledger.set_run_state(run, "starting")
        return self.session

    def _hosting_order(self, conductor: Conductor, rank: int) -> Callable[[str, int], m.PeerHost]:
        return lambda link, seq: m.PeerHost(
            link=link, seq=seq, run=conductor.run, rank=rank, config=runfile.to_dict(conductor.config),
            generation=conductor.durable.generation,
        )  # fmt: skip

    # ------------------------------------------------------------ conducting

    async def heard(self, answer: m.FromTrainer, *, returned: bool) -> bool:
        """What a trainer of this node said; False if it is of no run that is conducted here."""
        session = self.session
        if session is None or answer.run != session.run or self._node(answer.rank) != self._own.node:
            return False
        await self._feed(session, answer, returned=returned)
        return True

    async def _feed(self, session: Session, answer: m.FromTrainer, *, returned: bool) -> None:
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
        await session.lacks(self._superseded or (self.peers.lacking() if self._own.cluster.quorum else ""))
        await self._give_up_lost(session)
        await session.tick()
        if session is self.session:  # it may have been closed while this waited for its turn
            session.check_record()
        await self.close_if_ended()

    async def _give_up_lost(self, session: Session) -> None:
        """The end of a run doesn't wait for ever for a node that can't be reached; its trainer ends when it can."""
        for rank, node in self._remote(session).items():
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
        await session.copies.flush()
        await session.copies.close(FINISH_SECONDS)
        self.session = self.office.session = self._closing = None
        session.close()
        self._own.link.forget(session.run)
        for rank, node in self._remote(session).items():
            await end_rank(self.peers.links[node], session.run, rank, state, reason)
        self._idle.set()

    async def _go_back(self) -> None:
        """Take a run up from its newest checkpoint, all of whose ranks were lost; one that can't be has failed."""
        run = None if self._beginning else self._going_back.due()
        if run is None:
            return
        self._beginning, self._hosting = True, run  # nothing else begins, or is told that there is no such run
        try:
            await self._going_back.take_up(run, self._superseded)
        finally:
            self._beginning = False
            self._hosting = None if self.session is None else self._hosting

    async def _begin_again(self, run: str, without: Collection[int]) -> Session | None:
        await self._begin(lambda: self._old_run(run, None, without=without))
        return self.session

    def close(self) -> None:
        """Let the record go; the trainers stay as they are, for the next agent of this node."""
        if self.session is not None:
            self.session.close()

    # ------------------------------------------------------------ the other nodes' agents (a LeadEnd of theirs)

    def hello(self, link: str) -> m.PeerHello:
        """How this agent introduces itself."""
        here = self._own.cluster.nodes.get(self._own.node)
        generation = self._ledger.generation if self.session is None else self.session.conductor.durable.generation
        return m.PeerHello(
            link=link, lead=self._own.node, address=here.address if here else self._own.address,
            generation=generation, run=self.session.run if self.session is not None else None,
        )  # fmt: skip

    async def welcomed(self, node: str, welcome: m.PeerWelcome) -> None:
        """A conversation has begun, be it the first or after a loss: whatever was under way is asked for again. To an
        agent that was started again the trainer has to come back first, and then that is told by itself."""
        session = self.session
        if session is None and welcome.generation is not None:
            self._ledger.saw(welcome.generation)  # the next run begins in no older term than any node has seen
        for hosted in welcome.ranks:
            if hosted.run != self.run:
                await self._end_stray(node, hosted)
        if session is None:
            return
        self._give_copy(session, node)
        known = {hosted.rank for hosted in welcome.ranks if hosted.run == session.run}
        for rank in [rank for rank, where in self._remote(session).items() if where == node]:
            if rank not in known:
                await session.feed(d.RankEnded(rank, False, "is not known to its agent any more"))
            elif session.conductor.final is not None:
                await end_rank(self.peers.links[node], session.run, rank, "stopping")
            elif self._boots.get(node) == welcome.boot:
                await session.feed(d.RankReturned(rank))
        self._boots[node] = welcome.boot
        await self.close_if_ended()

    async def _end_stray(self, node: str, hosted: m.HostedRank) -> None:
        """A rank of a run that is over, or never began: its agent was away when it was told."""
        known = next((row for row in self._ledger.runs() if row.run == hosted.run), None)
        if known is not None and known.state in m.ACTIVE_RUN_STATES:
            return  # another node conducts it by now, and has it end its ranks or go on with them
        state: m.RunState = known.state if known is not None else "starting"
        await end_rank(self.peers.links[node], hosted.run, hosted.rank, state, known.reason if known else "")

    async def answered(self, node: str, said: m.PeerAnswer) -> None:
        """What a trainer on another node said."""
        if self.session is None and said.answer.run == self._hosting:
            self._early.append((node, said))
        elif self._is_rank_of(node, said.answer.run, said.answer.rank) and self.session is not None:
            await self._feed(self.session, said.answer, returned=said.returned)

    async def exited(self, node: str, said: m.PeerExit) -> None:
        """A trainer on another node has ended."""
        if self.session is None and said.run == self._hosting:
            self._early.append((node, said))
        elif self._is_rank_of(node, said.run, said.rank) and self.session is not None:
            await self.session.feed(d.RankEnded(said.rank, said.clean, said.why, said.memory))
            await self.close_if_ended()

    async def hosted(self, node: str, hosted: m.PeerHosted) -> None:
        """Another node's agent hosts again a rank that it had let go of, or refuses to."""
        if not self._is_rank_of(node, hosted.run, hosted.rank) or self.session is None:
            return
        if not hosted.field:
            self._give_copy(self.session, node)
        else:
            why = f"is not hosted again: {hosted.field}: {hosted.problem}"
            await self.session.feed(d.RankEnded(hosted.rank, False, why))

    async def superseded(self, refusal: m.PeerRefusal) -> None:
        """Another node knows a newer term of the run that this agent conducts: no more steps are made, until the one
        that conducts it greets this agent. If it has ended there, it has ended."""
        if refusal.run is None or refusal.run != self.run or self._beginning:
            return
        self._superseded = refusal.text
        if refusal.state in ("finished", "stopped"):  # a node alone may hold a run for failed that goes on
            await self._drop(refusal.run, refusal.state, refusal.reason)

    async def _drop(self, run: str, state: m.RunState, reason: str) -> None:
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
        self._superseded = ""
        self._idle.set()
        await self.office.fail_open()

    def in_touch(self, node: str, why: str) -> None:
        """Another node's agent is out of reach (`why`), or in touch again (empty)."""
        session = self.session
        if session is not None and node in self._remote(session).values():
            text = f"the agent of {node} is silent: {why}" if why else f"the agent of {node} is in touch"
            severity: m.Severity = "warning" if why else "info"
            session.note(d.Happened("agent", severity, node, text, session.conductor.progress.step))

    def _remote(self, session: Session) -> dict[int, str]:
        """The node of each rank that another agent hosts."""
        ranks = session.conductor.durable.settings.ranks
        return {rank: ranks[rank].node for rank in sorted(ranks) if ranks[rank].node in self.peers.links}

    def _node(self, rank: int) -> str | None:
        setting = self.session.conductor.durable.settings.ranks.get(rank) if self.session is not None else None
        return setting.node if setting is not None else None

    def _is_rank_of(self, node: str, run: str, rank: int) -> bool:
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
