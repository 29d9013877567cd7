"""The agent's ROUTER socket for requests: checks senders, gives each client its turn, and sends the answers."""

import asyncio
import contextlib
from typing import Any, assert_never

import zmq

from trainctl.node_agent.auth.authenticator import Authenticator
from trainctl.node_agent.calibration.calibration_host import CalibrationHost
from trainctl.node_agent.clients import queries
from trainctl.node_agent.clients.fair_queue import FairQueue
from trainctl.node_agent.clients.query_source import QuerySource
from trainctl.node_agent.clients.redirects import Redirects
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.roles.follower import Follower
from trainctl.node_agent.roles.lead import Lead
from trainctl.node_agent.work.work_lead import WorkLead
from trainctl.protocol import messages as m
from trainctl.protocol.errors import NotAuthorisedError, ProtocolError, RefusedError, VersionError
from trainctl.protocol.wire import codec, sockets

MOST_ASKED, MOST_ASKED_BY_ALL = 64, 1024
"""Most requests of one client, and of all, that may be in progress or wait; further ones are refused."""
AT_ONCE = 4
"""Requests of one client that are answered at a time, so that other clients needn't wait for all of them."""


class Replies:
    """What goes out by the socket for requests, once it is bound."""

    def __init__(self, control: Any, authenticator: Authenticator | None) -> None:
        self._control, self._authenticator = control, authenticator

    async def reply(self, caller: bytes, reply: m.AgentReply | m.FromPeer) -> None:
        """Answer the client that asked, or whose conversation it is; one whose key was revoked gets no answer."""
        identity = self._authenticator.reply_identity(caller) if self._authenticator is not None else caller
        if identity is not None:
            await self.send(identity, reply)

    async def send(self, identity: bytes, reply: m.AgentReply | m.FromPeer) -> None:
        """To a connection of any client."""
        # A client that has gone, or reads nothing, loses its reply: it asks again with the same id. A lead notices by
        # the numbers.
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            await self._control.send_multipart([identity, codec.encode(reply)], zmq.DONTWAIT)


class Router:
    """Commands are taken one after another; requests that only ask are answered beside each other. What programs of
    attached runs say is taken at once."""

    def __init__(
        self, control: Any, authenticator: Authenticator | None, replies: Replies, lead: Lead, follower: Follower,
        redirects: Redirects, source: QuerySource, guests: GuestRuns, work_lead: WorkLead,
        calibrations: CalibrationHost,
    ) -> None:  # fmt: skip
        """`control` is bound already; `source` is what questions are answered from."""
        self._control, self._authenticator, self._replies = control, authenticator, replies
        self._lead, self._follower, self._redirects, self._source = lead, follower, redirects, source
        self._guests, self._work_lead, self._calibrations = guests, work_lead, calibrations
        self._commands: asyncio.Queue[tuple[bytes, m.Command]] = asyncio.Queue()
        self._pending: set[asyncio.Task[None]] = set()
        self._asked: FairQueue[m.Question] = FairQueue(AT_ONCE, MOST_ASKED, MOST_ASKED_BY_ALL)
        self._ordered: FairQueue[m.Command] = FairQueue(1, MOST_ASKED, MOST_ASKED_BY_ALL)

    # ------------------------------------------------------------ in

    async def serve(self) -> None:
        """Take what comes in; other agents' messages in their order."""
        while True:
            frames, sender = await sockets.receive_from(self._control)
            identity = frames[0]
            try:
                identity, request = self._admit(frames, sender)
            except (ProtocolError, NotAuthorisedError) as error:
                await self._replies.send(identity, _refusal(frames[-1], error))
                continue
            if isinstance(request, m.ToPeer):
                await self._follower.receive(identity, request)
            elif not self._enter(identity, request):
                text = f"{MOST_ASKED} of your requests are unanswered: try again later"
                await self._replies.reply(identity, m.Refusal(rid=request.rid, code="busy", text=text))

    def _admit(self, frames: list[bytes], sender: sockets.Sender) -> tuple[bytes, m.ClientRequest | m.ToPeer]:
        """Whom to answer, and the request in frames. Raises ProtocolError or NotAuthorisedError."""
        caller, rights = frames[0], None
        if self._authenticator is not None:
            caller, rights = self._authenticator.enter(frames[0], sender)
        if len(frames) != 2:
            raise ProtocolError("a request must be one frame")
        request = codec.decode_control(frames[1])
        if self._authenticator is None or rights is None:
            return caller, request
        if isinstance(request, m.ToPeer):
            self._authenticator.check(sender.public, rights, request, self._follower.lead_of(request))
            return caller, request
        self._authenticator.check(sender.public, rights, request, None)
        return caller, self._authenticator.signed(rights, request)

    def _enter(self, identity: bytes, request: m.ClientRequest) -> bool:
        """Begin with a request now or when it is its client's turn; False if there is no room for it."""
        if isinstance(request, m.Command):
            entered = self._ordered.enter(identity, request)
            self._queue_command(identity)
        else:
            entered = self._asked.enter(identity, request)
            self._begin_answers(identity)
        return entered

    # ------------------------------------------------------------ requests that only ask

    def _begin_answers(self, identity: bytes) -> None:
        while (request := self._asked.begin(identity)) is not None:
            task = asyncio.create_task(self._answer_request(identity, request))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def _answer_request(self, identity: bytes, request: m.Question) -> None:
        try:
            if isinstance(request, m.GuestRequest):
                reply: m.AgentReply = await self._guests.reply(request)
            elif isinstance(request, m.WorkRequest):
                reply = await self._work_lead.reply(request)
            elif isinstance(request, m.CalibrationRequest):
                reply = await self._calibrations.reply(request)
            elif isinstance(request, m.Query):
                reply = await queries.reply(request, self._source)
            else:
                assert_never(request)
        finally:
            self._asked.leave(identity)
            self._begin_answers(identity)
        try:
            await self._replies.reply(identity, reply)
        except ProtocolError as error:
            await self._replies.reply(identity, m.Refusal(rid=request.rid, code="busy", text=str(error)))

    # ------------------------------------------------------------ commands

    def _queue_command(self, identity: bytes) -> None:
        """One of each client, so that their turns are one after another."""
        command = self._ordered.begin(identity)
        if command is not None:
            self._commands.put_nowait((identity, command))

    async def serve_commands(self) -> None:
        """One after another; starting a run on other nodes can take seconds, in which requests are answered."""
        while True:
            await asyncio.sleep(0)  # requests have a turn between commands that wait already
            identity, command = await self._commands.get()
            self._ordered.leave(identity)
            self._queue_command(identity)
            redirect = self._redirects.of(command)
            if redirect is not None:
                await self._replies.reply(identity, redirect)
                continue
            try:
                await self._lead.journal.take(identity, command)
            except RefusedError as error:
                await self._replies.reply(identity, m.Refusal(rid=command.rid, code="busy", text=str(error)))


def _refusal(frame: bytes, error: ProtocolError | NotAuthorisedError) -> m.Refusal | m.PeerRefusal:
    if isinstance(error, NotAuthorisedError) and (link := codec.peek_link(frame)):
        return m.PeerRefusal(link=link, code="not-authorised", text=str(error))
    code: Any = "version" if isinstance(error, VersionError) else "malformed"
    if isinstance(error, NotAuthorisedError):
        code = "not-authorised"
    return m.Refusal(rid=codec.peek_rid(frame), code=code, text=str(error))
