"""Work of an agent for the leads of other nodes: answer greetings, host a rank, pass orders and answers on.

A lead's messages are judged by their numbers as they come in, and greetings and pings are answered at once; orders are
carried out one after another, for hosting a rank can take seconds.
"""

import asyncio
import os
import time

import msgspec

from trainctl.node_agent.readings import sleep_clock
from trainctl.node_agent.records.agent_db import FollowedRun
from trainctl.node_agent.roles.election import Votes
from trainctl.node_agent.roles.followed_run import FollowedRank
from trainctl.node_agent.roles.lead import Lead
from trainctl.node_agent.roles.rank_hosting import NO_RANK, RankHosting
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import restore
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.trainers.rank_ports import Ending
from trainctl.node_agent.transport.conversations import SILENT_AFTER_SECONDS, InboundLinks, Order, Say
from trainctl.protocol import messages
from trainctl.protocol.config.env_policy import omp_threads
from trainctl.protocol.errors import InvalidInputError, ProtocolError, RefusedError
from trainctl.protocol.machine.cgroups import core_pool, usable_cores
from trainctl.protocol.machine.devices import read_devices
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.security import received_names


class Follower:
    """Hosts at most one rank of one run that another node's agent leads."""

    def __init__(self, context: AgentContext, role: AgentRole, hosting: RankHosting, lead: Lead, say: Say) -> None:
        """`lead`: this agent's own leading."""
        self._context, self._node, self._db = context, context.node, context.db
        self._role, self._hosting, self._lead, self._links = role, hosting, lead, InboundLinks(say)
        self._votes = Votes(context, role, self._hand_over)
        self.loop_lag_seconds = 0.0
        self.sleep_clock = sleep_clock.SleepClock(sleep_clock.read())
        self.host_reading: messages.HostReading | None = None  # this machine's newest, for its leads
        self._pinged: tuple[float, float | None] = (0.0, None)  # when, by the lead of the run, and its round trip
        self._orders: asyncio.Queue[tuple[str, Order]] = asyncio.Queue()

    @property
    def followed(self) -> FollowedRank | None:
        """The rank that is hosted here."""
        return self._role.followed

    @property
    def round_trip_seconds(self) -> float | None:
        """Return the last ping's round trip to the followed run's lead; None without one, or if it is silent."""
        at, seconds = self._pinged
        fresh = self.followed is not None and time.monotonic() - at < SILENT_AFTER_SECONDS
        return seconds if fresh else None

    # ------------------------------------------------------------ what leads say

    async def receive(self, identity: bytes, message: messages.ToPeer) -> None:
        """One message of a lead, by the address of its socket."""
        if isinstance(message, messages.PeerHello):
            await self._greet(identity, message)
        elif (lead := await self._links.judge(identity, message)) is not None:
            if isinstance(message, messages.PeerPing):
                await self._beat(lead, message)
            else:
                self._orders.put_nowait((lead, message))

    async def _beat(self, lead: str, ping: messages.PeerPing) -> None:
        self._context.late_events.remove(lead, ping.taken)
        ranks = self._hosting.hosted_for(lead)
        if ranks:
            self._pinged = time.monotonic(), ping.round_trip_seconds
        sleep = self.sleep_clock.reported(time.monotonic())
        beat = messages.PeerBeat(
            link="",
            seq=0,
            ranks=ranks,
            loop_lag_seconds=self.loop_lag_seconds,
            host=self.host_reading if ranks else None,
            sent_monotonic=ping.sent_monotonic,
            leaving=self._role.leaving,
            slept_seconds=sleep.seconds if sleep is not None else 0.0,
            woke_at=sleep.woke_at if sleep is not None else 0.0,
            late=self._context.late_events.for_lead(lead),
        )
        await self._links.beat(lead, beat)
        if ping.yields and ranks:
            self._lead.transfer.succeed()

    def lead_of(self, message: messages.ToPeer) -> str | None:
        """The node that a message claims to be of, None for one of no conversation that is known here."""
        return message.lead if isinstance(message, messages.PeerHello) else self._links.lead_of(message.link)

    async def _greet(self, identity: bytes, hello: messages.PeerHello) -> None:
        self._lead.moved(hello.lead, hello.address)
        claimed, term = hello.generation or messages.Generation(0, 0), self._votes.term_of(hello.run)
        if hello.run is not None and claimed.term < term:
            text = f"{self._node} has seen term {term}; {hello.lead} leads in an older one"
            row = self._db.known_run(hello.run)
            about = {"run": hello.run, "state": row.state if row else None, "reason": row.reason if row else ""}
            await self._links.refuse(identity, hello.link, "older-term", text, **about)
            return
        if not await self._accept_lead(hello):
            await self._links.refuse(identity, hello.link, "busy", f"{self._node} is about to lead {hello.run}")
            return
        followed, over = self.followed, self._is_over(hello)
        welcome = messages.PeerWelcome(
            link=hello.link,
            node=self._node,
            boot=self._context.boot,
            live_address=self._context.live_address,
            version=self._context.version,
            generation=self._db.generation,
            ranks=(*self._hosting.hosted_for(hello.lead), *((over[0],) if over is not None else ())),
            devices=await asyncio.to_thread(read_devices),
            leaving=self._role.leaving,
            machine=core_pool(),
            cores=usable_cores(),
            threads=omp_threads(os.environ),
        )
        await self._links.greet(identity, hello, welcome)
        if over is not None:
            await self._tell_exit(hello.lead, *over)
        if followed is not None and followed.known.lead == hello.lead:
            followed.told_ending = False  # what was said in an older conversation may not have arrived

    async def _accept_lead(self, hello: messages.PeerHello) -> bool:
        """Follow another lead of the same run in a newer term, or the same one at another address; False if this
        agent can't let go of the run at this moment."""
        claimed = hello.generation
        if claimed is not None and hello.run is not None and hello.run == self._role.run:
            if claimed.term <= restore.kept_term(self._paths(hello.run)):
                return True  # as far as is known here it is this agent that leads
            try:
                await self.step_down(hello.lead, hello.address)
            except RefusedError:
                return False
        if claimed is None or hello.run is None:
            return True
        if self._role.active_run in (None, hello.run):
            self._db.saw(claimed)
        followed = self.followed
        if followed is not None and followed.run == hello.run:
            newer = claimed.term > followed.generation.term
            moved = hello.lead == followed.known.lead and hello.address != followed.known.address
            if newer:
                followed.see(messages.Generation(claimed.term, 0))
            if newer or moved:
                followed.follow(hello.lead, hello.address)
                self._db.follow(followed.known)
        return True

    def _paths(self, run: str) -> RunPaths:
        return RunPaths(received_names.id_folder(runs_directory(self._context.directory), run))

    async def step_down(self, lead: str, address: str) -> None:
        """Follow another node's agent in the run that this one leads. Raises RefusedError if that can't be now."""
        row, rank = await self._lead.let_go(lead)
        known = FollowedRun(row.run, rank if rank is not None else NO_RANK, lead, address)
        self._db.follow(known)
        if rank is None:
            self._db.set_run_state(row.run, "stopped", f"{lead} leads it")
            return
        try:
            self._hosting.adopt(row, known)
        except InvalidInputError as error:
            self._db.set_run_state(row.run, "failed", str(error))

    def _is_over(self, hello: messages.PeerHello) -> tuple[messages.HostedRank, Ending] | None:
        """The rank of the lead's run, if it was hosted here and this agent has done with it."""
        if hello.run is None or (self.followed is not None and self.followed.run == hello.run):
            return None
        known, row = self._db.followed(hello.run), self._db.known_run(hello.run)
        if known is None or known.lead != hello.lead or row is None or known.rank == NO_RANK:
            return None
        why = row.reason or f"was {row.state} there"
        return messages.HostedRank(hello.run, known.rank, None), Ending(clean=False, why=why)

    # ------------------------------------------------------------ orders

    async def serve(self) -> None:
        """Carry out what leads order, in the order in which it came."""
        while True:
            lead, order = await self._orders.get()
            match order:
                case messages.PeerHost():
                    field, problem = await self._hosting.host(lead, self._links.address(lead), order)
                    said = messages.PeerHosted(
                        link="", seq=0, run=order.run, rank=order.rank, field=field, problem=problem
                    )
                    if self.followed is not None and not field:
                        said = msgspec.structs.replace(said, hosted=self.followed.hosted)
                    await self._links.answer(lead, said)
                    if self.followed is not None and not field:  # an exit reported before is taken for an older one's
                        self.followed.told_ending = False
                case messages.PeerRelay():
                    await self._relay(lead, order)
                case messages.PeerEnd():
                    await self._end(lead, order)
                case messages.PeerTrainer():
                    await self._wish(lead, order)
                case messages.PeerKeep():
                    await self._keep(lead, order)
                case messages.PeerClaim():
                    consent = await self._votes.answer(lead, self._links.address(lead), order)
                    await self._links.answer(lead, consent)

    async def _keep(self, lead: str, kept: messages.PeerKeep) -> None:
        """Keep the lead's items. Those of a conversation that is over are dropped: they are sent again, after what this
        record lacks before them."""
        followed = self.followed
        if followed is None or (followed.run, followed.known.lead) != (kept.run, lead):
            return
        if self._links.lead_of(kept.link) != lead:
            return
        try:
            commands = followed.keep(kept.items)
        except ProtocolError as error:
            await self._links.object(lead, "busy", f"{self._node} cannot store the lead's message: {error}")
            return
        for command in commands:
            await self._lead.journal.settle(command)

    async def _hand_over(self, claimant: str, address: str, term: int) -> None:
        await self.step_down(claimant, address)
        followed = self.followed  # none where this node has no rank: then it keeps no record of the run any more
        if followed is not None and followed.known.lead == claimant:
            followed.hand_over(term)

    def _hosted(self, lead: str, run: str, rank: int) -> FollowedRank | None:
        """The rank that is hosted here, if it is this one for this lead."""
        followed = self.followed
        is_it = followed is not None and followed.known.is_same(FollowedRun(run, rank, lead, ""))
        return followed if is_it else None

    async def _relay(self, lead: str, relay: messages.PeerRelay) -> None:
        order = relay.order
        followed = self._hosted(lead, order.run, relay.rank)
        if followed is None:
            text = f"{self._node} hosts no rank {relay.rank} of {order.run} for {lead}"
            if not isinstance(order, messages.Leave):
                await self._links.object(lead, "busy", text)
            elif order.run != self._role.active_run:
                await self._tell_unknown(lead, order.run, relay.rank)
        elif await followed.obey(order):
            self._db.saw(followed.generation)
        else:
            text = f"{self._node} is already in {followed.generation} of {followed.run}"
            await self._links.object(lead, "older-term", text)

    async def _end(self, lead: str, end: messages.PeerEnd) -> None:
        followed = self._hosted(lead, end.run, end.rank)
        if followed is not None:
            await followed.end(end.state, end.reason)
            await self.watch()
        elif end.run != self._role.active_run:
            await self._tell_unknown(lead, end.run, end.rank)  # its lead may wait for it to end

    async def _wish(self, lead: str, wish: messages.PeerTrainer) -> None:
        followed = self._hosted(lead, wish.run, wish.rank)
        if followed is None:
            await self._tell_unknown(lead, wish.run, wish.rank)
        elif wish.wish == "kill":
            await followed.port.kill()
        elif self._role.own_drain is not None:
            followed.told_ending = False  # the rank has not started: its end is reported once more
        elif followed.wanted is None:
            await followed.start_again()

    async def _tell_unknown(self, lead: str, run: str, rank: int) -> None:
        gone = Ending(clean=False, why="is no longer known to its agent")
        await self._tell_exit(lead, messages.HostedRank(run, rank, None), gone)

    # ------------------------------------------------------------ the trainer

    async def heard(self, answer: messages.FromTrainer, *, returned: bool) -> bool:
        """Pass a trainer's answer on to its lead; False if it is of no run that is followed."""
        followed = self.followed
        if followed is None or (followed.run, followed.known.rank) != (answer.run, answer.rank):
            return False
        returned = followed.heard(answer, returned=returned)
        if not await self._pass_on(followed.known.lead, answer, returned=returned) and returned:
            followed.missed()
        return True

    @property
    def is_steady(self) -> bool:
        """Return whether its rank takes part in a run whose lead is heard."""
        followed = self.followed
        return followed is not None and followed.is_steady and self.lead_silent_seconds(followed) < SILENT_AFTER_SECONDS

    async def watch(self) -> None:
        """Notice a trainer that has ended and a lead that has gone; call it a few times a second."""
        followed = self.followed
        if followed is None:
            return
        if followed.is_to_be_reclaimed():
            await self._lead.transfer.reclaim(followed.awaited_term)
            return
        followed.watch()
        if followed.ending is not None and not followed.told_ending:
            followed.told_ending = await self._tell_ending(followed, followed.ending)
        silent_seconds = self.lead_silent_seconds(followed)
        if followed.wanted is None and silent_seconds > followed.config.run.orphan_seconds:
            # A trainer counts only its own agent; without the lead it would wait forever.
            why = f"its lead {followed.known.lead} has been silent for {silent_seconds:.0f} s"
            await followed.end("failed", why, checkpoint=True)
        if followed.wanted is not None and followed.ending is not None:
            self._hosting.finish(followed, *followed.wanted)
        elif followed.refresh():
            self._context.publisher.publish(followed.view)

    async def _tell_ending(self, followed: FollowedRank, ending: Ending) -> bool:
        """Return how its trainer ended, after what it reported last: that may not have arrived."""
        lead = followed.known.lead
        for report in followed.port.last_reports() if self._links.address(lead) else ():
            await self._pass_on(lead, report)
        return await self._tell_exit(lead, followed.hosted, ending)

    async def _pass_on(self, lead: str, answer: messages.FromTrainer, *, returned: bool = False) -> bool:
        return await self._links.answer(lead, messages.PeerAnswer(link="", seq=0, answer=answer, returned=returned))

    async def _tell_exit(self, lead: str, hosted: messages.HostedRank, ending: Ending) -> bool:
        said = messages.PeerExit(
            link="",
            seq=0,
            run=hosted.run,
            rank=hosted.rank,
            clean=ending.clean,
            why=ending.why,
            memory=ending.memory,
        )
        return await self._links.answer(lead, said)

    def lead_silent_seconds(self, followed: FollowedRank) -> float:
        """Return how long its lead has been silent, as far as it was listened for."""
        return time.monotonic() - max(self._links.heard_monotonic(followed.known.lead), followed.since_monotonic)
