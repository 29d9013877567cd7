"""The runs of other programs that are live on this agent: each attaches, reports its steps, and ends or falls silent.
They are independent of the run that the agent hosts.
"""

import contextlib
import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from trainctl.node_agent.conductor.events import CommandEnded, Happened
from trainctl.node_agent.guests import guest_rows
from trainctl.node_agent.guests.guest_orders import GuestOrders
from trainctl.node_agent.records.agent_db import AgentDb, KnownRun
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.analysis.rolling import STATISTICS_STEPS, StepStatistics
from trainctl.protocol.analysis.straggler import StragglerWatch
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.files.durable_files import make_folder
from trainctl.protocol.machine import shim
from trainctl.protocol.messages import (
    AttachRun,
    EndRun,
    Event,
    GuestRequest,
    GuestStep,
    HostReading,
    Live,
    RankStep,
    Refusal,
    RunKept,
    RunState,
    RunSteps,
    RunView,
    Severity,
    StepCommitted,
    host_values,
)
from trainctl.protocol.messages.events import AnyEvent, Notice, RunStateChanged
from trainctl.protocol.messages.guests import Order, Outcome, RunEvent
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.record.reader import VIEW_KEY, RecordReader
from trainctl.protocol.security import received_names
from trainctl.protocol.wire.codec import decode_json, encode_json

MOST_GUESTS = 16
"""Most runs of other programs that may be live on one agent."""
READINGS_KEPT = 120
"""Newest readings of the machine, at 1 Hz, that wait for the steps they belong to."""
SILENT_SECONDS = 30.0
"""Seconds of silence of its program after which a run's ranks count as lost."""
GIVE_UP_SECONDS = 600.0
"""Seconds of silence after which the run has failed; its program may attach it again."""
GONE_SECONDS = 0.5
"""Seconds for which a run's processes are gone and silent until the run has failed."""
MAX_PROCESSES = 16
"""Most processes of a run that are remembered, with the events that they have sent."""
EVENT_HEAD, EVENT_TAIL = 200, 780
"""Characters of the beginning and the end of a long event's text that are kept."""


class NotAttachedError(InvalidInputError):
    """A program sent steps of a run that is not live here."""


class _Processes(msgspec.Struct):
    """The processes of a run on this machine, as its record keeps them for the next agent."""

    KEY: ClassVar[str] = "guest_processes"
    boot_id: str = ""
    began: dict[int, float] = {}  # by pid, as the system marks it: a pid may be used again
    events: dict[str, int] = {}  # number of the newest event of each process

    def look(self, pids: Sequence[int], speakers: Collection[int], *, in_addition: bool) -> bool:
        """Take note of processes that live, and of speakers that are gone already; return whether any is new.
        `speakers`: processes known to be of this machine. `in_addition`: those known before count too."""
        seen = {pid: _start_time(pid) for pid in pids}
        found = {pid: began or 0.0 for pid, began in seen.items() if began is not None or pid in speakers}
        before = self.began if in_addition and self.boot_id == shim.boot_id() else {}
        found = dict([*before.items(), *found.items()][-MAX_PROCESSES:])
        if found == self.began:
            return False
        self.began, self.boot_id = found, shim.boot_id()
        return True

    def gone(self) -> set[int]:
        """Return those that have ended."""
        if self.boot_id != shim.boot_id():
            return {*self.began}
        return {pid for pid, began in self.began.items() if _start_time(pid) != began}

    def is_new(self, process: str, number: int) -> bool:
        """Take note of an event's number; return whether it is newer than all before of that process."""
        if number <= self.events.get(process, 0):
            return False
        newest = self.events.pop(process, 0)  # the process is now the last one
        self.events = dict([*self.events.items(), (process, max(newest, number))][-MAX_PROCESSES:])
        return True


def _start_time(pid: int) -> float | None:
    try:
        return shim.start_time(pid)
    except OSError:  # too many files are open: it is taken for one that isn't known
        return None


class GuestRun:
    """One live run: its record, open for writing, and its newest step."""

    def __init__(self, paths: RunPaths, view: RunView | None, clock: Callable[[], float]) -> None:
        """`view` is None if the record has it. Raises InvalidInputError if the record cannot be used."""
        self.paths, self._clock = paths, clock
        self.recorder = RunDb(paths, resumable=False)
        state = self.recorder.last_state()
        self.last_step = state.step
        self._stragglers = StragglerWatch()
        self.parts: dict[int, RankStep] = {part.rank: part for part in state.rank_steps}
        kept = self.recorder.meta(VIEW_KEY)
        try:
            known = decode_json(kept, RunView) if kept is not None else None
        except msgspec.MsgspecError:  # of another version of the program
            known = None
        shown = known
        if view is not None:
            shown = guest_rows.going_on(msgspec.structs.replace(view, step=self.step), known)
        if shown is None:
            self.recorder.close()
            raise InvalidInputError("run", f"{paths.record} does not name its run: attach the run again")
        seen = (self.recorder.highest_generation(), known.generation if known is not None else None)
        generation = max((one for one in seen if one is not None), default=shown.generation)
        self.view = msgspec.structs.replace(shown, generation=generation, directory=str(paths.directory))
        self.heard_monotonic = clock()
        self.gone_monotonic: float | None = None  # since when none of its processes is left
        self._processes = _Processes()
        with contextlib.suppress(msgspec.MsgspecError):
            self._processes = decode_json(self.recorder.meta(_Processes.KEY) or "{}", _Processes)
        self._readings: deque[HostReading] = deque(maxlen=READINGS_KEPT)
        self._statistics = StepStatistics(self.recorder.newest_steps(STATISTICS_STEPS))
        self._part_at: dict[int, float] = {}  # rank -> when its newest part was made
        with RecordReader(paths) as reader:
            self._own_metrics = guest_rows.OwnMetrics(reader.own_metrics())

    @property
    def step(self) -> int:
        """The newest step that is recorded, 0 if there is none."""
        return self.last_step.step if self.last_step is not None else 0

    @property
    def kept_step(self) -> int:
        """The newest step that is in the record."""
        return self.recorder.newest()[0] if self.recorder.is_refused else self.step

    @property
    def silent_seconds(self) -> float:
        """Since its program was last heard."""
        return self._clock() - self.heard_monotonic

    def know_processes(self, speakers: Collection[int]) -> None:
        """Follow the processes of its ranks on this machine, besides those before if it is a watched command."""
        pids = [rank.pid for rank in self.view.ranks if rank.pid is not None and rank.node == self.view.lead]
        if self._processes.look(pids, speakers, in_addition=self.view.kind == "exec"):
            self._keep_processes()

    def look_at_processes(self) -> set[int]:
        """Return the processes of its ranks that are gone, and note since when none is left."""
        gone = self._processes.gone()
        if not gone or gone != self._processes.began.keys():
            self.gone_monotonic = None
        elif self.gone_monotonic is None:
            self.gone_monotonic = self._clock()
        return gone

    @property
    def has_process(self) -> bool:
        """Return whether a process of it is known to live, as far as was seen at the last look."""
        return bool(self._processes.began) and self.gone_monotonic is None

    def event_of(self, process: str, event: RunEvent) -> Event | None:
        """Record an event that the loop has sent; None if it is recorded already."""
        if not self._processes.is_new(process, event.number):
            return None
        text = event.text
        if len(text) > EVENT_HEAD + EVENT_TAIL:
            text = f"{text[:EVENT_HEAD]} … {text[-EVENT_TAIL:]}"
        step = self.step if event.step is None else event.step
        made = self.event(Happened(Notice(text), event.severity, self.view.name, step))
        self._keep_processes()
        return made

    def newest_event(self, process: str) -> int:
        """Return the number of the newest event of a process that is recorded, 0 if there is none."""
        return self._processes.events.get(process, 0)

    def _keep_processes(self) -> None:
        self.recorder.set_meta(_Processes.KEY, encode_json(self._processes), own=True)

    def keep(self, view: RunView) -> None:
        """The view as it is now, also for the next agent of this node."""
        self.view = view
        self.recorder.set_meta(VIEW_KEY, encode_json(view), own=True)

    def take(self, made: GuestStep) -> tuple[StepCommitted, tuple[RankStep, ...]]:
        """Record a step."""
        loss, made = guest_rows.evaluated(self._own_metrics.limited(made))
        step, parts = guest_rows.committed(self.view, made, self.last_step)
        step = self._statistics.joined(step)
        parts = tuple(self._with_readings(part, step.committed_at) for part in parts)
        self.recorder.commit(step, parts, step.committed_at)
        self.last_step = step
        self.parts |= {part.rank: part for part in parts}
        for part in parts:
            self._stragglers.add(part, step, [rank.rank for rank in self.view.ranks])
        shown = msgspec.structs.replace(self.view, straggler=self._stragglers.named)
        self.view = guest_rows.after_step(shown, made, loss)
        if loss is not None:
            self.recorder.evaluation(step.step, step.committed_at, loss, 0.0, 0.0)
        return step, parts

    def read(self, reading: HostReading) -> None:
        """A reading of this machine: it belongs to the step that is made meanwhile."""
        self._readings.append(reading)

    def _with_readings(self, part: RankStep, until: float) -> RankStep:
        """The part with the means of this machine's metrics since the part before; as it is if none was read."""
        since = self._part_at.get(part.rank, self.view.started_at)
        self._part_at[part.rank] = until
        own = next((rank for rank in self.view.ranks if rank.rank == part.rank), None)
        found: dict[str, list[float]] = {}
        for reading in self._readings:
            if reading.node == part.node and since < reading.read_at <= until:
                for name, value in host_values(reading, own.device if own is not None else None).items():
                    found.setdefault(name, []).append(value)
        means = {name: statistics.fmean(values) for name, values in found.items()}
        return msgspec.structs.replace(part, values={**means, **part.values}) if means else part

    def retract_after(self, step: int) -> None:
        """Mark the steps above `step`, and count the next ones in a new generation, which is kept first: should the
        agent end in between, no later step falls on a retracted one's row."""
        self.keep(msgspec.structs.replace(self.view, generation=self.view.generation.next()))
        self.recorder.retract_after(step)
        self.last_step = self.recorder.last_state().step
        self.parts = {}
        self.view = msgspec.structs.replace(self.view, step=self.step)

    def event(self, happened: Happened) -> Event:
        """Keep what happened."""
        fields = {field.name: getattr(happened, field.name) for field in dataclasses.fields(happened)}
        return self.recorder.event(time.time(), **fields, generation=self.view.generation)


class GuestRuns:
    """Takes the requests of attached runs' programs; all else about such runs is read from here."""

    def __init__(
        self,
        node: str,
        directory: Path,
        db: AgentDb,
        publish: Callable[[Live], object],
        *,
        clock: Callable[[], float] = time.monotonic,
        is_calibrating: Callable[[], bool] = lambda: False,
        leaves: Callable[[RunView], None] = lambda _: None,
    ) -> None:
        """`is_calibrating`: whether this node is being calibrated, which a run that trains meanwhile would distort;
        `leaves`: called with a run that ends, before that is recorded."""
        self._node, self._db, self._publish, self._clock = node, db, publish, clock
        self._is_calibrating, self._leaves = is_calibrating, leaves
        self._runs_directory = runs_directory(directory)
        self._live: dict[str, GuestRun] = {}
        self._orders = GuestOrders()
        self.settle: Callable[[CommandEnded], Awaitable[None]] = _settle_nothing
        """Keeps how a command ended."""
        self.send_orders: Callable[[str], None] = lambda _: None
        """Sends a run's open orders to its loop."""
        self.is_expected: Callable[[str], bool] = lambda _: False
        """Returns whether more may come of a run whose processes are gone: over a connection, or from a file."""

    @property
    def live(self) -> tuple[GuestRun, ...]:
        """Oldest first."""
        return tuple(self._live.values())

    def training(self) -> list[str]:
        """IDs of the live runs whose programs aren't silent."""
        return [run for run, guest in self._live.items() if guest.silent_seconds <= SILENT_SECONDS]

    def find(self, run: str | None) -> GuestRun | None:
        """A live run by its id; for None the newest."""
        return self._live.get(run) if run is not None else next(reversed(self._live.values()), None)

    async def reply(self, request: GuestRequest) -> RunKept | Refusal:
        """Carry out a request, or say why not."""
        try:
            if isinstance(request, EndRun):
                await self._fail_orders(request.run)
            kept = self.take(request)
            if (guest := self._live.get(request.run)) is None:
                return kept
            await guest.recorder.settled()
            return msgspec.structs.replace(kept, step=guest.kept_step)
        except NotAttachedError as error:
            return Refusal(rid=request.rid, code="unknown-run", text=str(error))
        except InvalidInputError as error:
            return Refusal(rid=request.rid, code="malformed", text=str(error))
        except (RefusedError, OSError) as error:
            return Refusal(rid=request.rid, code="busy", text=str(error))

    def take(self, request: GuestRequest) -> RunKept:
        """Carry out a request; its steps are given to the record. Raises InvalidInputError or RefusedError, and then
        nothing of it was recorded."""
        match request:
            case AttachRun():
                guest = self._attach(request)
            case RunSteps():
                guest = self._steps(request)
            case EndRun():
                if (again := self._ended(request)) is not None:
                    return again
                guest = self._get(request.run)
                self._end(guest, request.state, request.reason)
        directory = str(guest.paths.directory)
        return RunKept(rid=request.rid, run=request.run, step=guest.step, directory=directory)

    def _ended(self, request: EndRun) -> RunKept | None:
        """The reply to a request that has been carried out already: its reply was lost."""
        known = self._db.known_run(request.run)
        if known is None or request.run in self._live or known.kind == "hosted" or known.state != request.state:
            return None
        with RecordReader(RunPaths(known.directory)) as reader:
            last = reader.last_step()
        step = last.step if last is not None else 0
        return RunKept(rid=request.rid, run=request.run, step=step, directory=str(known.directory))

    def read(self, reading: HostReading) -> None:
        """A reading of this machine."""
        for guest in self.live:
            guest.read(reading)

    def take_up(self, known: KnownRun) -> None:
        """Go on with a run that was live when the last agent of this node ended."""
        try:
            self._live[known.run] = GuestRun(RunPaths(known.directory), None, self._clock)
        except InvalidInputError as error:
            self._db.set_run_state(known.run, "failed", str(error))

    async def watch(self) -> None:
        """Notice programs that are gone or silent, and orders whose time is up; call it a few times a second."""
        for ended in self._orders.expire(time.time()):
            await self.settle(ended)
        for guest in self.live:
            seconds, run = guest.silent_seconds, guest.view.run
            gone = guest.look_at_processes()
            if guest.gone_monotonic is not None:
                quiet_seconds = self._clock() - max(guest.gone_monotonic, guest.heard_monotonic)
                if quiet_seconds >= GONE_SECONDS and not self.is_expected(run):
                    await self.end(run, "failed", "its process is gone, and had not said that it was done")
            elif gone:
                self._show_new(guest, guest_rows.gone(guest.view, gone, time.time()))
            elif seconds > GIVE_UP_SECONDS and not guest.has_process:
                await self.end(run, "failed", f"its program has been silent for {seconds:.0f} s")
            elif seconds > SILENT_SECONDS and any(rank.state in ("run", "paused") for rank in guest.view.ranks):
                self._show(guest, guest_rows.silent(guest.view, seconds, time.time()))

    # ------------------------------------------------------------ loops that a socket connects

    def attach(self, request: AttachRun, verbs: Sequence[tuple[str, str]], speakers: Collection[int] = ()) -> GuestRun:
        """Take a run whose loop says which verbs it takes. `speakers`: the processes that have connected for it.
        Raises InvalidInputError or RefusedError."""
        return self._attach(request, tuple(verbs), speakers)

    def give(self, run: str, order: Order) -> None:
        """Have a loop carry out a command that is journaled. Raises RefusedError."""
        self._orders.give(run, order)
        self.send_orders(run)

    def orders_of(self, run: str) -> list[Order]:
        """Return the orders of a run that have no outcome, oldest first."""
        return self._orders.of(run)

    async def hear(self, run: str, outcomes: Sequence[Outcome]) -> None:
        """Take how orders ended."""
        verbs = {order.id: order.verb for order in self._orders.of(run)}
        ended, late = self._orders.heard(run, outcomes)
        for one in ended:
            await self.settle(one)
            if one.state == "applied" and (guest := self._live.get(run)) is not None:
                self._show_new(guest, guest_rows.obeyed(guest.view, verbs[one.id], time.time()))
        for happened in late:
            if (guest := self._live.get(run)) is not None:
                self.note(guest, happened)
                self._show_new(guest, guest_rows.obeyed(guest.view, happened.verb, time.time()))

    def happened(self, run: str, process: str, event: RunEvent) -> None:
        """Take an event of a live run's loop, once."""
        if (made := self._get(run).event_of(process, event)) is not None:
            self._publish(made)

    async def end(self, run: str, state: RunState, reason: str) -> None:
        """End a run, if it is live, and its orders."""
        await self._fail_orders(run)
        if (guest := self._live.get(run)) is not None:
            self._end(guest, state, reason)

    async def _fail_orders(self, run: str) -> None:
        for ended in self._orders.over(run, "the run ended"):
            await self.settle(ended)

    def close(self) -> None:
        """Let the records go; the runs stay live for the next agent of this node."""
        for guest in self.live:
            guest.keep(guest.view)
            guest.recorder.close()

    def _get(self, run: str) -> GuestRun:
        guest = self._live.get(run)
        if guest is None:
            raise NotAttachedError("run", f"no attached run {run!r} is live on {self._node}: attach it first")
        guest.heard_monotonic = self._clock()
        self._show_new(guest, guest_rows.heard(guest.view, time.time()))
        return guest

    def _attach(
        self, request: AttachRun, verbs: tuple[tuple[str, str], ...] = (), speakers: Collection[int] = ()
    ) -> GuestRun:
        if len({rank.rank for rank in request.ranks}) < len(request.ranks):
            raise InvalidInputError("ranks", "two ranks have the same number")
        guest = self._live.get(request.run)
        if guest is None:
            guest = self._open(request)
        guest.heard_monotonic = self._clock()
        if request.after_step is not None and request.after_step < guest.step:
            guest.retract_after(request.after_step)
        numbers = {rank.rank for rank in request.ranks}
        guest.parts = {rank: part for rank, part in guest.parts.items() if rank in numbers}
        directory = str(guest.paths.directory)
        view = guest_rows.view_of(request, self._node, directory, guest.view.generation, guest.step)
        self._show(guest, msgspec.structs.replace(guest_rows.going_on(view, guest.view), verbs=verbs))
        guest.know_processes(speakers)
        return guest

    def _open(self, request: AttachRun) -> GuestRun:
        known = self._db.known_run(request.run)
        if known is not None and known.kind == "hosted":
            raise InvalidInputError(
                "run", f"{request.run} is a run that {self._node} trains itself: choose a different id"
            )
        if self._is_calibrating():
            raise RefusedError(f"{self._node} is being calibrated; attach the run again in about a minute")
        if len(self._live) >= MOST_GUESTS:
            raise RefusedError(f"{MOST_GUESTS} attached runs are already live on {self._node}: end one first")
        own = known.directory if known is not None else received_names.id_folder(self._runs_directory, request.run)
        paths = RunPaths(own)
        make_folder(paths.directory)
        generation = guest_rows.FIRST_GENERATION
        guest = GuestRun(
            paths, guest_rows.view_of(request, self._node, str(paths.directory), generation, 0), self._clock
        )
        if known is None:
            try:
                self._db.add_run(request.run, request.name, request.started_at, "running", request.kind)
            except RefusedError:
                guest.recorder.close()
                raise
        else:
            self._db.set_run_state(request.run, "running")
        self._live[request.run] = guest
        again = "again " if known is not None else ""
        self._note(guest, Notice(f"attached {again}by its own program"), "info")
        return guest

    def _steps(self, request: RunSteps) -> GuestRun:
        guest_rows.check(request.steps)
        guest = self._get(request.run)
        if request.steps and request.steps[-1].step > guest.step:
            self._show_new(guest, guest_rows.going(guest.view, time.time()))
        for made in request.steps:
            if made.step > guest.step:
                slow = guest.view.straggler
                step, parts = guest.take(made)
                self._publish(step)
                for part in parts:
                    self._publish(part)
                if guest.view.eval_step == step.step or guest.view.straggler is not slow:
                    self._show(guest, guest.view)
        return guest

    def _end(self, guest: GuestRun, state: RunState, reason: str) -> None:
        self._leaves(guest.view)
        severities: dict[str, Severity] = {"finished": "good", "failed": "error"}
        self._note(guest, RunStateChanged("", state, reason, guest.step), severities.get(state, "info"))
        self._show(guest, guest_rows.ended(guest.view, state, reason, time.time()))
        self._db.set_run_state(guest.view.run, state, reason)
        del self._live[guest.view.run]
        guest.recorder.close()

    def _show_new(self, guest: GuestRun, view: RunView) -> None:
        if view is not guest.view:
            self._show(guest, view)

    def _show(self, guest: GuestRun, view: RunView) -> None:
        guest.keep(view)
        self._publish(view)

    def _note(self, guest: GuestRun, data: AnyEvent, severity: Severity) -> None:
        self.note(guest, Happened(data, severity, guest.view.name, guest.step))

    def note(self, guest: GuestRun, happened: Happened) -> None:
        """Keep and publish an event of a live run."""
        self._publish(guest.event(happened))


async def _settle_nothing(_: CommandEnded) -> None:
    """There are no commands."""
