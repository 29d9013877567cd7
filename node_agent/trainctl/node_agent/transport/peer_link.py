"""The lead's socket to one follower's agent: a greeting, numbered orders, a ping each second, and all again if lost."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import zmq

from trainctl.node_agent.transport.conversations import Line, Order
from trainctl.protocol import messages
from trainctl.protocol.errors import InvalidInputError, ProtocolError
from trainctl.protocol.security.keyring import Credentials
from trainctl.protocol.wire import codec, sockets
from trainctl.protocol.wire.handshake import HandshakeWatch
from trainctl.protocol.wire.sockets import end_tasks

PING_SECONDS = 1.0
PAUSE_SECONDS = 0.3
"""Seconds between a link that was lost or refused and the next try."""
REACH_SECONDS = 3.0
"""Seconds an agent that hosts a rank may be unreachable, as it may just be starting."""

CredentialsFor = Callable[[str, str], Credentials | None]
"""Finds the credentials for a node by its name and its agent's address."""


class PeerListener(Protocol):
    """The listener to followers. Its methods are called in the order in which a follower spoke."""

    def hello(self, link: str) -> messages.PeerHello: ...
    async def welcomed(self, node: str, welcome: messages.PeerWelcome) -> None: ...
    async def said(self, node: str, said: messages.PeerAnswer | messages.PeerExit) -> None: ...
    async def hosted(self, node: str, hosted: messages.PeerHosted) -> None: ...
    async def superseded(self, refusal: messages.PeerRefusal) -> None: ...
    def in_touch(self, node: str, why: str) -> None: ...
    def read(self, reading: messages.HostReading) -> None: ...
    def slept(self, node: str, seconds: float, woke_at: float) -> None: ...
    def late(self, event: messages.LateEvent) -> bool: ...


class PeerLink:
    """One follower's agent; `serve` keeps in touch for as long as it runs."""

    def __init__(
        self,
        context: Any,
        node: str,
        address: str,
        lead: PeerListener,
        key: str | None = None,
        credentials: CredentialsFor = lambda node, address: None,
    ) -> None:
        """`key`: the other agent's public one, if it has one. `credentials` gives what to speak to it with, and raises
        InvalidInputError if it can't be spoken to."""
        self.node, self.address, self._key, self._credentials = node, address, key, credentials
        self.line = Line()
        self._since_at, self._since_monotonic = time.time(), time.monotonic()
        self.ranks: tuple[messages.HostedRank, ...] = ()  # as it last reported
        self.leaving = ""  # why its ranks must leave, as it last reported; empty: they needn't
        self._yields = False  # whether it is asked to lead the run
        self._context, self._lead = context, lead
        self._socket: Any = None
        self._round_trip_seconds: float | None = None  # of the last ping that was answered
        self._taken: tuple[str, ...] = ()  # branches of the late events that the last answer had
        self._shown = self.line.state
        self._broken, self._welcomed = asyncio.Event(), asyncio.Event()
        self._hosting: tuple[messages.PeerHost, asyncio.Future[messages.PeerHosted]] | None = None
        self._claiming: tuple[int, asyncio.Future[messages.PeerConsent]] | None = None  # in which term

    @property
    def view(self) -> messages.PeerView:
        """The other agent as clients see it."""
        welcome = self.line.welcome
        return messages.PeerView(
            node=self.node,
            address=self.address,
            live_address=welcome.live_address if welcome else None,
            state=self.line.state,
            since_at=self._since_at,
            why=self.line.why,
            key=self._key,
        )

    @property
    def silent_seconds(self) -> float:
        """For how long its agent has been unreachable, 0 if it isn't."""
        return 0.0 if self.line.state == "connected" else time.monotonic() - self._since_monotonic

    @property
    def reached_monotonic(self) -> float:
        """Since when its agent has been in touch, or out of it."""
        return self._since_monotonic

    def is_out(self, seconds: float) -> bool:
        """Return whether its agent has not been reached yet, or has been unreachable for so long."""
        return not self.line.open and (self.line.state == "unknown" or self.silent_seconds > seconds)

    # ------------------------------------------------------------ to the follower

    async def send(self, order: Order) -> bool:
        """Return whether the follower's agent was there to take it; if it wasn't, the conversation begins again. Its
        link and number are given to it here."""
        return self.line.open and await self._transmit(self.line.numbers.stamped(order))

    async def host(self, order: messages.PeerHost, seconds: float) -> messages.PeerHosted | None:
        """Ask it to host a rank, again should the conversation be lost meanwhile; None without an answer in time, or
        from an agent that stays unreachable."""
        self._hosting = (order, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(seconds if self.line.open else min(seconds, REACH_SECONDS)) as limit:
                if not await self.send(order):
                    await self._welcomed.wait()
                    limit.reschedule(asyncio.get_running_loop().time() + seconds)
                return await self._hosting[1]
        except TimeoutError:
            return None
        finally:
            self._hosting = None

    async def welcome(self, seconds: float) -> messages.PeerWelcome | None:
        """Return what its agent says about its node, None if it can't be reached in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._welcomed.wait()
        return self.line.welcome

    async def claim(
        self, term: int, hosted: messages.HostedRank, seconds: float, *, resume: bool = False
    ) -> messages.PeerConsent | None:
        """Ask it to consent to this agent's leading of the run that it has a record of, or has one of and resumes
        (`resume`); None without an answer in time."""
        self._claiming = term, asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                claim = messages.PeerClaim(link="", seq=0, run=hosted.run, term=term, hosted=hosted, resume=resume)
                if not await self.send(claim):
                    return None
                return await self._claiming[1]
        except TimeoutError:
            return None
        finally:
            self._claiming = None

    async def end_rank(self, run: str, rank: int, state: messages.RunState, reason: str = "") -> bool:
        """Have it end a rank and keep how the run ended; False if it can't be reached now.

        A `state` of "starting" says that the run never began: nothing of it is kept.
        """
        return await self.send(messages.PeerEnd(link="", seq=0, run=run, rank=rank, state=state, reason=reason))

    async def yield_lead(self, *, wanted: bool) -> None:
        """Ask its agent, now and with each ping, to lead the run in this one's place; not `wanted`: stop asking."""
        begins, self._yields = wanted and not self._yields, wanted
        if begins:
            await self._keep_up()

    def renew(self) -> None:
        """Begin the conversation again: what this agent says about itself has changed."""
        self._broken.set()

    def move(self, address: str) -> None:
        """The other agent is reached elsewhere from here on."""
        self.address = address
        self._lose(f"is now at {address}")

    async def _transmit(self, message: messages.ToPeer) -> bool:
        assert message.link, "use send(): it names the link"
        frame = codec.encode(message)
        if self._socket is None or len(frame) > codec.CONTROL_FRAME_BYTES:
            return False
        try:
            await self._socket.send(frame, zmq.DONTWAIT)
        except zmq.ZMQError:
            self._lose("its connection was lost")
            return False
        return True

    # ------------------------------------------------------------ keeping in touch

    async def serve(self) -> None:
        """Converse, and begin again whenever a conversation is lost."""
        while True:
            try:
                await self._serve_once(self._credentials(self.node, self.address))
            except InvalidInputError as error:
                self._lose(str(error))
                await asyncio.sleep(PING_SECONDS)
                continue
            except zmq.ZMQError as error:  # there is no descriptor for another socket
                self._lose(f"cannot connect to {self.address}: {error}")
            self._show()
            await asyncio.sleep(PAUSE_SECONDS)

    async def _serve_once(self, credentials: Credentials | None) -> None:
        async with self._connected(credentials) as receiver:
            tasks = {receiver, asyncio.create_task(self._converse())}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await end_tasks(tasks)

    @contextlib.asynccontextmanager
    async def _connected(self, credentials: Credentials | None) -> AsyncIterator["asyncio.Task[None]"]:
        """A socket of its own for each conversation: one that reconnects by itself waits for up to 5 s."""
        self._socket = sockets.new_socket(self._context, zmq.DEALER)
        if credentials is not None:
            sockets.secure_client(self._socket, credentials.own, credentials.server)
        self._broken.clear()
        self._handshakes = HandshakeWatch(self._socket, self.address, credentials)
        self._handshakes.start()
        try:
            sockets.connect(self._socket, self.address)
            yield asyncio.create_task(self._receive())
        finally:
            self.line.open = False
            self._welcomed.clear()
            socket, self._socket = self._socket, None
            try:
                await self._handshakes.close()
            finally:
                socket.close(linger=0)

    async def _converse(self) -> None:
        if not await self._socket.poll(PING_SECONDS * 1000, zmq.POLLOUT):
            refused = self._handshakes.verdict
            self._lose(str(refused) if refused else f"no agent answers at {self.address}")
            return
        self._round_trip_seconds = None
        link = secrets.token_hex(8)
        self.line.begin(link, time.monotonic())
        await self._transmit(self._lead.hello(link))
        while not self._broken.is_set():
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self._broken.wait()
            except TimeoutError:
                await self._keep_up()

    async def _keep_up(self) -> None:
        if self.line.is_overdue(time.monotonic()):
            self._lose(f"no message from {self.address}")
        elif self.line.open:
            await self._transmit(
                messages.PeerPing(
                    link=self.line.numbers.link,
                    seq=self.line.numbers.sent,
                    sent_monotonic=time.monotonic(),
                    round_trip_seconds=self._round_trip_seconds,
                    yields=self._yields,
                    taken=self._taken,
                )
            )

    def _lose(self, why: str) -> None:
        self.line.lose(why)
        self._welcomed.clear()
        self._broken.set()
        self._show()

    def _show(self) -> None:
        """Keep since when the state is what it is, and report the change."""
        if self.line.state != self._shown:
            self._shown, self._since_at, self._since_monotonic = self.line.state, time.time(), time.monotonic()
            self._lead.in_touch(self.node, self.line.why)

    # ------------------------------------------------------------ from the follower

    async def _receive(self) -> None:
        while True:
            frames = await sockets.receive(self._socket)
            try:
                message = codec.decode_peer(sockets.check_frames(frames, 1)[0])
            except ProtocolError as error:
                self._lose(str(error))
                continue
            verdict = self.line.take(message, time.monotonic())
            if isinstance(message, messages.PeerRefusal) and message.code == "older-term" and message.run is not None:
                await self._lead.superseded(message)
            self._show()
            if verdict == "begin-again":
                self._broken.set()
            elif verdict != "drop":
                await self._hear(message)

    async def _hear(self, message: messages.FromPeer) -> None:
        match message:
            case messages.PeerWelcome():
                self.ranks, self.leaving = message.ranks, message.leaving
                await self._lead.welcomed(self.node, message)
                self._welcomed.set()
                if self._hosting is not None:
                    await self.send(self._hosting[0])
            case messages.PeerBeat():
                self.ranks, self.leaving = message.ranks, message.leaving
                self._round_trip_seconds = max(0.0, time.monotonic() - message.sent_monotonic)
                if message.host is not None and message.host.node == self.node:
                    self._lead.read(message.host)
                if message.slept_seconds:
                    self._lead.slept(self.node, message.slept_seconds, message.woke_at)
                self._taken = tuple(event.data.branch for event in message.late if self._lead.late(event))
            case messages.PeerHosted():
                self.ranks = self.ranks if message.hosted is None else (message.hosted,)
                if self._hosting is not None and not self._hosting[1].done():
                    self._hosting[1].set_result(message)
                await self._lead.hosted(self.node, message)
            case messages.PeerConsent():
                claiming = self._claiming
                if claiming is not None and not claiming[1].done() and (message.refusal or message.term == claiming[0]):
                    claiming[1].set_result(message)
            case messages.PeerAnswer() | messages.PeerExit():
                await self._lead.said(self.node, message)
            case messages.PeerRefusal():
                pass  # ends the conversation: `Line.take`
