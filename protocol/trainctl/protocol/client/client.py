"""The asyncio client of an agent: requests, commands, and an attachment that never skips a live message.

async with Client() as client:
    reply = await client.send("set-lr", {"value": 1e-4})
    print(reply.state, reply.step)
"""

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import zmq
import zmq.asyncio

from trainctl.protocol.client import local_agents
from trainctl.protocol.client.live_queue import Attachment, Gap, LiveQueue
from trainctl.protocol.client.live_queue import Connection as Connection
from trainctl.protocol.config import addresses
from trainctl.protocol.config.names import user_name
from trainctl.protocol.errors import (
    ClosedError,
    ExpiredError,
    InvalidInputError,
    NotAuthorisedError,
    NotConnectedError,
    ProtocolError,
    RefusedError,
    TrainctlError,
    UnreachableError,
    VersionError,
)
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    FINAL_COMMAND_STATES,
    AgentReply,
    AttachRun,
    Command,
    CommandReply,
    EndRun,
    GapRequest,
    GuestRank,
    GuestStep,
    Heartbeat,
    Live,
    NodeView,
    Refusal,
    Reply,
    Request,
    RunKept,
    RunSteps,
    Snapshot,
    SnapshotRequest,
    reply_type,
)
from trainctl.protocol.messages.verbs import VERBS
from trainctl.protocol.security.keyring import Keyring, current
from trainctl.protocol.wire import codec, sockets
from trainctl.protocol.wire.handshake import HandshakeWatch
from trainctl.protocol.wire.sockets import end_tasks

DEFAULT_TIMEOUT_SECONDS = 5.0
START_SECONDS = 20.0
"""Seconds to wait when a run starts or changes its lead: other nodes are asked, which may take most of it."""
ASKING_OTHERS = frozenset(verb.name for verb in VERBS.values() if verb.to_node)
AGAIN_SECONDS = 6.0
"""Seconds without an answer after which a request is sent again, if it changes nothing or is known by its id."""
SILENT_AFTER_SECONDS = 3.5
"""Seconds without a message after which an agent counts as silent; its heartbeats come at 1 Hz."""
REFUSED_PAUSE_SECONDS = 1.0
STEPS_BYTES = codec.CONTROL_FRAME_BYTES * 3 // 4
"""Bytes of steps in one request, about; it stays below the largest frame that an agent accepts."""
STEPS_AT_ONCE = 500
"""Most steps in one request."""
GAP_PAGE = 400
"""Most live messages fetched by one gap request."""

P = ParamSpec("P")
R = TypeVar("R", bound=Reply)

_REFUSALS: dict[str, type[TrainctlError]] = {"version": VersionError, "not-authorised": NotAuthorisedError}


Attached = Snapshot | Live | Heartbeat | Connection
"""The items that an attachment yields."""


def _address_here() -> str:
    agents = local_agents.only()
    return agents[0].address if agents else local_agents.default_address()


def check_reply(reply: AgentReply, wanted: type[R]) -> R:
    """The reply as the type that was asked for. Raises RefusedError, NotAuthorisedError, VersionError or
    ProtocolError."""
    if isinstance(reply, Refusal):
        raise _REFUSALS.get(reply.code, RefusedError)(reply.text)
    if not isinstance(reply, wanted):
        raise ProtocolError(f"expected {wanted.__name__}, received {type(reply).__name__}")
    return reply


def make_command(
    verb: str,
    args: dict[str, Any],
    *,
    by: str,
    node: str | None = None,
    run: str | None = None,
    if_plan: int | None = None,
    ttl_seconds: float = 60.0,
    id: str | None = None,
    undoes: str | None = None,
) -> Command:
    """A command with an id of its own, unless one is given to repeat it by."""
    return Command(
        rid=uuid.uuid4().hex,
        id=id or str(uuid.uuid4()),
        verb=verb,
        args=args,
        by=by,
        node=node,
        run=run,
        if_plan=if_plan,
        issued_at=time.time(),
        ttl_seconds=ttl_seconds,
        undoes=undoes,
    )


def lead_address(seen: Snapshot) -> str | None:
    """Return the address of an active run's lead, as another agent knows it; None if that can't reach it either."""
    run = seen.run
    if run is None or run.state not in ACTIVE_RUN_STATES:
        return None
    return next((peer.address for peer in seen.peers if peer.node == run.lead and peer.state != "silent"), None)


class Client:
    """One agent, over one DEALER socket (and a SUB socket while attached). Belongs to one event loop."""

    def __init__(
        self,
        address: str | None = None,
        *,
        by: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        keys: Keyring | None = None,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        """`address`: by default $TRAINCTL_CONNECT, or that of the only agent on this machine. `keys`: the program's
        keyring unless given. Off loopback nothing is said without keys. `context`: one to share with other clients,
        whose owner ends it; each of its own would cost two threads. Raises InvalidInputError."""
        self.address = address or os.environ.get("TRAINCTL_CONNECT") or _address_here()
        addresses.split(self.address)
        self.by, self.timeout_seconds = by if by is not None else user_name(), timeout_seconds
        self.keys = keys or current()
        self._shared = context
        self._waiting: dict[str, asyncio.Queue[AgentReply | TrainctlError]] = {}
        self._is_open = False

    async def connect(self) -> Self:
        """Open the connection, as `async with` does, unless it is open. Raises InvalidInputError for an agent whose key
        isn't known, and for a lack of own keys."""
        if self._is_open:
            return self
        if self.address.startswith("tcp:") and addresses.is_near(self.address):
            for agent in (agent for cluster in local_agents.running() for agent in cluster):
                if agent.address == self.address:
                    self.keys.learn(self.address, agent.key or None)
        self._credentials = self.keys.credentials(self.address)
        self._context = self._shared or zmq.asyncio.Context()
        with contextlib.ExitStack() as undo:
            if self._shared is None:
                undo.callback(self._context.destroy, linger=0)
            self._socket = sockets.new_socket(self._context, zmq.DEALER)
            undo.callback(self._socket.close, linger=0)
            if self._credentials is not None:
                sockets.secure_client(self._socket, self._credentials.own, self._credentials.server)
            self._watch = HandshakeWatch(self._socket, self.address, self._credentials, self._refused)
            sockets.connect(self._socket, self.address)
            undo.pop_all()
        self._receiver = asyncio.create_task(self._receive(), name="trainctl-client-receive")
        self._watch.start()
        self._is_open = True
        return self

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, if it is open; also if cancelled meanwhile. Requests without a reply stay without
        one."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            await end_tasks([self._receiver])
        finally:
            try:
                await self._watch.close()
            finally:  # an own context with an open socket would hang the process once it is collected
                self._socket.close(linger=0)
                if self._shared is None:
                    self._context.destroy(linger=0)

    def at(self, address: str) -> "Client":
        """Return a client for the agent at another address that says and knows what this one does; not connected."""
        return type(self)(address, by=self.by, timeout_seconds=self.timeout_seconds, keys=self.keys)

    @contextlib.asynccontextmanager
    async def at_lead(self) -> AsyncGenerator["Client", None]:
        """Yield a client of the agent that leads the active run: this one, or another for an agent that only hosts a
        rank."""
        elsewhere = lead_address(await self.ask(SnapshotRequest, 0))
        async with contextlib.nullcontext(self) if elsewhere is None else self.at(elsewhere) as lead:
            yield lead

    def _lead_of(self, reply: AgentReply) -> "Client | None":
        """Return a client for the lead that a refusal names instead of an answer."""
        if not isinstance(reply, Refusal) or reply.code != "not-lead" or not reply.lead:
            return None
        self._learn({reply.lead: reply.lead_key})
        return self.at(reply.lead)

    def live_address(self, node: NodeView) -> str:
        """Return where to hear what the agent publishes: beside the address of this client, if that is a forwarded one
        of a Unix socket."""
        is_forwarded = node.live_address.startswith("ipc:") and self.address != node.address
        return addresses.live_beside(self.address) if is_forwarded else node.live_address

    # ------------------------------------------------------------ requests

    async def ask(self, request: Callable[Concatenate[str, P], Request[R]], /, *args: P.args, **fields: P.kwargs) -> R:
        """Return the reply to a request, such as `ask(EventsRequest, run, newest=True)`: its type, then its fields but
        for the id. It may be sent again, as it or its reply may be lost with a line.

        An agent that names the run's lead instead is followed there, once.
        Raises RefusedError, NotAuthorisedError, VersionError or ProtocolError for what the agent says, UnreachableError
        if it says nothing, InvalidInputError for a request that is too large, and ClosedError without a connection."""
        return await self.reply_to(request(uuid.uuid4().hex, *args, **fields))

    async def reply_to(self, request: Request[R]) -> R:
        """Return the reply to a request that has its id; otherwise as `ask`."""
        answer = await self._exchange(request)
        if (lead := self._lead_of(answer)) is not None:
            async with lead:
                answer = await lead._exchange(request)
        reply = check_reply(answer, reply_type(type(request)))
        if isinstance(reply, Snapshot):
            self._learn({peer.address: peer.key for peer in reply.peers})
        return reply

    async def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[CommandReply]:
        """Send a command; yields its first reply and, if that was `accepted`, the one it ends with.

        `options` are those of `make_command`. An agent that only hosts a rank of the run names the one that leads
        it, and the command is sent there. Raises UnreachableError if no first reply comes; past that it waits as long
        as the caller does, and asks again (the same id) every few seconds: a line that breaks loses the last reply.
        """
        command = make_command(verb, args, by=self.by, **options)
        lead = None
        async with contextlib.aclosing(self._converse(command)) as replies:
            async for reply in replies:
                if (lead := self._lead_of(reply)) is not None:
                    break
                yield check_reply(reply, CommandReply)
        if lead is not None:
            async with lead, contextlib.aclosing(lead._converse(command)) as replies:
                async for reply in replies:
                    yield check_reply(reply, CommandReply)

    async def _converse(self, command: Command) -> AsyncGenerator[AgentReply, None]:
        """The first reply to a command, and the last if that wasn't it."""
        with self._conversation(command) as replies:
            await self._transmit(command)
            seconds = max(self.timeout_seconds, START_SECONDS if command.verb in ASKING_OTHERS else 0.0)
            try:
                reply = await self._next(replies, seconds)
            except UnreachableError as error:
                raise UnreachableError(
                    f"{error}; to get the command's outcome, send it again with ID {command.id}"
                ) from None
            yield reply
            while isinstance(reply, CommandReply) and reply.state not in FINAL_COMMAND_STATES:
                try:
                    reply = await self._next(replies, min(AGAIN_SECONDS, self.timeout_seconds))
                except UnreachableError:
                    with contextlib.suppress(UnreachableError):
                        await self._transmit(command)
                    continue
                if not isinstance(reply, CommandReply) or reply.state in FINAL_COMMAND_STATES:
                    yield reply

    async def send(
        self,
        verb: str,
        args: dict[str, Any],
        *,
        wait: Literal["applied", "accepted", "none"] = "applied",
        timeout_seconds: float = 60.0,
        **options: Any,
    ) -> CommandReply:
        """Send a command and give its last reply. Raises ExpiredError when it hasn't ended within the timeout. With
        `wait="none"` nothing is awaited but the hand-over to the socket; the reply given says `accepted` of nothing but
        that."""
        if wait == "none":
            command = make_command(verb, args, by=self.by, **options)
            await self._transmit(command)
            return CommandReply(rid=command.rid, id=command.id, state="accepted", reason="sent without waiting")
        reply = None
        try:
            async with asyncio.timeout(timeout_seconds):
                async for reply in self.command(verb, args, **options):  # noqa: B007  the last one is what counts
                    if wait == "accepted":
                        break
        except TimeoutError:
            raise ExpiredError(f"{verb}: {_so_far(reply)} after {timeout_seconds:g} s") from None
        assert reply is not None
        return reply

    # ------------------------------------------------------------ runs that this program trains

    async def attach_run(
        self,
        run: str,
        name: str,
        ranks: Sequence[GuestRank] = (GuestRank(0),),
        *,
        kind: Literal["guest", "exec"] = "guest",
        steps: int | None = None,
        started_at: float | None = None,
        after_step: int | None = None,
        weight_unit: str = "tokens",
        loss_unit: str = "",
    ) -> RunKept:
        """Have the agent show and record a run. `run` is an id of this program's choice: under the same id the run is
        continued, after its newest recorded step or `after_step`, above which steps are then retracted.

        Raises RefusedError if the id is that of a run that the agent trains itself, if too many are attached, or while
        the agent's node is being calibrated.
        """
        return await self.ask(
            AttachRun,
            run=run,
            name=name,
            started_at=time.time() if started_at is None else started_at,
            ranks=tuple(ranks),
            kind=kind,
            steps=steps,
            weight_unit=weight_unit,
            loss_unit=loss_unit,
            after_step=after_step,
        )

    async def run_steps(self, run: str, steps: Sequence[GuestStep] = ()) -> RunKept:
        """Record steps in their order, and say that the program lives: the agent counts its ranks as lost after 30 s
        without a word. Steps after the reply's `step` are not recorded yet. Raises RefusedError if the run is not
        attached, as after 10 silent minutes: attach it again."""
        kept = None
        for page in _pages(steps):
            kept = await self.ask(RunSteps, run=run, steps=page)
        assert kept is not None
        return kept

    async def end_run(
        self, run: str, state: Literal["finished", "stopped", "failed"] = "finished", reason: str = ""
    ) -> RunKept:
        """End an attached run. Raises RefusedError if it is not attached."""
        return await self.ask(EndRun, run=run, state=state, reason=reason)

    # ------------------------------------------------------------ live

    async def attach(self, columns: int = 120, run: str | None = None) -> AsyncGenerator[Attached, None]:
        """A snapshot, then every live message after it in order, and how the line is whenever that changes.

        The snapshot is of `run` (default: the active hosted one, or the newest). Several runs can be live on an agent:
        live messages are of all of them, and name theirs.
        A fresh Snapshot follows an agent's restart or a gap too old to fill. Never raises for a lost agent (it says
        `silent` and keeps trying); raises VersionError for one of another protocol version.
        """
        async with contextlib.aclosing(self.attach_at_once(columns, run)) as batches:
            async for batch in batches:
                for item in batch:
                    yield item

    async def attach_at_once(self, columns: int = 120, run: str | None = None) -> AsyncGenerator[list[Attached], None]:
        """Yield what `attach` does, but each time all that has come: one by one, many messages a second cost much."""
        yield [Connection("connecting", time.monotonic())]
        while True:
            try:
                snapshot = await self.ask(SnapshotRequest, 0)  # for where it publishes alone
            except UnreachableError as error:
                yield [Connection("silent", time.monotonic(), str(error))]
                continue
            except RefusedError as error:
                yield [Connection("silent", time.monotonic(), str(error))]
                await asyncio.sleep(REFUSED_PAUSE_SECONDS)
                continue
            live = LiveQueue(self._context, self.live_address(snapshot.node), self._credentials)
            try:
                # Subscribed before this snapshot was asked for: what is published meanwhile waits in the queue.
                snapshot = await self.ask(SnapshotRequest, columns, run)
                yield [Connection("connected", time.monotonic()), snapshot]
                async for batch in self._deltas(Attachment(snapshot), live):
                    yield batch
            except (UnreachableError, RefusedError) as error:
                yield [Connection("silent", time.monotonic(), str(error))]
                await asyncio.sleep(REFUSED_PAUSE_SECONDS)
            finally:
                live.close()

    async def _deltas(self, attachment: Attachment, live: LiveQueue) -> AsyncIterator[list[Attached]]:
        """Yield what comes until the agent's boot changes, a gap can't be filled, or it is silent and answers
        nothing."""
        while True:
            messages = await live.get(SILENT_AFTER_SECONDS)
            if not messages:
                yield [Connection("silent", time.monotonic(), f"no message from {self.address}")]
                await self.ask(SnapshotRequest, 0)  # raises UnreachableError: attach again
                return
            ready: list[Attached] = []
            for message in messages:
                verdict = attachment.judge(message)
                while isinstance(verdict, Gap):
                    if ready:  # what came before it isn't held up
                        yield ready
                    fill = await self._fill(verdict)
                    if fill is None:
                        return
                    ready = [missed for missed in fill if attachment.judge(missed) == "deliver"]
                    verdict = attachment.judge(message)
                if verdict == "reattach":
                    break
                if verdict == "deliver":
                    ready.append(message)
            if ready:
                yield ready
            if verdict == "reattach":
                return

    async def _fill(self, gap: Gap) -> tuple[Live, ...] | None:
        last = min(gap.last, gap.first + GAP_PAGE - 1)
        fill = await self.ask(GapRequest, boot=gap.boot, first_seq=gap.first, last_seq=last)
        return fill.messages if fill.complete and fill.messages else None

    def _refused(self, error: NotAuthorisedError) -> None:
        for queue in self._waiting.values():
            queue.put_nowait(error)

    def _learn(self, keys: dict[str, str | None]) -> None:
        """An agent that has proved who it is may say who others are."""
        if self._credentials is not None:
            for address, public in keys.items():
                self.keys.learn(address, public)

    # ------------------------------------------------------------ the wire

    async def _exchange(self, request: Request[Any]) -> AgentReply:
        deadline = time.monotonic() + self.timeout_seconds
        with self._conversation(request) as replies:
            while True:
                await self._transmit(request)
                try:
                    seconds = min(AGAIN_SECONDS, max(0.0, deadline - time.monotonic()))
                    return await self._next(replies, seconds)
                except UnreachableError:
                    if time.monotonic() >= deadline and not self._watch.has_met_agent:
                        raise self._no_answer() from None
                    if time.monotonic() >= deadline:
                        text = f"no answer from {self.address} within {self.timeout_seconds:g} s"
                        raise UnreachableError(text) from None

    @contextlib.contextmanager
    def _conversation(self, request: Request[Any]) -> Any:
        replies: asyncio.Queue[AgentReply | TrainctlError] = asyncio.Queue()
        self._waiting[request.rid] = replies
        try:
            yield replies
        finally:
            del self._waiting[request.rid]

    async def _transmit(self, request: Request[Any]) -> None:
        if not self._is_open:
            raise ClosedError(self.address)
        frame = codec.encode(request)
        if len(frame) > codec.CONTROL_FRAME_BYTES:
            limit = f"{codec.CONTROL_FRAME_BYTES:,}"
            raise InvalidInputError("request", f"{len(frame):,} bytes; an agent accepts at most {limit}")
        sending = asyncio.ensure_future(self._socket.send(frame))
        try:
            if not sending.done():  # not connected yet
                await self._watch.race(sending, self.timeout_seconds)
        except TimeoutError:
            raise self._no_answer() from None
        await sending

    def _no_answer(self) -> UnreachableError:
        """Return why nothing came, with the process of an agent of this machine that hangs."""
        error = self._watch.no_answer()
        if isinstance(error, NotConnectedError):
            return error
        for agent in (agent for cluster in local_agents.running() for agent in cluster):
            if agent.address == self.address:
                hung = f"the agent of {agent.node}, process {agent.pid}, doesn't answer at {self.address}"
                return UnreachableError(f"{hung}: it hangs or is stopped; end it and start it again")
        return error

    async def _next(self, replies: "asyncio.Queue[AgentReply | TrainctlError]", seconds: float) -> AgentReply:
        try:
            async with asyncio.timeout(seconds):
                reply = await replies.get()
        except TimeoutError:
            raise UnreachableError(f"no answer from {self.address} within {seconds:g} s") from None
        if isinstance(reply, TrainctlError):
            raise reply
        return reply

    async def _receive(self) -> None:
        while True:
            frames = await sockets.receive(self._socket)
            try:
                reply: AgentReply | TrainctlError = codec.decode_reply(sockets.check_frames(frames, 1)[0])
            except ProtocolError as error:
                reply = type(error)(f"{self.address}: {error}")
            if isinstance(reply, TrainctlError) or not reply.rid:
                for queue in self._waiting.values():
                    queue.put_nowait(reply)
            elif reply.rid in self._waiting:
                self._waiting[reply.rid].put_nowait(reply)


def _pages(steps: Sequence[GuestStep]) -> Iterator[tuple[GuestStep, ...]]:
    """Yield at least one page, each within the limits of a request."""
    page: list[GuestStep] = []
    size = 0
    for step in steps:
        own = len(codec.encode(RunSteps(rid="-", run="-", steps=(step,))))
        if page and (size + own > STEPS_BYTES or len(page) == STEPS_AT_ONCE):
            yield tuple(page)
            page, size = [], 0
        page.append(step)
        size += own
    yield tuple(page)


def _so_far(reply: CommandReply | None) -> str:
    return f"{reply.state}, not applied" if reply is not None else "no answer"
