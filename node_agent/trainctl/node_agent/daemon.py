"""The agent: binds the sockets, takes the loop's events to the pure parts, and survives whatever comes in."""

import asyncio
import contextlib
import fcntl
import re
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from trainctl.node_agent import decisions as d
from trainctl.node_agent import leash, openings, requests
from trainctl.node_agent.commands import CommandOffice
from trainctl.node_agent.host import TrainerHost
from trainctl.node_agent.ledger import AgentLedger
from trainctl.node_agent.publisher import Publisher
from trainctl.node_agent.readings import HostReader
from trainctl.node_agent.session import Session
from trainctl.node_agent.trainer_link import TrainerLink
from trainctl.protocol import codec, runfile, sockets, verbs
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, ProtocolError, RefusedError, VersionError
from trainctl.protocol.paths import RunPaths, node_directory, runtime_directory

BEAT_SECONDS = 1.0
ENDING_SECONDS = 10.0
WATCH_SECONDS = 0.25
"""How often the agent looks whether its trainers live, and lets commands expire."""


class Agent:
    """One node's agent. `async with` binds it; `serve` runs until `stop` is called or a signal comes.

    A leashed one also leaves once its standard input has ended and no run is active.
    """

    def __init__(
        self, node: str, listen: str, live: str | None = None, state_root: Path | None = None, *, leashed: bool = False
    ) -> None:
        if not re.fullmatch(runfile.NAME_PATTERN, node):
            raise InvalidInputError("--name", f"{node!r} is no node name: lower-case letters, digits, '.', '_' and '-'")
        if leashed:
            leash.check()
        self._leashed = leashed
        sockets.check_bind(listen)
        self.node, self._wanted = node, (listen, live or _port_after(listen))
        sockets.check_bind(self._wanted[1])
        self.directory = node_directory(node, state_root)
        self.boot = secrets.token_hex(8)
        self.session: Session | None = None
        self._last_run: str | None = None  # the newest to have been opened by this agent
        self._idle = asyncio.Event()  # set when a run has just ended
        self._stopping = asyncio.Event()
        self._host_reading: m.HostReading | None = None

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> "Agent":
        self._lock = _lock(self.directory)
        self._ledger = AgentLedger(self.directory / "agent.db")
        self._context, self._plain_context = zmq.asyncio.Context(), zmq.Context()
        try:
            self._control = sockets.new_socket(self._context, zmq.ROUTER, control=True)
            self._live = sockets.new_socket(self._plain_context, zmq.PUB)
            self.address = _bind(self._control, self._wanted[0])
            self.live_address = _bind(self._live, self._wanted[1])
            self._link = TrainerLink(self._context, runtime_directory(self.directory) / "trainers.sock")
        except InvalidInputError:
            self._close()
            raise
        self.publisher = Publisher(self._live, self.boot)
        self._host, self._reader = TrainerHost(), HostReader(self.node, self.directory)
        self._office = CommandOffice(self._ledger, self._answer, self._start_run)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self.session is not None:
            self.session.close()
        elif hasattr(self, "_link"):
            self._link.remove()
        if hasattr(self, "_reader"):
            self._reader.close()
        self._ledger.close()
        self._context.destroy(linger=0)
        self._plain_context.destroy(linger=0)
        self._lock.close()

    def stop(self) -> None:
        """Leave `serve`. Trainers stay as they are, for the next agent of this node."""
        self._stopping.set()

    async def serve(self) -> None:
        """Answer, conduct and publish until told to stop; an error in one of these ends the agent and is raised."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self._take_up_run()
        workers = [self._serve_clients, self._serve_trainers, self._beat, self._watch]
        workers += [self._heed_leash] if self._leashed else []
        tasks = [asyncio.create_task(worker(), name=worker.__name__) for worker in workers]
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        try:
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)

    # ------------------------------------------------------------ runs

    async def _start_run(self, command: m.Command, args: verbs.StartRun) -> str:
        await self._see_off_ending_run()
        if self.session is not None:
            why = "is active" if self.session.conductor.final is None else "is still ending, try again in a moment"
            raise InvalidInputError("run", f"{self.session.run} {why}; one run at a time")
        if args.config is not None:
            config = runfile.parse(args.config, "config")
            opening = openings.new_run(config, self.node, self.directory, command.id, command.by)
            try:
                self._ledger.add_run(opening.conductor.run, config.run.name, opening.paths.directory, time.time())
            except RefusedError:
                opening.recorder.close()
                shutil.rmtree(opening.paths.directory, ignore_errors=True)
                raise
        else:
            directory = self.run_directory(args.resume)
            if directory is None:
                raise InvalidInputError("resume", f"no run {args.resume!r} on this node")
            paths = RunPaths(directory)
            if self._host.find(paths, 0) is not None:
                raise InvalidInputError("resume", f"a trainer of {args.resume} is still running; wait for its end")
            opening = await asyncio.to_thread(openings.old_run, paths, command.id, command.by)
        session = self._open(opening, time.time())
        if opening.notice:
            session.note(d.Happened("run", "warning", "auto", opening.notice, session.conductor.progress.step))
        self.publisher.publish(session.view)
        try:
            session.start_trainers(opening.resume_from)
        except RefusedError as error:
            await session.feed(d.RankEnded(0, False, f"could not be started: {error}"))
        return session.run

    async def _see_off_ending_run(self) -> None:
        """A run that is over but for its trainers' exit is waited for, so that the next can follow it at once."""
        if self.session is not None and self.session.conductor.final is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ENDING_SECONDS):
                    await self._idle.wait()

    async def _take_up_run(self) -> None:
        """Conduct again the run that was active when the last agent of this node ended."""
        for known in self._ledger.runs():
            if known.state not in m.ACTIVE_RUN_STATES:
                continue
            carried = frozenset(row.id for row in self._ledger.open_commands())
            try:
                opening = openings.surviving_run(RunPaths(known.directory), carried)
            except InvalidInputError as error:
                self._ledger.set_run_state(known.run, "failed", str(error))
                continue
            self._open(opening, known.started_at)
            break
        if self.session is not None:
            await self.session.watch_trainers()
            await self._office.conduct_again(self.session)
        else:
            await self._office.fail_open()

    def _open(self, opening: openings.Opening, started_at: float) -> Session:
        self.session = Session(
            opening.conductor, opening.paths, opening.recorder, self._host, self._link, self.publisher, started_at,
            self._office.end, self._ledger.saw,
        )  # fmt: skip
        self._office.session, self._last_run = self.session, self.session.run
        self._idle.clear()
        self._ledger.set_run_state(self.session.run, "starting")
        return self.session

    async def _close_if_ended(self) -> None:
        session = self.session
        if session is None or session.ended is None:
            return
        self._ledger.set_run_state(session.run, session.ended.state, session.ended.reason)
        text = f"{session.ended.state} at step {session.conductor.progress.step:,}"
        severity: m.Severity = "error" if session.ended.state == "failed" else "good"
        session.note(d.Happened("run", severity, "auto", text, session.conductor.progress.step))
        self.publisher.publish(session.view)
        self.session = self._office.session = None
        session.close()
        self._idle.set()

    # ------------------------------------------------------------ clients

    async def _serve_clients(self) -> None:
        pending: set[asyncio.Task[None]] = set()
        while True:
            frames = await sockets.receive(self._control)
            if len(frames) != 2:
                await self._reply(frames[0], m.Refusal(rid="", code="malformed", text="a request is one frame"))
                continue
            identity, frame = frames
            try:
                request = codec.decode_request(frame)
            except ProtocolError as error:
                await self._reply(identity, _refusal(frame, error))
                continue
            if isinstance(request, m.Command):
                await self._command(identity, request)
            else:
                task = asyncio.create_task(self._answer_request(identity, request))
                pending.add(task)
                task.add_done_callback(pending.discard)

    async def _command(self, identity: bytes, command: m.Command) -> None:
        try:
            await self._office.take(identity, command)
        except RefusedError as error:
            await self._reply(identity, m.Refusal(rid=command.rid, code="busy", text=str(error)))
        await self._close_if_ended()

    async def _answer_request(self, identity: bytes, request: m.ClientRequest) -> None:
        try:
            reply: m.AgentReply = await requests.answer(request, self)
        except requests.UnknownRunError as error:
            reply = m.Refusal(rid=request.rid, code="unknown-run", text=str(error))
        except InvalidInputError as error:
            reply = m.Refusal(rid=request.rid, code="malformed", text=str(error))
        try:
            await self._reply(identity, reply)
        except ProtocolError as error:
            await self._reply(identity, m.Refusal(rid=request.rid, code="busy", text=str(error)))

    async def _answer(self, identity: bytes, reply: m.CommandReply) -> None:
        await self._reply(identity, reply)

    async def _reply(self, identity: bytes, reply: m.AgentReply) -> None:
        # A client that has gone, or reads nothing, loses its reply: it asks again with the same id.
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            await self._control.send_multipart([identity, codec.encode(reply)], zmq.DONTWAIT)

    # ------------------------------------------------------------ trainers

    async def _serve_trainers(self) -> None:
        while True:
            received = await self._link.receive()
            if received is None:
                continue
            (message, returned), session = received, self.session
            if session is None or message.run != session.run:
                # A trainer of a run that nobody conducts any more: it would wait for ever.
                await self._link.send(message.rank, m.Leave(run=message.run, reason="this run is not conducted here"))
                continue
            if returned:
                await session.feed(d.RankReturned(message.rank))
            await session.feed(message)
            await self._close_if_ended()

    async def _watch(self) -> None:
        async for _ in _every(WATCH_SECONDS):
            if self.session is not None:
                await self.session.watch_trainers()
                await self.session.feed(d.Ticked())
                self.session.check_record()
                await self._close_if_ended()

    async def _heed_leash(self) -> None:
        await leash.let_go()
        async for _ in _every(WATCH_SECONDS):
            if self.session is None:
                return

    # ------------------------------------------------------------ telemetry

    async def _beat(self) -> None:
        async for lag_seconds in _every(BEAT_SECONDS):
            reading = self._reader.read(time.time())
            self._host_reading = reading
            self.publisher.publish(reading)
            session, age = self.session, None
            if session is not None:
                session.recorder.host(reading)
                if session.view.state == "running":
                    age = time.monotonic() - session.last_commit_monotonic
            beat = m.Heartbeat(node=self.node, at=time.time(), step_age_seconds=age, loop_lag_seconds=lag_seconds)
            self.publisher.beat(beat)

    # ------------------------------------------------------------ what requests see

    def now(self) -> float:
        return time.time()

    def node_view(self) -> m.NodeView:
        return m.NodeView(
            node=self.node, boot=self.boot, address=self.address, live_address=self.live_address,
            host=self._host_reading, version=version("trainctl"),
        )  # fmt: skip

    def run_directory(self, run: str | None) -> Path | None:
        """Of a run by its id; of the active run, or else the newest, for None."""
        if run is None and self.session is not None:
            return self.session.paths.directory
        wanted = run or self._last_run
        known = self._ledger.runs()
        found = next((row for row in known if row.run == wanted), None)
        if found is None and run is None:
            found = next(iter(known), None)
        return found.directory if found is not None else None

    def ended_as(self, run: str) -> tuple[m.RunState, str]:
        """State and reason of a run that isn't active, as the ledger has them."""
        return next((known.state, known.reason) for known in self._ledger.runs() if known.run == run)

    def run_summaries(self) -> list[tuple[str, str, str, str, float]]:
        """(run, name, directory, state, started at) of every run, newest first; the active one as it is now."""
        active = self.session
        return [
            (
                known.run, known.name, str(known.directory),
                active.view.state if active is not None and active.run == known.run else known.state, known.started_at,
            )
            for known in self._ledger.runs()
        ]  # fmt: skip


async def _every(seconds: float) -> AsyncIterator[float]:
    """Ticks at a steady pace; yields by how many seconds each came late."""
    due = time.monotonic()
    while True:
        yield max(0.0, time.monotonic() - due)
        due = max(due + seconds, time.monotonic())
        await asyncio.sleep(due - time.monotonic())


def _bind(socket: Any, address: str) -> str:
    """Bind and give the address with its real port. Raises InvalidInputError if it is taken."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        why = "something listens there already, another agent?" if error.errno == zmq.EADDRINUSE else error.strerror
        raise InvalidInputError(address, f"cannot listen: {why}") from None
    bound: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)
    return bound.rstrip(b"\0").decode()


def _port_after(listen: str) -> str:
    parts = sockets.split(listen)
    if parts.scheme != "tcp":
        return f"{listen}.live"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"tcp://{host}:{parts.port + 1 if parts.port else 0}"


def _lock(directory: Path) -> Any:
    """The node's folder is one agent's at a time. Raises InvalidInputError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = (directory / "agent.lock").open("w")
    except OSError as error:
        raise InvalidInputError(str(directory), f"cannot be the agent's folder: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise InvalidInputError(str(directory), "another agent of this node is running") from None
    return handle


def _refusal(frame: bytes, error: ProtocolError) -> m.Refusal:
    code: Any = "version" if isinstance(error, VersionError) else "malformed"
    return m.Refusal(rid=codec.peek_rid(frame), code=code, text=str(error))
