"""The runs of other programs that are live on this agent: each attaches, reports its steps, and ends or falls silent.
They are independent of the run that the agent hosts.
"""

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainctl.node_agent.conductor.events import Happened
from trainctl.node_agent.guests import guest_rows
from trainctl.node_agent.records.agent_db import AgentDb, KnownRun
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.analysis.rolling import STATISTICS_STEPS, StepStatistics
from trainctl.protocol.analysis.straggler import StragglerWatch
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.files.durable_files import make_folder
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


class NotAttachedError(InvalidInputError):
    """A program sent steps of a run that is not live here."""


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

    def watch(self) -> None:
        """Notice programs that are silent; call it a few times a second."""
        for guest in self.live:
            seconds = guest.silent_seconds
            if seconds > GIVE_UP_SECONDS:
                self._end(guest, "failed", f"its program has been silent for {seconds:.0f} s")
            elif seconds > SILENT_SECONDS and any(rank.state == "run" for rank in guest.view.ranks):
                self._show(guest, guest_rows.silent(guest.view, seconds, time.time()))

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
        heard = guest_rows.heard(guest.view, time.time())
        if heard is not guest.view:
            self._show(guest, heard)
        return guest

    def _attach(self, request: AttachRun) -> GuestRun:
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
        self._show(guest, guest_rows.going_on(view, guest.view))
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

    def _show(self, guest: GuestRun, view: RunView) -> None:
        guest.keep(view)
        self._publish(view)

    def _note(self, guest: GuestRun, data: AnyEvent, severity: Severity) -> None:
        self.note(guest, Happened(data, severity, guest.view.name, guest.step))

    def note(self, guest: GuestRun, happened: Happened) -> None:
        """Keep and publish an event of a live run."""
        self._publish(guest.event(happened))
