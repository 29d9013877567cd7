"""The run that a command is: where it is recorded, its log, and its line to the agent of this machine."""

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainctl import guest
from trainctl.guest.link import Link
from trainctl.guest.orders import Offers, Orders
from trainctl.protocol.client import local_agents
from trainctl.protocol.config.names import node_directory, node_name, state_root
from trainctl.protocol.machine.shim import LOG_LIMIT_BYTES, bound_log
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.security import received_names
from trainctl.tui.exec.metric_files import MetricFile
from trainctl.tui.exec.process import Process

READY = b"ready"
"""Said by a detached command's process once the command runs; a command that can't be started: its exit status."""
CANNOT_EXECUTE, NOT_FOUND = 126, 127
"""Exit statuses of shells for a command that can't be started."""
LAST_LINES = 20
"""Lines of a failed command's output in its event."""
STOP_SECONDS = 120.0
"""Seconds after a stop's SIGTERM for which a command may go on before an event says so."""
_EVENT_CHARACTERS = 4000
_TAIL_BYTES = 65536
_LOOK_BYTES = 1 << 20
_TICK_SECONDS = 0.2
_FIRST_ANSWER_SECONDS = 2.0


@dataclass(frozen=True)
class RunPlace:
    """A run's id and name, and where this machine records it. `socket`: of its agent; empty: none runs."""

    run: str
    name: str
    socket: str
    state: Path
    paths: RunPaths

    def variables(self, environment: Mapping[str, str], *, injects: bool) -> dict[str, str]:
        """Return the variables by which processes in `environment` find the run."""
        found = {"TRAINCTL_GUEST_RUN": self.run, "TRAINCTL_GUEST_NAME": self.name}
        found["TRAINCTL_GUEST_STATE"] = str(self.state)
        if self.socket:
            found["TRAINCTL_GUEST_SOCKET"] = self.socket
        if injects:
            folder = str(Path(guest.__file__).parent / "inject")
            found["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH"))))
        return found


def place_of(command: Sequence[str], name: str | None, run: str | None, connect: str | None) -> RunPlace:
    """Choose the place of a new run, or of `run`: at the agent with the address `connect`, else at the first here."""
    agents = [agent for cluster in local_agents.running() for agent in cluster if agent.socket]
    agents.sort(key=lambda agent: agent.address != connect)
    shown = (name or _name_of(command))[:64]
    stem = re.sub(r"[^a-z0-9._-]", "-", shown.lower()).lstrip("._-")[:40] or "run"
    run = run or f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    if agents:
        state = Path(agents[0].state) if agents[0].state else state_root()
        node, socket = agents[0].node, agents[0].socket
    else:
        state, node, socket = state_root(), node_name(), ""
    directory = received_names.id_folder(runs_directory(node_directory(node, state)), run)
    return RunPlace(run, shown, socket, state, RunPaths(directory))


def _name_of(command: Sequence[str]) -> str:
    """Return the name of the script that a command runs, or of its program."""
    scripts = [Path(word).stem for word in command[1:] if word.endswith((".py", ".sh"))]
    modules = [word.rpartition(".")[2] for before, word in itertools.pairwise(command) if before == "-m"]
    return next(iter([*modules, *scripts]), "") or (Path(command[0]).name if command else "exec")


class OutputLog:
    """A copy of a command's output. A disk that refuses it doesn't disturb the command."""

    def __init__(self, path: Path, *, is_written: bool = False) -> None:
        """`is_written`: by the command itself."""
        self._path, self._file = path, -1
        self._lock = threading.Lock()
        self._tails = {1: b"", 2: b""}
        self._since_look = 0
        if not is_written:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def take(self, data: bytes, stream: int) -> None:
        """Add what the command wrote to a stream; a terminal's ends of lines become those of a file."""
        with self._lock:
            data = data.replace(b"\r\n", b"\n")
            self._tails[stream] = (self._tails[stream] + data)[-_TAIL_BYTES:]
            with contextlib.suppress(OSError):
                if self._file >= 0:
                    os.write(self._file, data)
            self._since_look += len(data)
            if self._since_look > _LOOK_BYTES:
                self._since_look = 0
                bound_log(self._path, LOG_LIMIT_BYTES)

    def last_lines(self, count: int, characters: int) -> str:
        """Return the last lines that say anything: errors last, and of a line that was written over its last state."""
        text = self._tails[1] + b"\n" + self._tails[2]  # standard output is often buffered until the end
        if not text.strip():
            with contextlib.suppress(OSError), self._path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read()
        lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.decode("utf-8", "replace").split("\n")]
        return "\n".join([line for line in lines if line][-count:])[-characters:]

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


class ExecRun:
    """The run's own connection to the agent: it exists as long as the command runs, whatever is inside."""

    def __init__(
        self, place: RunPlace, log: OutputLog, metrics: MetricFile | None, send: Callable[[signal.Signals], None]
    ) -> None:
        """`send`: gives the command a signal."""
        self._place, self._log, self._metrics, self._send = place, log, metrics, send
        os.environ.update(place.variables({}, injects=False))  # by which the connection finds the agent
        self._orders, offers = Orders(), Offers()
        self._why = f"{place.name} takes no orders but stop: it has no training loop that trainctl could enter"
        for verb in ("pause", "resume", "set-lr", "checkpoint", "evaluate"):
            offers.offer(verb, None, self._why)
        attach: dict[str, Any] = {"run": place.run, "name": place.name, "started_at": time.time(), "kind": "exec"}
        attach["ranks"] = [{"rank": 0, "pid": os.getpid()}]
        self._link = Link(attach, offers.verbs, self._orders, continues=True)
        self._over = threading.Event()
        self._stopped_monotonic: float | None = None
        self._is_stop_told = False
        self._thread = threading.Thread(target=self._follow, name="exec", daemon=True)

    def begin(self) -> None:
        """Have the run exist, if an agent answers."""
        until = time.monotonic() + (_FIRST_ANSWER_SECONDS if self._place.socket else 0.0)
        while not self._link.is_answered and time.monotonic() < until:
            time.sleep(0.002)
        self._thread.start()

    def end(self, status: int, command: str) -> None:
        """Record how the command ended: with its last lines if it failed."""
        self._over.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            self._report(to_the_end=True)
        interrupted = {128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
        state: Literal["finished", "stopped", "failed"] = "finished"
        if status:
            state = "stopped" if status in interrupted or self._stopped_monotonic is not None else "failed"
            text = f"{command} ended with exit status {status}"
            lines = self._log.last_lines(LAST_LINES, _EVENT_CHARACTERS - len(text) - 2)
            self._event(f"{text}:\n{lines}" if lines else text, "error" if state == "failed" else "info")
        self._link.close(state, f"exit status {status}" if status else "")
        self._log.close()
        (self._place.state / "spool" / f"{self._place.run}.lock").unlink(missing_ok=True)

    def _event(self, text: str, severity: Literal["info", "warning", "error"] = "info") -> None:
        self._link.items.append({"severity": severity, "text": text, "step": None})

    # ------------------------------------------------------------ while it runs

    def _follow(self) -> None:
        problem = ""
        while not self._over.wait(_TICK_SECONDS):
            while self._orders.arrived:
                self._carry_out(self._orders.arrived.popleft())
            since = self._stopped_monotonic
            if since is not None and not self._is_stop_told and time.monotonic() > since + STOP_SECONDS:
                self._is_stop_told = True
                self._event(f"{self._place.name} still runs, {STOP_SECONDS:.0f} s after SIGTERM", "warning")
            try:
                self._report()
            except OSError as error:
                if problem != str(error):
                    problem = str(error)
                    self._event(f"its metrics can't be read: {problem}", "warning")

    def _carry_out(self, order: Mapping[str, Any]) -> None:
        if order["verb"] == "note":
            self._event(str(order["args"].get("text", "")))
        elif order["verb"] == "stop":
            self._stopped_monotonic = self._stopped_monotonic or time.monotonic()
            self._send(signal.SIGTERM)
        else:
            self._orders.finish(order["id"], "rejected", None, self._why)
            return
        self._orders.finish(order["id"], "applied")

    def _report(self, *, to_the_end: bool = False) -> None:
        for step in self._metrics.read(to_the_end=to_the_end) if self._metrics else ():
            self._link.items.append(
                (step.number, step.at, step.seconds, step.loss, None, None, step.learning_rate, step.values, None)
            )


def run(
    place: RunPlace,
    command: Sequence[str],
    environment: Mapping[str, str],
    metrics: MetricFile | None,
    ready: int | None,
    complain: Callable[[str], object],
) -> int:
    """Run a command as a run, and return its exit status, but 1 for 0 where output was lost.

    `ready`: a descriptor on which is said that the command runs, or how it failed to start; its output is its log
    already then. `complain`: prints a failure as one line.
    """
    log = OutputLog(place.paths.log(0), is_written=ready is not None)
    process = Process(command, environment, log.take if ready is None else None)
    own = ExecRun(place, log, metrics, process.send)

    def answer(text: bytes) -> None:
        nonlocal ready
        if ready is not None:
            with contextlib.suppress(BrokenPipeError):  # whoever waited has gone
                os.write(ready, text)
            os.close(ready)
            ready = None

    def fail(line: str) -> None:
        complain(line)
        log.take(f"trainctl: {line}\n".encode(), 2)

    status = 1
    if ready is not None:
        os.set_inheritable(ready, False)  # the command has no use for it
    own.begin()
    try:
        status = process.run(lambda: answer(READY))
        if process.lost is not None:
            fail(f"output of {command[0]} was lost: {process.lost.strerror}")
    except OSError as error:
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
        fail(f"{command[0]} can't be started: {error.strerror}")
        answer(str(status).encode())
    finally:
        own.end(status, Path(command[0]).name)
    return status or int(process.lost is not None)
