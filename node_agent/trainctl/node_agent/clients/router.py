"""The agent's ROUTER socket for requests: checks senders, gives each client its turn, and sends the answers.

Commands for another node's agent, about a run that it leads or for that node by name, are redirected to it.
"""

import asyncio
import contextlib
import select
from typing import Any, assert_never

import zmq

from trainctl.node_agent.alerts.service import AlertService
from trainctl.node_agent.auth.authenticator import Authenticator
from trainctl.node_agent.calibration.calibration_host import CalibrationHost
from trainctl.node_agent.clients import queries
from trainctl.node_agent.clients.fair_queue import Asker, FairQueue, Limits
from trainctl.node_agent.clients.query_context import QueryContext
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records.agent_db import FollowedRun
from trainctl.node_agent.roles.follower import Follower
from trainctl.node_agent.roles.lead import Lead
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.work.work_lead import WorkLead
from trainctl.protocol.errors import NotAuthorisedError, ProtocolError, RefusedError, VersionError
from trainctl.protocol.messages import (
    AgentReply,
    CalibrationRequest,
    ClientRequest,
    Command,
    FromPeer,
    GuestRequest,
    PeerRefusal,
    Query,
    Question,
    Refusal,
    ToPeer,
    WorkRequest,
    verbs,
)
from trainctl.protocol.wire import codec, sockets


class Redirects:
    """Looks at what this agent leads, follows and has handed over."""

    def __init__(
        self, context: AgentContext, lead: Lead, follower: Follower, alerts: AlertService, query_context: QueryContext
    ) -> None:
        self._context, self._lead, self._follower = context, lead, follower
        self._alerts, self._query_context = alerts, query_context

    def of(self, command: Command) -> Refusal | None:
        """Where a command should go, None where it is for this agent."""
        verb = verbs.VERBS.get(command.verb)
        if verb is not None and verb.to_node and (verb.needs_node or command.node is not None):
            return self._to_node(command)
        if self._alerts.knows(command):
            return None
        known = self._led_by(command)
        if known is None or (_starts_run(command) and not self._lead.peers.is_open(known.lead)):
            return None
        text = f"{known.lead} leads {known.run}; its agent is at {known.address}"
        return self._not_lead(command, text, known.lead, known.address)

    def _led_by(self, command: Command) -> FollowedRun | None:
        """The run that a command is about, if another node leads it."""
        if (followed := self._follower.followed) is not None:
            return followed.known
        if _starts_run(command):
            known = command.args.get("resume") or command.args.get("branch")
            return self._context.db.followed(known.partition("@")[0]) if isinstance(known, str) else None
        return self._query_context.handed_over() if self._lead.role.run is None else None

    def _to_node(self, command: Command) -> Refusal | None:
        address = self._lead.peers.address(command.node) if command.node is not None else None
        if command.node is None or address is None:
            return None
        text = f"only {command.node} can do this; its agent is at {address}"
        return self._not_lead(command, text, command.node, address)

    def _not_lead(self, command: Command, text: str, node: str, address: str) -> Refusal:
        entry = self._context.cluster.nodes.get(node)
        key = entry.key if entry is not None else None
        return Refusal(rid=command.rid, code="not-lead", text=text, lead=address, lead_key=key)


def _starts_run(command: Command) -> bool:
    return verbs.args_type(command.verb) is verbs.StartRun


MOST_ASKED, MOST_ASKED_BY_ALL = 64, 1024
"""Most requests of one client, and of all, that may be in progress or wait; further ones are refused."""
MOST_BYTES = 16 * 1024 * 1024
"""Most bytes of these requests together."""
QUESTIONS = Limits(16, 2, 4, MOST_ASKED_BY_ALL, MOST_ASKED, MOST_BYTES)
COMMANDS = Limits(1, 1, 1, MOST_ASKED_BY_ALL, MOST_ASKED, MOST_BYTES)
LOOK_SECONDS = 0.02
"""Seconds between looks at whether clients that read nothing read again."""


class Replies:
    """Messages that go out by the socket for requests, once it is bound."""

    def __init__(self, control: Any, authenticator: Authenticator | None) -> None:
        self._control, self._authenticator = control, authenticator

    async def reply(self, caller: bytes, reply: AgentReply | FromPeer) -> None:
        """Answer the client that asked, or whose conversation it is; one whose key was revoked gets no answer."""
        identity = self._authenticator.reply_identity(caller) if self._authenticator is not None else caller
        if identity is not None:
            await self.send(identity, reply)

    async def refuse(self, identity: bytes, descriptor: int, refusal: Refusal | PeerRefusal) -> None:
        """Say why a message is not taken, unless nobody reads that."""
        if _has_room(descriptor):
            await self.send(identity, refusal)

    async def send(self, identity: bytes, reply: AgentReply | FromPeer) -> None:
        """To a connection of any client."""
        # A client that has gone, or reads nothing, loses its reply: it asks again with the same id. A lead notices by
        # the numbers.
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            await self._control.send_multipart([identity, codec.encode(reply)], zmq.DONTWAIT)


def _has_room(descriptor: int) -> bool:
    """Return whether the system takes more for a connection; what it doesn't take waits in this process's memory."""
    if descriptor < 0:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


class Router:
    """Commands are taken one after another; requests that only ask are answered beside each other. What programs of
    attached runs say is taken at once."""

    def __init__(
        self,
        control: Any,
        authenticator: Authenticator | None,
        replies: Replies,
        lead: Lead,
        follower: Follower,
        redirects: Redirects,
        source: QueryContext,
        guests: GuestRuns,
        work_lead: WorkLead,
        calibrations: CalibrationHost,
    ) -> None:
        """`control` is bound already; `source` is what questions are answered from."""
        self._control, self._authenticator, self._replies = control, authenticator, replies
        self._lead, self._follower, self._redirects, self._source = lead, follower, redirects, source
        self._guests, self._work_lead, self._calibrations = guests, work_lead, calibrations
        self._pending: set[asyncio.Task[None]] = set()
        self._asked: FairQueue[Question] = FairQueue(QUESTIONS)
        self._ordered: FairQueue[Command] = FairQueue(COMMANDS)
        self._has_commands = asyncio.Event()
        self._look: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ in

    async def serve(self) -> None:
        """Take what comes in; other agents' messages in their order."""
        while True:
            frames, sender = await sockets.receive_from(self._control)
            try:
                asker, request = self._admit(frames, sender)
            except (ProtocolError, NotAuthorisedError) as error:
                await self._replies.refuse(frames[0], sender.descriptor, _refusal(frames[-1], error))
                continue
            if isinstance(request, ToPeer):
                await self._follower.receive(asker.caller, request)
            elif not self._enter(asker, request, len(frames[1])):
                text = "too many requests of yours, or of all clients, are unanswered: try again later"
                refusal = Refusal(rid=request.rid, code="busy", text=text)
                await self._replies.refuse(frames[0], sender.descriptor, refusal)

    def _admit(self, frames: list[bytes], sender: sockets.Sender) -> tuple[Asker, ClientRequest | ToPeer]:
        """Whom to answer, and the request in frames. Raises ProtocolError or NotAuthorisedError."""
        caller, rights = frames[0], None
        if self._authenticator is not None:
            caller, rights = self._authenticator.enter(frames[0], sender)
        if len(frames) != 2:
            raise ProtocolError("a request must be one frame")
        request = codec.decode_control(frames[1])
        if self._authenticator is None or rights is None:
            return Asker(caller, descriptor=sender.descriptor), request
        asker = Asker(caller, sender.public, rights.role == "viewer", sender.descriptor)
        if isinstance(request, ToPeer):
            self._authenticator.check(sender.public, rights, request, self._follower.lead_of(request))
            return asker, request
        self._authenticator.check(sender.public, rights, request, None)
        return asker, self._authenticator.signed(rights, request)

    def _enter(self, asker: Asker, request: ClientRequest, size: int) -> bool:
        """Begin with a request now or when it is its client's turn; False if there is no room for it."""
        if isinstance(request, Command):
            self._has_commands.set()
            return self._ordered.enter(asker, request, size)
        entered = self._asked.enter(asker, request, size)
        self._begin_answers()
        return entered

    # ------------------------------------------------------------ requests that only ask

    def _begin_answers(self) -> None:
        """A client that reads no answers gets no more of them, which would wait for it in memory."""
        while (begun := self._asked.begin(lambda asker: _has_room(asker.descriptor))) is not None:
            task = asyncio.create_task(self._answer_request(*begun))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
        if self._asked.is_waiting and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._begin_answers()

    async def _answer_request(self, asker: Asker, request: Question, size: int) -> None:
        try:
            if isinstance(request, GuestRequest):
                reply: AgentReply = await self._guests.reply(request)
            elif isinstance(request, WorkRequest):
                reply = await self._work_lead.reply(request)
            elif isinstance(request, CalibrationRequest):
                reply = await self._calibrations.reply(request)
            elif isinstance(request, Query):
                reply = await queries.reply(request, self._source)
            else:
                assert_never(request)
            try:
                await self._replies.reply(asker.caller, reply)
            except ProtocolError as error:
                await self._replies.reply(asker.caller, Refusal(rid=request.rid, code="busy", text=str(error)))
        finally:
            self._asked.leave(asker, size)
            self._begin_answers()

    # ------------------------------------------------------------ commands

    async def serve_commands(self) -> None:
        """One after another; starting a run on other nodes can take seconds, in which requests are answered."""
        while True:
            await asyncio.sleep(0)  # requests have a turn between commands that wait already
            begun = self._ordered.begin(lambda _: True)
            if begun is None:
                self._has_commands.clear()
                await self._has_commands.wait()
                continue
            asker, command, size = begun
            self._ordered.leave(asker, size)
            redirect = self._redirects.of(command)
            if redirect is not None:
                await self._replies.reply(asker.caller, redirect)
                continue
            try:
                await self._lead.journal.take(asker.caller, command)
            except RefusedError as error:
                await self._replies.reply(asker.caller, Refusal(rid=command.rid, code="busy", text=str(error)))


def _refusal(frame: bytes, error: ProtocolError | NotAuthorisedError) -> Refusal | PeerRefusal:
    if isinstance(error, NotAuthorisedError) and (link := codec.peek_link(frame)):
        return PeerRefusal(link=link, code="not-authorised", text=str(error))
    code: Any = "version" if isinstance(error, VersionError) else "malformed"
    if isinstance(error, NotAuthorisedError):
        code = "not-authorised"
    return Refusal(rid=codec.peek_rid(frame), code=code, text=str(error))
