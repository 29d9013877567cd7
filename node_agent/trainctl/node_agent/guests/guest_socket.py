"""The Unix socket on which training loops of this machine attach their runs and take orders, and the files that they
leave while no agent runs.

Only the agent's own user can connect, so there are no keys and no roles. A run may have several connections: that of
`trainctl exec`, which lives as long as the command, and that of the loop inside it.
"""

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from trainctl.node_agent.conductor.events import Happened
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import AttachRun, RunSteps
from trainctl.protocol.messages.events import Notice
from trainctl.protocol.messages.guests import (
    GUEST_SOCKET,
    GUEST_VERSION,
    MAX_LINE_BYTES,
    End,
    FromGuest,
    Hello,
    Kept,
    RefusedLine,
    RunEvent,
    StepsLine,
    ToGuest,
)
from trainctl.protocol.messages.verbs import VERBS

MAX_CONNECTIONS: Final = 64
LINES_PER_SECOND, BURST_LINES = 1000, 5000
"""Lines that one connection may send, on average and at once."""
HELLO_SECONDS = 10.0
"""Seconds that a connection may take to say hello."""
LOOK_SECONDS = 2.0
"""Seconds between looks at whether the socket's file is there, and for files of loops that found no agent."""
SPOOL: Final = "spool"
"""Folder in the state folder with a file RUN.jsonl for each run whose loop found no agent."""
_OWN_FIELDS: Final = frozenset({"type", "version", "run", "ranks", "values"})
"""Fields of what a loop itself says wrong; anything else, such as a record that can't be written, may pass."""
_MALFORMED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_LINE = msgspec.json.Decoder(FromGuest, strict=False)
_ENCODER = msgspec.json.Encoder()
_LOOP_VERBS: Final = {name for name, verb in VERBS.items() if not verb.for_any_run and not verb.to_node}


class _GuestRefusedError(Exception):
    """A line that isn't accepted. `final`: the same would be refused again."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


class _Loop:
    """A speaker of a run: a connection, or without a writer a file."""

    def __init__(self, writer: asyncio.StreamWriter | None) -> None:
        self._writer = writer
        self.request: AttachRun | None = None
        self.verbs: dict[str, str] = {}
        self.has_ended = False
        self.kept = Kept(0)
        self.pid = _peer_pid(writer) if writer is not None else None
        self._lines, self._counted_monotonic = float(BURST_LINES), time.monotonic()

    @property
    def is_connected(self) -> bool:
        return self._writer is not None

    @property
    def run(self) -> str | None:
        return self.request.run if self.request is not None else None

    @property
    def process(self) -> str:
        """Identifies the process, whose events are numbered."""
        assert self.request is not None
        return _process_of(self.request)

    @property
    def offered(self) -> set[str]:
        return {verb for verb, why in self.verbs.items() if not why}

    def count_line(self) -> bool:
        """Count a line; return whether that was one too many."""
        now = time.monotonic()
        self._lines = min(BURST_LINES, self._lines + LINES_PER_SECOND * (now - self._counted_monotonic)) - 1
        self._counted_monotonic = now
        return self._lines < 0

    def say(self, line: ToGuest) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_ENCODER.encode(line) + b"\n")


def _process_of(request: AttachRun) -> str:
    return f"{request.ranks[0].pid} {request.started_at}"


def _peer_pid(writer: asyncio.StreamWriter) -> int | None:
    """Return the process that connected, also if it has ended since; None where the system doesn't say."""
    if sys.platform != "linux":
        return None
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[0])


class GuestSocket:
    """Listens while it serves."""

    def __init__(self, folder: Callable[[], Path], state: Path, runs: GuestRuns) -> None:
        """`folder` returns the runtime directory; `state` is the folder of the nodes' folders."""
        self._folder, self._spool, self._runs = folder, state / SPOOL, runs
        self._path: Path | None = None
        self._inode = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loops: list[_Loop] = []  # that have said hello, in that order
        self._ends: dict[str, End] = {}  # of runs that another connection keeps alive
        self._done: deque[str] = deque(maxlen=MAX_CONNECTIONS)  # processes that have said that they are done
        self._unread: set[str] | None = None  # runs with a file; None: not looked yet
        self._locks: dict[str, asyncio.Lock] = {}  # of the runs' files
        self._is_closing = False
        runs.send_orders, runs.is_expected = self._send_orders, self._is_expected

    @property
    def path(self) -> str:
        """Return where it listens; empty while it can't."""
        return str(self._path) if self._path is not None else ""

    async def listen(self) -> None:
        """Listen, again if the file of the socket is gone. Raises InvalidInputError or OSError."""
        if self._path is not None and self._path.exists():
            return
        path = self._folder() / GUEST_SOCKET
        path.unlink(missing_ok=True)  # a killed agent's: this one has the node's lock
        listening, mask = socket.socket(socket.AF_UNIX), os.umask(0o177)
        try:
            listening.bind(str(path))
        except OSError:
            listening.close()
            raise
        finally:
            os.umask(mask)
        if self._server is not None:
            self._server.close()
        self._server = await asyncio.start_unix_server(self._serve_loop, sock=listening, limit=MAX_LINE_BYTES)
        self._path, self._inode = path, path.stat().st_ino

    async def serve(self) -> None:
        """Listen, and read what loops have left, until it is cancelled."""
        try:
            while True:
                with contextlib.suppress(InvalidInputError, OSError):  # at the next look
                    await self.listen()
                with contextlib.suppress(OSError):
                    self._unread = {path.stem for path in self._spool.glob("*.jsonl")}
                for run in sorted(self._unread or ()):
                    await self._read_spool(run)
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self.close()

    async def close(self) -> None:
        """Let go of all connections; the runs stay live for the next agent of this node."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._path is not None:
            with contextlib.suppress(OSError):
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
            self._path = None

    # ------------------------------------------------------------ connections

    async def _serve_loop(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, loop = asyncio.current_task(), _Loop(writer)
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > MAX_CONNECTIONS:
                raise _GuestRefusedError("too many programs are connected: try again later", final=False)
            async with asyncio.timeout(HELLO_SECONDS):
                first = await reader.readline()
            line = first
            while line.endswith(b"\n"):
                await self._take_line(loop, line)
                await writer.drain()
                line = await reader.readline()
        except _GuestRefusedError as refused:
            loop.say(RefusedLine(str(refused), refused.final))
        except ValueError:  # of `readline`
            loop.say(RefusedLine(f"a line is longer than {MAX_LINE_BYTES:,} bytes", True))
        except (OSError, TimeoutError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            if loop in self._loops:
                self._loops.remove(loop)
                if not self._is_closing:
                    await self._left(loop)

    async def _take_line(self, loop: _Loop, text: bytes) -> None:
        """Take a line and answer it. Raises _GuestRefusedError."""
        if loop.count_line():
            raise _GuestRefusedError(f"more than {LINES_PER_SECOND} lines a second: try again later", final=False)
        try:
            line = _LINE.decode(text)
            if isinstance(line, Hello):
                await self._read_spool(line.request.run)
            await self._take(loop, line)
        except InvalidInputError as error:
            raise _GuestRefusedError(str(error), final=error.where in _OWN_FIELDS) from None
        except _MALFORMED as error:
            raise _GuestRefusedError(f"not a line of a training loop: {error}"[:1000], final=True) from None
        except (RefusedError, OSError) as error:
            raise _GuestRefusedError(str(error), final=False) from None
        assert loop.run is not None
        if isinstance(line, Hello):
            self._send_orders(loop.run)

    async def _take(self, loop: _Loop, line: FromGuest) -> None:
        """Take a line, and say what is in the record then. Raises InvalidInputError, msgspec.ValidationError or
        RefusedError."""
        if isinstance(line, Hello) and loop.is_connected and _process_of(line.request) in self._done:
            loop.request, loop.has_ended = line.request, True  # read after the file with its end
        elif isinstance(line, Hello):
            self._greet(loop, line)
        elif loop.request is None:
            raise InvalidInputError("type", "a connection begins with hello")
        request = loop.request
        assert request is not None
        if (guest := self._runs.find(request.run)) is None and not loop.has_ended:
            guest = self._runs.attach(request, self._verbs_of(request.run))  # it had been silent for long
        match line:
            case StepsLine():
                self._runs.take(RunSteps(rid="guest", run=request.run, steps=line.steps))
            case RunEvent():
                self._runs.happened(request.run, loop.process, line)
            case End():
                await self._end(loop, request.run, line)
            case Hello():
                pass
        if guest is not None:
            await guest.recorder.settled()
            if isinstance(line, StepsLine) and line.outcomes:
                await self._runs.hear(request.run, line.outcomes)
            loop.kept = Kept(guest.kept_step, guest.newest_event(loop.process))
        loop.say(loop.kept)

    def _greet(self, loop: _Loop, hello: Hello) -> None:
        request = hello.request
        if hello.version != GUEST_VERSION:
            problem = f"{hello.version} isn't supported; this agent has {GUEST_VERSION}: use one version of trainctl"
            raise InvalidInputError("version", problem)
        if loop.run not in (None, request.run):
            raise InvalidInputError("run", f"this connection is that of {loop.run}")
        before = loop.request, loop.verbs
        loop.request = msgspec.structs.replace(request, after_step=None)
        loop.verbs = {verb: why for verb, why in hello.verbs.items() if verb in _LOOP_VERBS}
        loop.has_ended = False
        self._ends.pop(request.run, None)
        if loop not in self._loops and loop.is_connected:
            self._loops.append(loop)
        try:
            self._describe(request.run, loop, request.after_step)
        except (InvalidInputError, RefusedError):
            loop.request, loop.verbs = before
            if loop.request is None and loop in self._loops:
                self._loops.remove(loop)
            raise

    def _describe(self, run: str, speaker: _Loop, after_step: int | None = None) -> None:
        """Show a run as the connection describes it that offers most. Raises InvalidInputError or RefusedError."""
        first = next(iter(self._of(run)), speaker)
        assert first.request is not None
        request = msgspec.structs.replace(first.request, after_step=after_step)
        speakers = {loop.pid for loop in (speaker, *self._of(run)) if loop.pid is not None}
        self._runs.attach(request, self._verbs_of(run), speakers)

    def _of(self, run: str) -> list[_Loop]:
        """Return a run's connections that haven't ended: that which offers most first, of several the newest."""
        loops = [loop for loop in reversed(self._loops) if loop.run == run and not loop.has_ended]
        return sorted(loops, key=lambda loop: -len(loop.offered))

    def _verbs_of(self, run: str) -> list[tuple[str, str]]:
        """Return each verb of a run's connections with why it isn't offered; empty: one offers it."""
        found: dict[str, str] = {}
        for loop in self._of(run):
            for verb, why in loop.verbs.items():
                found[verb] = why and found.get(verb, why)
        return sorted(found.items())

    async def _end(self, loop: _Loop, run: str, end: End) -> None:
        """End a run, once none of its other connections lives."""
        loop.has_ended = True
        self._done.append(loop.process)
        if others := self._of(run):
            self._ends[run] = end
            self._describe(run, others[0])
        else:
            loops = self._ends.pop(run, end)  # what a loop said before the command that it is in has ended
            await self._runs.end(run, "stopped" if loops.state == "stopped" else end.state, end.reason)

    async def _left(self, loop: _Loop) -> None:
        """Go on with a run's other connections, or end it as one of them has said."""
        run = loop.run
        if run is None or loop.has_ended or self._runs.find(run) is None:
            return
        if others := self._of(run):
            with contextlib.suppress(InvalidInputError, RefusedError):
                self._describe(run, others[0])
        elif (end := self._ends.pop(run, None)) is not None:
            await self._runs.end(run, end.state, end.reason)

    def _send_orders(self, run: str) -> None:
        """Send a run's open orders, each to the first connection that offers its verb."""
        for order in self._runs.orders_of(run):
            takers = self._of(run)
            taker = next((loop for loop in takers if order.verb in loop.offered), next(iter(takers), None))
            if taker is not None:
                taker.say(order)

    def _is_expected(self, run: str) -> bool:
        return self._unread is None or run in self._unread or bool(self._of(run))

    # ------------------------------------------------------------ files

    async def _read_spool(self, run: str) -> None:
        """Record what a loop has left, and remove its file. What can't be recorded now stays."""
        path = self._spool / f"{run}.jsonl"
        if not path.exists():
            return
        async with self._locks.setdefault(run, asyncio.Lock()):
            with contextlib.suppress(OSError), _locked(path) as file:
                if file is not None and await self._take_file(run, file):
                    path.unlink(missing_ok=True)
        if self._unread is not None and not path.exists():
            self._unread.discard(run)

    async def _take_file(self, run: str, file: Any) -> bool:
        """Record the lines of a file; return whether all are in the record, or can never be."""
        loop, line, is_whole = _Loop(None), None, True
        while text := file.readline():
            try:
                line = _LINE.decode(text)
                if isinstance(line, Hello):
                    if line.socket not in ("", self.path):
                        return False  # another agent has the steps before
                    if line.request.run != run:
                        raise InvalidInputError("run", f"is not {run}")
                await self._take(loop, line)
            except (*_MALFORMED, InvalidInputError):
                guest = self._runs.find(run)
                if guest is not None and text.strip() and is_whole:
                    is_whole, said = False, "part of what its loop wrote while no agent ran can't be read"
                    self._runs.note(guest, Happened(Notice(said), "warning", guest.view.name, guest.step))
                continue
            except RefusedError:
                return False
            if (guest := self._runs.find(run)) is not None and guest.recorder.is_refused:
                return False
            await asyncio.sleep(0)
        guest = self._runs.find(run)
        if guest is not None and not isinstance(line, End) and not guest.has_process and not self._of(run):
            await self._runs.end(run, "failed", "its process is gone, and had not said that it was done")
        return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Any]:
    """Yield a file that no one else reads or writes; None if a loop does. Raises OSError."""
    with path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        is_same = path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno()))
        yield file if is_same else None
