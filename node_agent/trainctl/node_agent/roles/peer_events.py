"""Reports of other nodes' agents to the lead: how they are, and what the ranks that they host say."""

from collections.abc import Callable
from typing import Protocol

from trainctl.node_agent.conductor.events import RankEnded, RankReturned
from trainctl.node_agent.readings import sleep_clock
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.runs.launch import Launch
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages
from trainctl.protocol.config import run_file
from trainctl.protocol.messages.events import NodeState


class _Leading(Protocol):
    """The parts of this agent's leading that peers' reports reach."""

    role: AgentRole
    peers: Peers
    launch: Launch
    superseded: str

    def remote(self, session: Session) -> dict[int, str]: ...
    def is_rank_of(self, node: str, run: str, rank: int) -> bool: ...
    def give_copy(self, session: Session, node: str) -> None: ...
    async def heard(self, answer: messages.FromTrainer, *, returned: bool, node: str | None = None) -> bool: ...
    async def drop(self, run: str, state: messages.RunState, reason: str) -> None: ...


class PeerEvents:
    """Called in the order in which each of them spoke."""

    def __init__(
        self,
        context: AgentContext,
        lead: _Leading,
        read: Callable[[messages.HostReading], None],
        late: Callable[[messages.LateEvent], bool],
    ) -> None:
        """`read` is given other machines' readings; `late` is given events of runs that this node led, again and
        again until it has taken them."""
        self._context, self._db, self._lead, self.read, self.late = context, context.db, lead, read, late
        self._boots: dict[str, str] = {}  # of the other nodes' agents, as last welcomed
        self._woke: dict[str, float] = {}  # when each node last woke, by its own clock

    def hello(self, link: str) -> messages.PeerHello:
        """Return how this agent introduces itself."""
        here = self._context.cluster.nodes.get(self._context.node)
        session = self._lead.role.session
        generation = self._db.generation if session is None else session.conductor.durable.generation
        return messages.PeerHello(
            link=link,
            lead=self._context.node,
            address=here.address if here else self._context.address,
            generation=generation,
            run=session.run if session is not None else None,
        )

    async def welcomed(self, node: str, welcome: messages.PeerWelcome) -> None:
        """A conversation has begun, the first one or after a loss: whatever was under way is asked for again. To an
        agent that was started again the trainer has to come back first, and then it reports that by itself."""
        session, is_same_process = self._lead.role.session, self._boots.get(node) == welcome.boot
        self._boots[node] = welcome.boot
        if session is None and welcome.generation is not None:
            self._db.saw(welcome.generation)  # the next run begins in no older term than any node has seen
        for hosted in welcome.ranks:
            if hosted.run != self._lead.role.run:
                await self._end_stray(node, hosted)
        if session is None:
            return
        self._lead.give_copy(session, node)
        known = {hosted.rank for hosted in welcome.ranks if hosted.run == session.run}
        for rank in [rank for rank, where in self._lead.remote(session).items() if where == node]:
            if rank not in known:
                await session.feed(RankEnded(rank, False, "is no longer known to its agent"))
            elif session.conductor.final is not None:
                await self._lead.peers.links[node].end_rank(session.run, rank, "stopping")
            elif is_same_process:
                await session.feed(RankReturned(rank))

    async def _end_stray(self, node: str, hosted: messages.HostedRank) -> None:
        """A rank of a run that is over, or never began: its agent was away when the message was sent."""
        known = self._db.known_run(hosted.run)
        followed = self._db.followed(hosted.run)
        handed_over = followed is not None and followed.lead != self._context.node
        if known is not None and (known.state in messages.ACTIVE_RUN_STATES or handed_over):
            return  # another node leads it by now, and has it end its ranks or continue with them
        state: messages.RunState = known.state if known is not None else "starting"
        await self._lead.peers.links[node].end_rank(hosted.run, hosted.rank, state, known.reason if known else "")

    async def said(self, node: str, said: messages.PeerAnswer | messages.PeerExit) -> None:
        """Take what a trainer on another node says, or that it has ended; what comes too early is kept until its run is
        open."""
        lead, run = self._lead, said.answer.run if isinstance(said, messages.PeerAnswer) else said.run
        if lead.role.is_starting and run == lead.role.run:
            lead.launch.early.append((node, said))
        elif isinstance(said, messages.PeerAnswer):
            await lead.heard(said.answer, returned=said.returned, node=node)
        elif lead.is_rank_of(node, run, said.rank) and lead.role.session is not None:
            await lead.role.session.feed(RankEnded(said.rank, said.clean, said.why, said.memory))

    async def hosted(self, node: str, hosted: messages.PeerHosted) -> None:
        """Another node's agent hosts a rank, for the first time or again, or refuses to."""
        self._lead.launch.forget_exits(node)
        session = self._lead.role.session
        if session is None or not self._lead.is_rank_of(node, hosted.run, hosted.rank):
            return
        if not hosted.field:
            self._lead.give_copy(session, node)
        else:
            problem = run_file.with_remedy(hosted.problem, hosted.field, node)
            why = f"cannot be hosted again: {hosted.field}: {problem}"
            await session.feed(RankEnded(hosted.rank, False, why))

    def slept(self, node: str, seconds: float, woke_at: float) -> None:
        """A node's machine has slept; its agent repeats this for a while."""
        session = self._lead.role.session
        if session is None or self._woke.get(node) == woke_at:
            return
        self._woke[node] = woke_at
        if node in {setting.node for setting in session.conductor.durable.settings.ranks.values()}:
            session.happened(NodeState(node, "slept", sleep_clock.in_words(seconds)), "info", node)

    async def superseded(self, refusal: messages.PeerRefusal) -> None:
        """Another node knows a newer term of the run that this agent leads: no more steps are made, until the one
        that leads it greets this agent. If it has ended there, it has ended."""
        if refusal.run is None or refusal.run != self._lead.role.run or self._lead.role.is_starting:
            return
        self._lead.superseded = refusal.text
        if refusal.state in ("finished", "stopped"):  # a node alone may hold a run for failed that continues
            await self._lead.drop(refusal.run, refusal.state, refusal.reason)

    def in_touch(self, node: str, why: str) -> None:
        """Another node's agent is unreachable (`why`), or in touch again (empty)."""
        session = self._lead.role.session
        if session is not None and node in self._lead.remote(session).values():
            heard = NodeState(node, "silent" if why else "in-touch", why)
            session.happened(heard, "warning" if why else "info", node)
