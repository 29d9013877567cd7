"""Service of the agent to its supervisor: says that it is ready, lives and stops; ends by itself where no one counts
its beats; and keeps a log, `<node folder>/logs/agent.log`, whose warnings go to standard error too, where a supervisor
keeps them. Spot notices come from a command of this machine that says whether its provider is about to take it back.
"""

import asyncio
import contextlib
import copy
import faulthandler
import logging
import logging.handlers
import os
import resource
import socket
import stat
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Protocol

from trainctl.node_agent.alerts.hooks import Outcome, run_command
from trainctl.node_agent.roles.drains import NodeDrain
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol.errors import CRASH_STATUS, InvalidInputError, TrainctlError
from trainctl.protocol.messages import Event, Live
from trainctl.protocol.record.log_format import Formatter

BEAT_SECONDS = 1.0
_BEATS = 4
"""Least number of beats within one limit."""
LOOKS = 8
"""Number of times the beat is checked within one limit."""
TELL_SECONDS = 2.0
"""Seconds the end waits for the log to be written."""
LIMIT_BYTES = 5_000_000
KEPT_FILES = 3
"""Older files kept beside the log; agent.log.1 is the newest of them."""
BOOT_LOG_BYTES = 1_000_000
log = logging.getLogger("trainctl.agent")
_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}


# The protocol (sd_notify(3)) is one line of text to a socket. The libraries for it are either bindings to libsystemd,
# which must be there to build them, or as many lines as these with errors swallowed.
class Notifier:
    """Notifies this process's supervisor; without one, does nothing."""

    def __init__(self, address: str, watchdog_seconds: float | None) -> None:
        """`address` is a path, or a name that begins with @; empty: no one listens. `watchdog_seconds`: how long at
        most may lie between two beats, None if no one counts them."""
        self.watchdog_seconds = watchdog_seconds
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self._socket is not None:
            self._socket.setblocking(False)  # a supervisor that hangs is no reason to
        self._said = ""

    def ready(self, status: str) -> None:
        """Say that the agent serves."""
        self._say(f"READY=1\nSTATUS={status}")

    def beat(self, status: str) -> None:
        """Say that the event loop turns; `status` is what the agent does, in a line."""
        words = ["WATCHDOG=1"] if self.watchdog_seconds is not None else []
        words += [f"STATUS={status}"] if status != self._said else []
        if words and self._say("\n".join(words)):
            self._said = status

    def stopping(self) -> None:
        """Say that the agent ends of its own will."""
        self._say("STOPPING=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _say(self, text: str) -> bool:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(text.encode(), self._address)
                return True
        return False


def from_environment(environment: MutableMapping[str, str], pid: int | None = None) -> Notifier:
    """Return what notifies the supervisor, whose address is taken out of the environment: it doesn't supervise
    trainers."""
    address = environment.pop("NOTIFY_SOCKET", "")
    microseconds, meant = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
    ours = meant in ("", str(os.getpid() if pid is None else pid))
    counted = ours and microseconds.isascii() and microseconds.isdigit() and int(microseconds) > 0
    return Notifier(address, int(microseconds) / 1e6 if address and counted else None)


class Watchdog:
    """A thread that ends the process if the event loop stalls, where no supervisor's watchdog does. What holds the
    interpreter's own lock for so long stops this thread too."""

    def __init__(self, limit_seconds: float, traces: Callable[[], IO[str] | None]) -> None:
        """Before the end, the stacks of all threads are written to the file that `traces` returns."""
        self._limit, self._traces = limit_seconds, traces
        self._beats, self._seen, self._looks, self._over = 0, -1, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat(self) -> None:
        """The loop turns."""
        self._beats += 1

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def look(self) -> bool:
        """Return whether the loop has stalled for the limit. It is counted in looks, not by a clock: a machine that
        slept, or a process that was stopped, made no looks either."""
        self._looks = self._looks + 1 if self._seen == self._beats else 0
        self._seen = self._beats
        return self._looks >= LOOKS

    def _watch(self) -> None:
        while not self._over.wait(self._limit / LOOKS):
            if self.look():
                # In a thread of its own: the loop may stall with the log's lock, or at the log's disk.
                telling = threading.Thread(target=self._tell, daemon=True)
                telling.start()
                telling.join(TELL_SECONDS)
                os._exit(CRASH_STATUS)  # sys.exit would end this thread only

    def _tell(self) -> None:
        text = "the event loop hung for %.1f s: the agent exits, and its supervisor restarts it"
        log.critical(text, self._limit)
        faulthandler.dump_traceback(self._traces() or sys.stderr, all_threads=True)


class InternalError(TrainctlError):
    """A fault in the agent's own code, after which its supervisor starts it again."""

    exit_code = CRASH_STATUS


class Working(Protocol):
    """The parts that supervision uses of an agent that has bound its addresses."""

    directory: Path
    publisher: Publisher

    @property
    def doing(self) -> str:
        """A line on what it does."""


@contextlib.asynccontextmanager
async def at_work(agent: Working, stall_seconds: float) -> AsyncIterator[None]:
    """Runs an agent's serving. Raises TrainctlError, its one line naming the log, for what must not happen."""
    notifier = from_environment(os.environ)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.closing(notifier), kept_log(agent.directory) as traces:
        log.info("started: %s, pid %s, version %s, %s open files", agent.doing, os.getpid(), version("trainctl"), files)
        agent.publisher.listeners.append(log_event)
        try:
            async with supervised(notifier, stall_seconds, lambda: agent.doing, traces):
                yield
        except TrainctlError as error:
            log.error("ended: %s", error)  # noqa: TRY400  its line says enough
            raise
        except Exception as error:
            log.exception("ended by an internal error")
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
            raise InternalError(f"internal error in the agent: {text}; see {log_path(agent.directory)}") from error
        log.info("stopped: %s", agent.doing)


@contextlib.asynccontextmanager
async def supervised(
    notifier: Notifier, stall_seconds: float, doing: Callable[[], str], traces: Callable[[], IO[str] | None]
) -> AsyncIterator[None]:
    """`stall_seconds`: how long the event loop may stall before the process ends, 0 for as long as it likes."""
    guard = Watchdog(stall_seconds, traces) if stall_seconds else None
    limits = [limit / _BEATS for limit in (notifier.watchdog_seconds, stall_seconds) if limit]
    notifier.ready(doing())
    beating = asyncio.create_task(_beat(notifier, guard, doing, min([BEAT_SECONDS, *limits])), name="supervision")
    if guard is not None:
        guard.start()
    try:
        yield
    finally:
        notifier.stopping()
        if guard is not None:
            guard.stop()
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _beat(notifier: Notifier, guard: Watchdog | None, doing: Callable[[], str], seconds: float) -> None:
    """On the event loop, so that it beats only while that turns."""
    while True:
        notifier.beat(doing())
        if guard is not None:
            guard.beat()
        await asyncio.sleep(seconds)


# ---------------------------------------------------------------- the log


class _OneLine(Formatter):
    """Leaves out the traceback, which is in the log."""

    def format(self, record: logging.LogRecord) -> str:
        bare = copy.copy(record)
        bare.exc_info = bare.exc_text = bare.stack_info = None
        return super().format(bare)


def log_path(node_directory: Path) -> Path:
    """Return the path of an agent's log."""
    return node_directory / "logs" / "agent.log"


@contextlib.contextmanager
def kept_log(node_directory: Path, *, limit_bytes: int = LIMIT_BYTES) -> Iterator[Callable[[], IO[str] | None]]:
    """Have all that is logged kept; gives what gives the file. Raises InvalidInputError if it can't be."""
    file = log_path(node_directory)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        keeping = logging.handlers.RotatingFileHandler(
            file, maxBytes=limit_bytes, backupCount=KEPT_FILES, encoding="utf-8"
        )
    except OSError as error:
        raise InvalidInputError(str(file), f"the agent cannot write its log there: {error.strerror}") from None
    telling = logging.StreamHandler()
    telling.setLevel(logging.WARNING)
    keeping.setFormatter(Formatter())
    telling.setFormatter(_OneLine())
    for handler in (keeping, telling):
        logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is no reason to print tracebacks
    log.setLevel(logging.INFO)
    shorten_boot_log()
    try:
        yield lambda: keeping.stream
    finally:
        logging.captureWarnings(False)
        for handler in (keeping, telling):
            logging.getLogger().removeHandler(handler)
            handler.close()


def log_event(message: Live) -> None:
    """Log a published message if it is an event."""
    if isinstance(message, Event):
        where = f"{message.run}: " if message.run else ""
        log.log(_LEVELS.get(message.severity, logging.INFO), "%s%s", where, message.text)


def shorten_boot_log(limit_bytes: int = BOOT_LOG_BYTES) -> None:
    """launchd has standard error in a file that no one rotates: begin it again when it is long."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known = os.fstat(sys.stderr.fileno())
        if stat.S_ISREG(known.st_mode) and known.st_size > limit_bytes:
            os.ftruncate(sys.stderr.fileno(), 0)


# ---------------------------------------------------------------- spot notices

NOTICE_SECONDS = 5.0
"""Seconds between the end of a command and the next one. Providers give notice 30 s to 2 min before."""
NOTICE_COMMAND_SECONDS = 10.0
"""Seconds that a command may take before it is killed; then it says nothing about a notice."""
WITHDRAWN_AFTER = 3
"""Exit statuses other than 0 in a row that withdraw a notice: a single one may be a failed request."""
SPOT_NOTICE = "a spot notice"


class SpotNotice:
    """Runs the command again and again: exit status 0 is a notice, which several other statuses in a row withdraw."""

    def __init__(self, command: tuple[str, ...], drain: NodeDrain) -> None:
        self._command, self._drain = command, drain
        self._is_given, self._others = False, 0
        self._has_failed = False

    async def serve(self) -> None:
        """Drain this node when there is a notice, and have it back when the notice is withdrawn."""
        while True:
            self.take(await run_command(self._command, b"", {}, NOTICE_COMMAND_SECONDS))
            await asyncio.sleep(NOTICE_SECONDS)

    def take(self, outcome: Outcome) -> None:
        """Take the outcome of a command. One that was killed, or couldn't be started, changes nothing."""
        if outcome.status is None:
            if not self._has_failed:
                log.warning("spot notice: %s", outcome.problem)
            self._has_failed = True
            return
        self._others = 0 if outcome.status == 0 else self._others + 1
        given = outcome.status == 0 or (self._is_given and self._others < WITHDRAWN_AFTER)
        if given != self._is_given:
            self._change(given=given)

    def _change(self, *, given: bool) -> None:
        self._is_given = given
        log.warning("spot notice: %s", "this node's rank leaves its run" if given else "withdrawn")
        if given:
            self._drain.begin(SPOT_NOTICE, exits=False)
        else:
            self._drain.call_off()
