"""The agent's ROUTER socket for requests: checks senders, gives each client its turn, and sends the answers."""

import asyncio
import contextlib
import select
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import zmq

from trainctl.node_agent.auth.authenticator import Authenticator
from trainctl.node_agent.calibration.calibration_host import CalibrationHost
from trainctl.node_agent.clients import queries
from trainctl.node_agent.clients.query_context import QueryContext, UnknownRankError, UnknownRunError
from trainctl.node_agent.work.work_lead import WorkLead
from trainctl.protocol import messages
from trainctl.protocol.errors import (
    InvalidInputError,
    NotAuthorisedError,
    ProtocolError,
    RefusedError,
    TrainctlError,
    VersionError,
)
from trainctl.protocol.wire import codec, sockets

R = TypeVar("R")
CODES: dict[type[Exception], str] = {UnknownRunError: "unknown-run", UnknownRankError: "unknown-rank"}
"""Codes of refusals by the error; of others it is `malformed` for invalid input, and else `busy`."""
MOST_ASKED, MOST_ASKED_BY_ALL = 64, 1024
"""Most requests of one client, and of all, that may be in progress or wait; further ones are refused."""
MOST_BYTES = 16 * 1024 * 1024
"""Most bytes of these requests together."""
LOOK_SECONDS = 0.02
"""Seconds between looks at whether clients that read nothing read again."""


@dataclass(frozen=True)
class Asker:
    """The sender of a request."""

    caller: bytes  # its connection, by which it is answered
    key: str = ""  # empty: the agent uses no keys, and every connection is its user's
    is_viewer: bool = False
    descriptor: int = -1  # of the connection; -1: not known


@dataclass(frozen=True)
class Limits:
    """Limits on the requests under way at a time, and on how much is held with those that wait.

    One key may have half of what all may hold, and all viewers together three quarters, so that neither leaves an
    operator without room.
    """

    at_once: int
    at_once_of_viewers: int
    at_once_of_caller: int
    most: int
    most_of_caller: int
    most_bytes: int


class FairQueue(Generic[R]):
    """Operators' requests come before viewers'; among them keys take turns, and among a key's its connections."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[bool, dict[str, dict[bytes, deque[tuple[Asker, R, int]]]]] = {False: {}, True: {}}
        self._under_way: Counter[Any] = Counter()
        self._held: Counter[Any] = Counter()
        self._bytes: Counter[Any] = Counter()

    def enter(self, asker: Asker, request: R, size: int) -> bool:
        """Take a request of so many bytes, to wait for its turn; return False if there is no room."""
        limits, shares = self._limits, {"all": 1.0, "viewers": 0.75, asker.key: 0.5}
        if self._held[asker.caller] >= limits.most_of_caller:
            return False
        for holder in _holders(asker):
            share = shares.get(holder, 1.0)
            if self._held[holder] >= share * limits.most or self._bytes[holder] + size > share * limits.most_bytes:
                return False
        self._count(asker, 1, size)
        lines = self._waiting[asker.is_viewer].setdefault(asker.key, {})
        lines.setdefault(asker.caller, deque()).append((asker, request, size))
        return True

    @property
    def is_waiting(self) -> bool:
        """Return whether any request waits for its turn."""
        return any(self._waiting.values())

    def begin(self, may: Callable[[Asker], bool]) -> tuple[Asker, R, int] | None:
        """The next request and its size, if one may begin now, of an asker that `may`; it must `leave` when it is
        over."""
        limits, at_once = self._limits, self._under_way
        if at_once["all"] >= limits.at_once:
            return None
        for is_viewer, keys in self._waiting.items():
            if is_viewer and at_once["viewers"] >= limits.at_once_of_viewers:
                break
            for key, lines in keys.items():
                for caller, line in lines.items():
                    if at_once[caller] < limits.at_once_of_caller and may(line[0][0]):
                        return self._take(keys, key, caller, line)
        return None

    def _take(
        self, keys: dict[str, dict[bytes, Any]], key: str, caller: bytes, line: deque[tuple[Asker, R, int]]
    ) -> tuple[Asker, R, int]:
        """Take the next request; its key and its connection go to the end of their rows."""
        taken = line.popleft()
        lines = keys.pop(key)
        del lines[caller]
        if line:
            lines[caller] = line
        if lines:
            keys[key] = lines
        for holder in _holders(taken[0]):
            self._under_way[holder] += 1
        return taken

    def leave(self, asker: Asker, size: int) -> None:
        """A request that was begun is over."""
        for holder in _holders(asker):
            self._under_way[holder] -= 1
        self._count(asker, -1, -size)
        for counts in (self._under_way, self._held, self._bytes):
            for holder in _holders(asker):
                if not counts[holder]:
                    del counts[holder]

    def _count(self, asker: Asker, requests: int, size: int) -> None:
        for holder in _holders(asker):
            self._held[holder] += requests
            self._bytes[holder] += size


def _holders(asker: Asker) -> Iterator[Any]:
    """Yield the shares that a request counts to. A key is 40 characters, or empty; a caller is bytes."""
    yield from ("all", asker.key, asker.caller)
    if asker.is_viewer:
        yield "viewers"


QUESTIONS = Limits(16, 2, 4, MOST_ASKED_BY_ALL, MOST_ASKED, MOST_BYTES)
COMMANDS = Limits(1, 1, 1, MOST_ASKED_BY_ALL, MOST_ASKED, MOST_BYTES)


class Replies:
    """Messages that go out by the socket for requests, once it is bound."""

    def __init__(self, control: Any, authenticator: Authenticator | None) -> None:
        self.control, self.authenticator = control, authenticator

    async def reply(self, caller: bytes, reply: messages.AgentReply | messages.FromPeer) -> None:
        """Answer the client that asked, or whose conversation it is; one whose key was revoked gets no answer."""
        identity = self.authenticator.reply_identity(caller) if self.authenticator is not None else caller
        if identity is not None:
            await self.send(identity, reply)

    async def refuse(self, identity: bytes, descriptor: int, refusal: messages.Refusal | messages.PeerRefusal) -> None:
        """Say why a message is not taken, unless nobody reads that."""
        if _has_room(descriptor):
            await self.send(identity, refusal)

    async def send(self, identity: bytes, reply: messages.AgentReply | messages.FromPeer) -> None:
        """To a connection of any client."""
        # A client that has gone, or reads nothing, loses its reply: it asks again with the same id. A lead notices by
        # the numbers.
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            await self.control.send_multipart([identity, codec.encode(reply)], zmq.DONTWAIT)


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
        self, replies: Replies, source: QueryContext, work_lead: WorkLead, calibrations: CalibrationHost
    ) -> None:
        """`source` is what questions are answered from."""
        self._control, self._authenticator, self._replies = replies.control, replies.authenticator, replies
        self._source, self._work_lead, self._calibrations = source, work_lead, calibrations
        self._pending: set[asyncio.Task[None]] = set()
        self._asked: FairQueue[messages.Question] = FairQueue(QUESTIONS)
        self._ordered: FairQueue[messages.Command] = FairQueue(COMMANDS)
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
            if isinstance(request, messages.ToPeer):
                await self._source.follower.receive(asker.caller, request)
            elif not self._enter(asker, request, len(frames[1])):
                text = "too many requests of yours, or of all clients, are unanswered: try again later"
                refusal = messages.Refusal(rid=request.rid, code="busy", text=text)
                await self._replies.refuse(frames[0], sender.descriptor, refusal)

    def _admit(
        self, frames: list[bytes], sender: sockets.Sender
    ) -> tuple[Asker, messages.ClientRequest | messages.ToPeer]:
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
        if isinstance(request, messages.ToPeer):
            self._authenticator.check(sender.public, rights, request, self._source.follower.lead_of(request))
            return asker, request
        self._authenticator.check(sender.public, rights, request, None)
        return asker, self._authenticator.signed(rights, request)

    def _enter(self, asker: Asker, request: messages.ClientRequest, size: int) -> bool:
        """Begin with a request now or when it is its client's turn; False if there is no room for it."""
        if isinstance(request, messages.Command):
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

    async def _answer_request(self, asker: Asker, request: messages.Question, size: int) -> None:
        try:
            await self._replies.reply(asker.caller, await self._reply(request))
        except (TrainctlError, OSError, sqlite3.Error, zmq.ZMQError) as error:
            code: Any = CODES.get(type(error), "malformed" if isinstance(error, InvalidInputError) else "busy")
            text = str(error) if isinstance(error, TrainctlError) else f"{self._source.node} can't answer now: {error}"
            await self._replies.reply(asker.caller, messages.Refusal(rid=request.rid, code=code, text=text))
        finally:
            self._asked.leave(asker, size)
            self._begin_answers()

    async def _reply(self, request: messages.Question) -> messages.AgentReply:
        if isinstance(request, messages.GuestRequest):
            return await self._source.guests.reply(request)
        if isinstance(request, messages.WorkRequest):
            return await self._work_lead.reply(request)
        if isinstance(request, messages.CalibrationRequest):
            return await self._calibrations.reply(request)
        return await queries.reply(request, self._source)

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
            redirect = self._source.redirect(command)
            if redirect is not None:
                await self._replies.reply(asker.caller, redirect)
                continue
            try:
                await self._source.lead.journal.take(asker.caller, command)
            except RefusedError as error:
                await self._replies.reply(asker.caller, messages.Refusal(rid=command.rid, code="busy", text=str(error)))


def _refusal(frame: bytes, error: ProtocolError | NotAuthorisedError) -> messages.Refusal | messages.PeerRefusal:
    if isinstance(error, NotAuthorisedError) and (link := codec.peek_link(frame)):
        return messages.PeerRefusal(link=link, code="not-authorised", text=str(error))
    code: Any = "version" if isinstance(error, VersionError) else "malformed"
    if isinstance(error, NotAuthorisedError):
        code = "not-authorised"
    return messages.Refusal(rid=codec.peek_rid(frame), code=code, text=str(error))
