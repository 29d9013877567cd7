"""A rank as its run's session sees it, wherever it runs: start it, tell it, look at it, end it."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from trainctl.node_agent.trainers.ipc import TrainerLink
from trainctl.node_agent.trainers.oom_detection import OomKills, recognised
from trainctl.node_agent.trainers.supervisor import SHIM_SECONDS, TrainerSupervisor
from trainctl.node_agent.transport.peer_link import PeerLink
from trainctl.protocol.config import env_policy, run_file
from trainctl.protocol.config.run_tables import NodeTable
from trainctl.protocol.errors import InvalidInputError, ProtocolError, RefusedError, TrainctlError
from trainctl.protocol.messages import HostedRank, Leave, PeerHost, PeerRelay, PeerTrainer, Report, StepPlan, ToTrainer
from trainctl.protocol.record import log_format
from trainctl.protocol.record.checkpoints import read_manifest
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.schema import UNREADABLE, open_for_reading
from trainctl.protocol.record.status_page import read_status
from trainctl.protocol.wire.codec import decode_answer

NEWEST = 8
"""Newest reports kept: more than a trainer can make without its agent, which plans one step ahead."""


def reports_after(record: Path, step: int) -> list[Report]:
    """Return the train reports of the steps above `step`, in their order, as far as they can be read. Raises
    InvalidInputError if there is no such file or it is damaged."""
    found = []
    with closing(open_for_reading(record)) as connection, suppress(*UNREADABLE):  # its trainer may have made no tables
        for (body,) in connection.execute("SELECT body FROM reports WHERE step > ? ORDER BY step", (step,)):
            with suppress(ProtocolError, TypeError):
                if isinstance(report := decode_answer(body), Report):
                    found.append(report)
    return found


def newest_reports(record: Path) -> list[Report]:
    """The last `NEWEST` of them; none of a record that is missing or can't be read."""
    with suppress(TrainctlError):
        return reports_after(record, 0)[-NEWEST:]
    return []


LEAVE_SECONDS = 60.0
"""Seconds after which a leaving trainer counts as hung, from the order or from the last progress of the checkpoint that
it still writes."""
_ENDPOINT, _RESUME_FROM = "--endpoint", "--resume-from"


@dataclass(frozen=True)
class Ending:
    """End of a trainer's process."""

    clean: bool
    why: str
    memory: str = ""  # what says that it ran out of memory; empty: nothing does


@dataclass(frozen=True)
class Look:
    """A rank at this moment."""

    pid: int | None = None  # None: starting, or gone, or on a node that has not reported yet
    ending: Ending | None = None  # None: it lives, as far as is known


class RankPort(Protocol):
    """Interface of a session to a rank. But for `start`, nothing waits; what can't be said now is not said later."""

    def start(self, resume_from: Path | None) -> None: ...
    async def tell(self, order: ToTrainer) -> bool: ...
    def look(self) -> Look: ...
    def doing(self) -> str: ...
    def last_reports(self) -> list[Report]: ...
    @property
    def in_touch(self) -> bool: ...
    @property
    def reached_monotonic(self) -> float: ...
    async def end(self) -> None: ...
    async def start_again(self) -> None: ...
    async def kill(self) -> None: ...


class LocalRank:
    """A rank that this agent hosts, under a shim."""

    def __init__(self, supervisor: TrainerSupervisor, link: TrainerLink, paths: RunPaths, node: str, rank: int) -> None:
        self._supervisor, self._link, self._paths, self._node, self._rank = supervisor, link, paths, node, rank
        self._leave_due = self._status_due = float("inf")  # by time.monotonic
        self._kills, self._was_killed = OomKills(), False  # by this agent
        self._seen = Look()
        self._resume_from: Path | None = None  # until it is given its first plan
        self._is_inherited = True  # what trainer there is an earlier agent started, and this one gave it no plan

    def start(self, resume_from: Path | None) -> None:
        """Raises RefusedError if no process can be started."""
        self._resume_from, self._is_inherited = resume_from, False
        argv = [
            sys.executable,
            "-m",
            "trainctl.trainer",
            "--run-directory",
            str(self._paths.directory),
            "--run",
            self._paths.directory.name,
            "--node",
            self._node,
            "--rank",
            str(self._rank),
            _ENDPOINT,
            self._link.endpoint,
        ]
        if resume_from is not None:
            argv += [_RESUME_FROM, str(resume_from)]
        wanted, env = self._wanted()
        self._was_killed = False
        self._link.forget_held(self._paths.directory.name, self._rank)
        self._supervisor.start(self._paths, self._rank, argv, env, wanted.priority)

    def _wanted(self) -> tuple[NodeTable, dict[str, str]]:
        """Return the node's table and its process's environment."""
        try:
            table = run_file.read(self._paths.run_file).nodes.get(self._node, NodeTable())
            where = f"nodes.{self._node}.env"
            return table, env_policy.of_trainers(os.environ, table.env, where, threads=table.rank_threads)
        except InvalidInputError as error:
            raise RefusedError(f"rank {self._rank} cannot be started: {error}") from None

    async def tell(self, order: ToTrainer) -> bool:
        """Return whether the trainer was there to take it."""
        if isinstance(order, Leave):
            self._leave_due = min(self._leave_due, time.monotonic() + LEAVE_SECONDS)
        is_sent = await self._link.send(self._rank, order)
        if is_sent and isinstance(order, StepPlan):
            self._resume_from, self._is_inherited = None, False
        return is_sent

    def look(self) -> Look:
        """Return the trainer's state now; the last one known while too many files are open to look."""
        with contextlib.suppress(OSError):
            self._seen = self._look()
        return self._seen

    def _look(self) -> Look:
        hosted = self._supervisor.find(self._paths, self._rank)
        if hosted is not None:
            if self._is_overdue():
                self._leave_due = float("inf")
                self._supervisor.dump_stacks(self._paths, self._rank)
                self._end()
            if hosted.pid is not None:
                self._kills.look(hosted.pid)
            if _ENDPOINT in hosted.command[:-1]:
                self._link.serve_at(hosted.command[hosted.command.index(_ENDPOINT) + 1])
            self._status_due = float("inf")
            return Look(hosted.pid)
        status = self._supervisor.exit_status(self._paths, self._rank)
        self._status_due = min(self._status_due, time.monotonic() + SHIM_SECONDS)
        if self._supervisor.is_ending(self._paths, self._rank) and time.monotonic() < self._status_due:
            return Look()
        memory = self._lack_of_memory(status)
        how = self._describe(status)
        return Look(None, Ending(status == 0, f"{how}, out of memory" if memory else how, memory))

    def _is_overdue(self) -> bool:
        now, run = time.monotonic(), self._paths.directory.name
        return now >= self._leave_due and now >= self._link.wrote_monotonic(run, self._rank) + LEAVE_SECONDS

    def _lack_of_memory(self, status: int | None) -> str:
        if self._was_killed:
            return ""
        return recognised(status, self._kills.seen(), self._link.held(self._paths.directory.name, self._rank))

    def doing(self) -> str:
        """Return the phase and step of a trainer that says nothing, by its status page."""
        page = read_status(self._paths.status_page(self._rank))
        return f"silent in {page.phase} of step {page.step}" if page else "silent"

    def last_reports(self) -> list[Report]:
        """The newest of a trainer that has ended: what it sent last may have been lost."""
        return newest_reports(self._paths.rank_record(self._rank))

    @property
    def in_touch(self) -> bool:
        """Return whether it can be ended from here."""
        return True

    @property
    def reached_monotonic(self) -> float:
        """Nothing but this agent lies between."""
        return 0.0

    async def end(self) -> None:
        """Not by a word: it has not attached yet, so there is nothing in it to save."""
        self._end()

    def _end(self, *, hung: bool = False) -> None:
        end = self._supervisor.kill_hung if hung else self._supervisor.kill
        try:
            self._was_killed = end(self._paths, self._rank) or self._was_killed
        except OSError:  # too many files are open to find it: at a look to come
            self._leave_due = time.monotonic()

    async def start_again(self) -> None:
        """Have a trainer, if none lives. Before the rank's first plan it starts as the last one did; later without a
        checkpoint, for it takes part in nothing before it is given the group's state. Raises RefusedError if no process
        can be started."""
        try:
            if self._supervisor.find(self._paths, self._rank) is not None:
                return
            resume_from = self._inherited_checkpoint() if self._is_inherited else self._resume_from
        except OSError as error:
            raise RefusedError(f"rank {self._rank}: {error}") from None
        self._leave_due = float("inf")
        is_there = resume_from is not None and resume_from.exists()  # others may have gone on without it
        self.start(resume_from if is_there else None)

    def _inherited_checkpoint(self) -> Path | None:
        """Return the checkpoint of a trainer that an earlier agent started, if it began no step after that."""
        last, page = self._supervisor.last(self._paths, self._rank), read_status(self._paths.status_page(self._rank))
        if last is None or _RESUME_FROM not in last.command[:-1]:
            return None
        folder = Path(last.command[last.command.index(_RESUME_FROM) + 1])
        with contextlib.suppress(InvalidInputError):  # it is gone: the others went on without it
            is_unused = page is None or page.pid != last.pid or page.step <= read_manifest(folder).step
            return folder if is_unused else None
        return None

    async def kill(self) -> None:
        """It hangs, and would obey no order: what it was doing is written to its log first."""
        self._end(hung=True)

    def _describe(self, status: int | None) -> str:
        how = (
            "is gone" if status is None else f"was ended by signal {-status}" if status < 0 else f"exited with {status}"
        )
        if status == -signal.SIGKILL:
            return how  # it had no time for last words: what is in the log is of its reducers, or old
        said = last_words(self._supervisor.log_tail(self._paths, self._rank, 20))
        return f"{how}: {said[:300]}" if said else how


def last_words(tail: Sequence[str]) -> str:
    """Return what a trainer's log ends with, where that is of its end and not of its work."""
    last = next((log_format.read(line) for line in reversed(tail) if line.strip()), None)
    if last is None or (last.level == "INFO" and not last.text.startswith("leaving")):
        return ""
    return last.text.strip()


class RemoteRank:
    """A rank that another node's agent hosts for this one; how it ended that agent tells by itself."""

    def __init__(self, link: PeerLink, run: str, rank: int, hosting: Callable[[], PeerHost]) -> None:
        """`hosting` asks its agent to host the rank, should it have let go of it."""
        self._link, self._run, self._rank, self._hosting = link, run, rank, hosting

    def start(self, resume_from: Path | None) -> None:
        """Do nothing: the rank's agent starts the trainer when it agrees to host it."""

    async def tell(self, order: ToTrainer) -> bool:
        """Return whether its agent was there to take it."""
        return await self._link.send(PeerRelay(link="", seq=0, rank=self._rank, order=order))

    def look(self) -> Look:
        return Look(self._hosted.pid if self._hosted is not None else None)

    @property
    def _hosted(self) -> HostedRank | None:
        hosted = (known for known in self._link.ranks if (known.run, known.rank) == (self._run, self._rank))
        return next(hosted, None)

    def doing(self) -> str:
        """Return what is known about a trainer that is silent."""
        return "silent" if self.in_touch else f"{self._link.node}'s agent: {self._link.line.why}"

    def last_reports(self) -> list[Report]:
        """Return none: the rank's agent sends them by itself."""
        return []

    @property
    def in_touch(self) -> bool:
        """Return whether it can be ended from here."""
        return self._link.line.open

    @property
    def reached_monotonic(self) -> float:
        """Since when its agent has been in touch; before that nothing could be heard from the rank."""
        return self._link.reached_monotonic if self._link.line.open else 0.0

    async def start_again(self) -> None:
        """Have its agent do so; how that went it tells by itself."""
        if self._hosted is not None:
            await self._wish("start")
        else:
            await self._link.send(self._hosting())

    async def kill(self) -> None:
        """Not if its agent is silent too: it would read this when its machine wakes, and end a trainer that is well.
        One that does hang is ended later, as one that doesn't load."""
        if not self._link.line.is_stale(time.monotonic()):
            await self._wish("kill")

    async def _wish(self, wish: Literal["start", "kill"]) -> None:
        await self._link.send(PeerTrainer(link="", seq=0, run=self._run, rank=self._rank, wish=wish))

    async def end(self) -> None:
        await self._link.end_rank(self._run, self._rank, "stopping")
