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
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal, Self

import zmq
import zmq.asyncio

from trainctl.protocol.client import local_agents
from trainctl.protocol.client.attached_runs import AttachedRuns, R
from trainctl.protocol.client.live_queue import LiveQueue
from trainctl.protocol.config import addresses
from trainctl.protocol.config.names import user_name
from trainctl.protocol.config.run_tables import DataKind
from trainctl.protocol.errors import (
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
    FINAL_COMMAND_STATES,
    AgentReply,
    AttendRequest,
    Audit,
    AuditRequest,
    CalibrateRequest,
    Calibration,
    Command,
    CommandReply,
    DiagnosisReply,
    DiagnosisRequest,
    Digests,
    DigestsRequest,
    Disk,
    DiskRequest,
    EditRun,
    Events,
    EventsRequest,
    Facts,
    FactsRequest,
    GapFill,
    GapRequest,
    Heartbeat,
    History,
    HistoryRequest,
    HookTest,
    HookTestRequest,
    Hosts,
    HostsRequest,
    Live,
    LogPart,
    LogRequest,
    NodeView,
    Pairs,
    PairsRequest,
    Policies,
    PoliciesRequest,
    Profiles,
    ProfilesRequest,
    Refusal,
    Request,
    RunEdited,
    Runs,
    RunsRequest,
    Samples,
    SamplesRequest,
    Snapshot,
    SnapshotRequest,
    Steps,
    StepsRequest,
    TracePart,
    TraceRequest,
    Traces,
    TracesRequest,
    Viewers,
    Works,
    WorksRequest,
)
from trainctl.protocol.messages.verbs import VERBS
from trainctl.protocol.security.keyring import Keyring, current
from trainctl.protocol.wire import codec, sockets
from trainctl.protocol.wire.attachment import Attachment, Gap
from trainctl.protocol.wire.attachment import Connection as Connection
from trainctl.protocol.wire.handshake import HandshakeWatch
from trainctl.protocol.wire.tasks import end_tasks

DEFAULT_TIMEOUT_SECONDS = 5.0
START_SECONDS = 20.0
"""Seconds to wait when a run starts or changes its lead: other nodes are asked, which may take most of it."""
ASKING_OTHERS = frozenset(verb.name for verb in VERBS.values() if verb.to_node)
AGAIN_SECONDS = 6.0
"""Seconds without an answer after which a request is sent again, if it changes nothing or is known by its id."""
SILENT_AFTER_SECONDS = 3.5
"""Seconds without a message after which an agent counts as silent; its heartbeats come at 1 Hz."""
REFUSED_PAUSE_SECONDS = 1.0
GAP_PAGE = 400
"""Most live messages fetched by one gap request."""

_REFUSALS: dict[str, type[TrainctlError]] = {"version": VersionError, "not-authorised": NotAuthorisedError}


Attached = Snapshot | Live | Heartbeat | Connection
"""What an attachment yields."""


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
    verb: str, args: dict[str, Any], *, by: str, node: str | None = None, run: str | None = None,
    if_plan: int | None = None, ttl_seconds: float = 60.0, id: str | None = None, undoes: str | None = None,
) -> Command:  # fmt: skip
    """A command with an id of its own, unless one is given to repeat it by."""
    return Command(
        rid=uuid.uuid4().hex, id=id or str(uuid.uuid4()), verb=verb, args=args, by=by, node=node, run=run,
        if_plan=if_plan, issued_at=time.time(), ttl_seconds=ttl_seconds, undoes=undoes,
    )  # fmt: skip


class Client(AttachedRuns):
    """One agent, over one DEALER socket (and a SUB socket while attached). Belongs to one event loop."""

    def __init__(
        self, address: str | None = None, *, by: str | None = None, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        keys: Keyring | None = None, context: zmq.asyncio.Context | None = None,
    ) -> None:  # fmt: skip
        """`address`: by default $TRAINCTL_CONNECT, or that of the only agent on this machine. `keys`: the program's
        keyring unless given. Off loopback nothing is said without keys. `context`: one to share with other clients,
        whose owner ends it; each of its own would cost two threads. Raises InvalidInputError."""
        self.address = address or os.environ.get("TRAINCTL_CONNECT") or _address_here()
        addresses.split(self.address)
        self.by, self.timeout_seconds = by if by is not None else user_name(), timeout_seconds
        self.keys = keys or current()
        self._shared = context
        self._waiting: dict[str, asyncio.Queue[AgentReply | TrainctlError]] = {}

    async def __aenter__(self) -> Self:
        """Raise InvalidInputError for an agent whose key isn't known, and for a lack of own keys."""
        if self.address.startswith("tcp:") and addresses.is_near(self.address):
            for agent in (agent for cluster in local_agents.running() for agent in cluster):
                if agent.address == self.address:
                    self.keys.learn(self.address, agent.key or None)
        self._credentials = self.keys.credentials(self.address)
        self._context = self._shared or zmq.asyncio.Context()
        self._socket = sockets.new_socket(self._context, zmq.DEALER)
        if self._credentials is not None:
            sockets.secure_client(self._socket, self._credentials.own, self._credentials.server)
        self._watch = HandshakeWatch(self._socket, self.address, self._credentials, self._refused)
        sockets.connect(self._socket, self.address)
        self._receiver = asyncio.create_task(self._receive(), name="trainctl-client-receive")
        self._watch.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await end_tasks([self._receiver])
        await self._watch.close()
        self._socket.close(linger=0)
        if self._shared is None:
            self._context.destroy(linger=0)

    def live_address(self, node: NodeView) -> str:
        """Return where to hear what the agent publishes: beside the address of this client, if that is a forwarded one
        of a Unix socket."""
        is_forwarded = node.live_address.startswith("ipc:") and self.address != node.address
        return addresses.live_beside(self.address) if is_forwarded else node.live_address

    # ------------------------------------------------------------ requests

    async def snapshot(self, columns: int = 120, run: str | None = None) -> Snapshot:
        """State and history of the run (default: the active one, or the newest), `columns` buckets a series."""
        snapshot = await self.ask(SnapshotRequest(rid=_rid(), columns=columns, run=run), Snapshot)
        self._learn({peer.address: peer.key for peer in snapshot.peers})
        return snapshot

    async def history(
        self, run: str, metrics: tuple[str, ...], first_step: int = 0, last_step: int | None = None, columns: int = 120
    ) -> History:
        """Series of `messages.METRICS` between two steps, at most `columns` buckets each."""
        request = HistoryRequest(
            rid=_rid(), run=run, metrics=metrics, first_step=first_step, last_step=last_step, columns=columns
        )
        return await self.ask(request, History)

    async def runs(self) -> Runs:
        """The runs the agent knows, newest first."""
        return await self.ask(RunsRequest(rid=_rid()), Runs)

    async def works(self, *, led: bool = False) -> Works:
        """The separate work that the agent's node leads or takes part in; `led`: only what it leads."""
        return await self.ask(WorksRequest(rid=_rid(), led=led), Works)

    async def facts(self) -> Facts:
        """Return the facts of the agent's machine and installation."""
        return await self.ask(FactsRequest(rid=_rid()), Facts)

    async def digests(self, what: Literal["model", "data"], path: str, kind: DataKind = "text") -> Digests:
        """Return the digests of a model's folder or of data on the agent's machine; `timeout_seconds` must allow for
        reading them."""
        return await self.ask(DigestsRequest(rid=_rid(), what=what, path=path, kind=kind), Digests)

    async def disk(self, folder: str = "") -> Disk:
        """Return how fast the disk of a folder on the agent's machine is, by default that of its own token caches."""
        return await self.ask(DiskRequest(rid=_rid(), folder=folder), Disk)

    async def calibration(
        self, id: str, config: dict[str, Any], lead: str | None = None, *, beside: tuple[str, ...] = (), stage: int = 0,
        cancel: bool = False,
    ) -> Calibration:  # fmt: skip
        """Begin a calibration of the agent's node under an ID of one's own, or get its state. `lead`: the node to which
        the link is measured too. `beside`: nodes of the machine that are calibrated at the same time, with the last
        `stage` that may begin."""
        request = CalibrateRequest(
            rid=_rid(), calibration=id, config=config, lead=lead, beside=beside, stage=stage, cancel=cancel
        )
        return await self.ask(request, Calibration)

    async def profiles(self, limit: int = 16) -> Profiles:
        """The stored profiles of the agent's node, newest first."""
        return await self.ask(ProfilesRequest(rid=_rid(), limit=limit), Profiles)

    async def events(self, run: str | None = None, after_id: int = 0, limit: int = 200, newest: bool = False) -> Events:
        """A page of a run's events, oldest first; `newest` gives the last `limit`."""
        return await self.ask(EventsRequest(rid=_rid(), run=run, after_id=after_id, limit=limit, newest=newest), Events)

    async def steps(self, run: str | None = None, after_step: int = 0, limit: int = 500) -> Steps:
        """A page of committed steps, oldest first."""
        return await self.ask(StepsRequest(rid=_rid(), run=run, after_step=after_step, limit=limit), Steps)

    async def hosts(self, run: str | None = None, after_row: int = 0, limit: int = 100) -> Hosts:
        """A page of readings of a run's machines, as they came; `last_row` of it begins the next."""
        return await self.ask(HostsRequest(rid=_rid(), run=run, after_row=after_row, limit=limit), Hosts)

    async def log(
        self, run: str | None = None, rank: int = 0, offset_bytes: int = -65536, limit_bytes: int = 65536
    ) -> LogPart:
        """Part of a trainer's log; a negative offset counts from the end."""
        request = LogRequest(rid=_rid(), run=run, rank=rank, offset_bytes=offset_bytes, limit_bytes=limit_bytes)
        return await self.ask(request, LogPart)

    async def samples(
        self, run: str | None = None, after_row: int = 0, limit: int = 100, newest: bool = False
    ) -> Samples:
        """A page of the model's answers, oldest first."""
        request = SamplesRequest(rid=_rid(), run=run, after_row=after_row, limit=limit, newest=newest)
        return await self.ask(request, Samples)

    async def traces(self, run: str | None = None, limit: int = 64) -> Traces:
        """The newest profiles of a run's steps, one event for each rank's, oldest first."""
        return await self.ask(TracesRequest(rid=_rid(), run=run, limit=limit), Traces)

    async def trace_part(self, run: str, node: str, file: str, offset_bytes: int) -> TracePart:
        """Part of a profile's trace, from the node that has it; at most TRACE_PART_BYTES."""
        request = TraceRequest(rid=_rid(), run=run, node=node, file=file, offset_bytes=offset_bytes)
        return await self.ask(request, TracePart)

    async def pairs(self, run: str | None = None, limit: int = 20) -> Pairs:
        """The held-out pairs of the newest evaluations, oldest first."""
        return await self.ask(PairsRequest(rid=_rid(), run=run, limit=limit), Pairs)

    async def policies(self, run: str | None = None) -> Policies:
        """Return what the policies of an active run see and would do next, and their newest commands."""
        return await self.ask(PoliciesRequest(rid=_rid(), run=run), Policies)

    async def diagnosis(self, run: str | None = None, last_step: int | None = None) -> DiagnosisReply:
        """Return why a run is slow or stuck, now or at `last_step`; the newest run if none is active."""
        request = DiagnosisRequest(rid=_rid(), run=run, last_step=last_step)
        return await self.ask(request, DiagnosisReply)

    async def attend(self, viewer: str = "", *, read_only: bool = False, leaving: bool = False) -> Viewers:
        """Who else is attached; with `viewer`, an id of one's own, one counts as attached for the next 20 s."""
        request = AttendRequest(rid=_rid(), viewer=viewer, by=self.by[:64], read_only=read_only, leaving=leaving)
        return await self.ask(request, Viewers)

    async def audit(self, limit: int = 100) -> Audit:
        """Who was refused what, newest first. Raises NotAuthorisedError for any but an operator."""
        return await self.ask(AuditRequest(rid=_rid(), limit=limit), Audit)

    async def test_hooks(self) -> HookTest:
        """Have the agent call each of its alert hooks once, and return how that went."""
        return await self.ask(HookTestRequest(rid=_rid()), HookTest)

    async def rename_run(self, run: str, name: str) -> None:
        """Give a run another name on the agent's node."""
        await self.ask(EditRun(rid=_rid(), run=run, name=name), RunEdited)

    async def remove_run(self, run: str) -> int:
        """Remove a run that has ended from the agent's node, and return the space on the disk that was freed."""
        return (await self.ask(EditRun(rid=_rid(), run=run), RunEdited)).freed_bytes

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
                if isinstance(reply, Refusal) and reply.code == "not-lead" and reply.lead:
                    lead = reply.lead
                    self._learn({lead: reply.lead_key})
                    break
                yield check_reply(reply, CommandReply)
        if lead is not None:
            async with (
                Client(lead, by=self.by, timeout_seconds=self.timeout_seconds, keys=self.keys) as client,
                contextlib.aclosing(client._converse(command)) as replies,
            ):
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
        self, verb: str, args: dict[str, Any], *, wait: Literal["applied", "accepted", "none"] = "applied",
        timeout_seconds: float = 60.0, **options: Any,
    ) -> CommandReply:  # fmt: skip
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
                snapshot = await self.snapshot(0)  # for where it publishes alone
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
                snapshot = await self.snapshot(columns, run)
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
                await self.snapshot(0)  # raises UnreachableError: attach again
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
        request = GapRequest(rid=_rid(), boot=gap.boot, first_seq=gap.first, last_seq=last)
        fill = await self.ask(request, GapFill)
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

    async def ask(self, request: Request, wanted: type[R]) -> R:
        """The reply to a request that may be asked again: with a line that is lost, it or its reply may be. Raises as
        `check_reply`, and UnreachableError."""
        deadline = time.monotonic() + self.timeout_seconds
        with self._conversation(request) as replies:
            while True:
                await self._transmit(request)
                try:
                    seconds = min(AGAIN_SECONDS, max(0.0, deadline - time.monotonic()))
                    return check_reply(await self._next(replies, seconds), wanted)
                except UnreachableError:
                    if time.monotonic() >= deadline and not self._watch.has_met_agent:
                        raise self._no_answer() from None
                    if time.monotonic() >= deadline:
                        text = f"no answer from {self.address} within {self.timeout_seconds:g} s"
                        raise UnreachableError(text) from None

    @contextlib.contextmanager
    def _conversation(self, request: Request) -> Any:
        replies: asyncio.Queue[AgentReply | TrainctlError] = asyncio.Queue()
        self._waiting[request.rid] = replies
        try:
            yield replies
        finally:
            del self._waiting[request.rid]

    async def _transmit(self, request: Request) -> None:
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


def _rid() -> str:
    return uuid.uuid4().hex


def _so_far(reply: CommandReply | None) -> str:
    return f"{reply.state}, not applied" if reply is not None else "no answer"
