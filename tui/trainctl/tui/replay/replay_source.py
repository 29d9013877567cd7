"""A run directory as the screens' source: what its record says up to a place in time that moves, and nothing after it.

No agent is needed and nothing is written. The place is moved by playing and by `seek`.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import msgspec

from trainctl.protocol.analysis.straggler import straggler_of
from trainctl.protocol.client.client import Connection
from trainctl.protocol.client.cluster import Item
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    MAX_COUNT,
    AttendRequest,
    Calibrations,
    CommandReply,
    DiagnosisReply,
    DiagnosisRequest,
    Events,
    EventsRequest,
    Heartbeat,
    History,
    HistoryRequest,
    Live,
    LogPart,
    NodeView,
    Pairs,
    PairsRequest,
    PoliciesRequest,
    RankState,
    RankStep,
    RankView,
    Reply,
    Request,
    RunCost,
    Runs,
    RunSummary,
    RunView,
    Samples,
    SamplesRequest,
    Series,
    Snapshot,
    SnapshotRequest,
    StepCommitted,
    StepProfiles,
    StepProfilesRequest,
    TraceRequest,
    Viewers,
    Works,
    WorksRequest,
)
from trainctl.protocol.record import log_format
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import VIEW_KEY, RecordReader
from trainctl.protocol.record.rollups import RANK_SERIES, RUN_SERIES, Evaluation
from trainctl.protocol.record.whole_run import WholeRunReader

P = ParamSpec("P")
R = TypeVar("R", bound=Reply)
SLOWEST, FASTEST = 0.25, 4096.0


@dataclass(frozen=True)
class Playhead:
    """Steps first..last; `step` is the newest that is shown. `rest` is time watched that no step has taken yet."""

    first: int
    last: int
    step: int = 0  # 0: the first
    playing: bool = True
    speed: float = 1.0  # seconds of the run in a second
    rest: float = 0.0

    def __post_init__(self) -> None:
        if not self.step:
            object.__setattr__(self, "step", self.first)

    def at(self, step: int, *, playing: bool | None = None) -> "Playhead":
        """Return the playhead at another step, as near as there is one."""
        step = min(max(step, self.first), self.last)
        return replace(
            self,
            step=step,
            rest=0.0 if playing is None else self.rest,
            playing=self.playing if playing is None else playing,
        )

    def toggled(self) -> "Playhead":
        """Playing or not; from the end it begins again."""
        if not self.playing and self.step == self.last:
            return replace(self, step=self.first, playing=True, rest=0.0)
        return replace(self, playing=not self.playing)

    def faster(self, times: float) -> "Playhead":
        return replace(self, speed=min(max(self.speed * times, SLOWEST), FASTEST))

    def after(self, seconds: float, ahead: Sequence[float]) -> tuple["Playhead", int]:
        """After so much time: how many of the steps ahead, told by their seconds, are shown. At the end it stops."""
        if not self.playing:
            return self, 0
        budget, passed = self.rest + seconds * self.speed, 0
        for took in ahead:
            if took > budget:
                break
            budget -= max(took, 1e-6)
            passed += 1
        over = self.step >= self.last or (passed == len(ahead) and not ahead)
        return replace(self, rest=budget if passed < len(ahead) else 0.0, playing=not over), passed


BOOT = "replay"
TICK_SECONDS = 0.2
MAX_STEPS_A_TICK = 24
"""More are shown by a snapshot than by their messages one by one."""
EVENTS, PAGE = 100, 500
NO_COMMANDS = "a replay takes no commands"


class ReplaySource:
    """Opens the record at once. Raises InvalidInputError for a directory without a record, or one without a step."""

    by = ""  # nobody: a recording takes no commands

    def __init__(self, directory: Path, speed: float = 1.0) -> None:
        self.paths = RunPaths(directory)
        self._reader = WholeRunReader(self.paths)
        last = self._reader.last_step()
        if self._reader.meta(VIEW_KEY) is None or last is None:
            self._reader.close()
            raise InvalidInputError(str(directory), "its record has no steps: nothing to replay")
        first = self._reader.steps(limit=1)[0][0]
        self._view = self._read_view(first.step, last.step)
        self.head = Playhead(first.step, last.step, speed=speed)
        self.at = first.committed_at  # the time of day that is shown, in Unix seconds
        self._seq = 0
        self._event = 0  # id of the newest event that was passed on
        self._moved = asyncio.Event()
        self.events_known = self._reader.all_events()
        self._samples_known = self._reader.all_samples()
        self._sampled_to = -math.inf  # time of the newest answer that was passed on

    def _read_view(self, first: int, last: int) -> RunView:
        """Return the run's newest view, with the ranks of all nodes."""
        view = self._reader.view()
        assert view is not None
        return _with_all_ranks(view, self._reader, (first, last))

    @property
    def lead(self) -> "ReplaySource":
        return self

    def close(self) -> None:
        self._reader.close()

    # ------------------------------------------------------------ the place

    def seek(self, step: int) -> None:
        """Go to a step; the screens are given all of it again."""
        self.head = self.head.at(step)
        self._moved.set()

    def turn(self, head: Playhead) -> None:
        """Play, pause, or play at another speed."""
        self.head = head

    async def follow(self, columns: int = 120) -> AsyncGenerator[tuple[str, Item], None]:
        """Yield a snapshot of the place, then what happens as it moves on."""
        yield "", Connection("connected", time.monotonic())
        yield "", self._snapshot(columns)
        before = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._moved.wait()
            except TimeoutError:
                now = time.monotonic()
                for message in self._advance(now - before):
                    yield "", message
                before = now
            else:
                self._moved.clear()
                yield "", self._snapshot(columns)
                before = time.monotonic()

    def _advance(self, seconds: float) -> list[Live | Heartbeat | Snapshot]:
        """Return what happened in so much time of watching."""
        ahead, _ = self._reader.steps(self.head.step, PAGE)
        self.head, passed = self.head.after(seconds, [step.step_seconds for step in ahead])
        if passed > MAX_STEPS_A_TICK:
            self.head = self.head.at(ahead[passed - 1].step, playing=self.head.playing)
            self._moved.set()
            return []
        made: list[Live | Heartbeat | Snapshot] = []
        for step in ahead[:passed]:
            made += self._played(step)
        if passed and self.head.step == self.head.last:
            made.append(self._numbered(self._view_at(ahead[passed - 1])))
        return made or [
            Heartbeat(
                node=self._view.lead, at=self.at, step_age_seconds=None, loop_lag_seconds=0.0, boot=BOOT, seq=self._seq
            )
        ]

    def _played(self, step: StepCommitted) -> list[Live]:
        self.head, self.at = self.head.at(step.step, playing=self.head.playing), step.committed_at
        made: list[Live] = [step, *self._reader.rank_steps(step.step)]
        events = [event for event in self.events_known if self._event < event.id and event.at <= self._shown_to]
        made += events
        made += [one for one in self._samples_known if self._sampled_to < one.at <= self._shown_to]
        self._sampled_to = self._shown_to
        evaluated = self._evaluation_by(step.step)
        if any(event.kind != "evaluation" for event in events) or (evaluated and evaluated.step == step.step):
            made.append(self._view_at(step))
        self._event = max([self._event, *(event.id for event in events)])
        return [self._numbered(message) for message in made]

    def _numbered(self, message: Any) -> Any:
        self._seq += 1
        return msgspec.structs.replace(message, boot=BOOT, seq=self._seq)

    @property
    def _shown_to(self) -> float:
        """Up to when events are shown; what came after the last step belongs to it."""
        return math.inf if self.head.step >= self.head.last else self.at

    # ------------------------------------------------------------ what is asked

    async def ask(self, request: Callable[Concatenate[str, P], Request[R]], /, *args: P.args, **fields: P.kwargs) -> R:
        """Return the reply as of the place. Raises RefusedError for what a record doesn't hold."""
        return cast(R, await self._reply_to(request("", *args, **fields)))

    async def _reply_to(self, asked: Request[Any]) -> Reply:
        run = self._view.run
        match asked:
            case SnapshotRequest():
                if asked.run not in (None, run):
                    raise RefusedError(f"this replay has no run {asked.run!r}")
                return self._snapshot(asked.columns)
            case HistoryRequest():
                return self._history(asked)
            case EventsRequest():
                return self._events(asked)
            case SamplesRequest():
                return self._samples(asked.limit)
            case PairsRequest():
                return self._pairs(asked.limit)
            case StepProfilesRequest():
                profiles = self._reader.newest_events(asked.limit, self._shown_to, kind="profile")
                return StepProfiles(rid="", run=run, profiles=profiles)
            case DiagnosisRequest():
                from trainctl.protocol.analysis.diagnosis.diagnose import of_record  # only if it is asked for

                diagnosis = await asyncio.to_thread(of_record, self.paths, self.head.step)
                return DiagnosisReply(rid="", run=run, live=False, diagnosis=diagnosis)
            case WorksRequest():
                return Works(rid="")
            case AttendRequest():
                return Viewers(rid="", viewers=())
            case TraceRequest():
                raise RefusedError("a replay shows a record: traces are in the run's folder profiles on their nodes")
            case PoliciesRequest():
                raise RefusedError("a replay shows a record: policies see something only in a live run")
            case _:
                raise RefusedError(f"a replay has no answer to {type(asked).__name__}: ask an agent that knows the run")

    def _snapshot(self, columns: int) -> Snapshot:
        step = self._step_at(self.head.step)
        self.at = step.committed_at
        events = tuple(event for event in self.events_known if event.at <= self._shown_to)[-EVENTS:]
        self._event = events[-1].id if events else 0
        self._sampled_to = self._shown_to
        host = self._reader.host_reading(self.at)
        node = NodeView(self._view.lead, BOOT, str(self.paths.directory), "", host, "")
        return Snapshot(
            rid="",
            boot=BOOT,
            seq=self._seq,
            at=self.at,
            node=node,
            run=self._view_at(step),
            last_step=step,
            rank_steps=self._reader.rank_steps(step.step),
            events=events,
            series=self._series(step.step, columns),
        )

    def _step_at(self, step: int) -> StepCommitted:
        """Return the step, or the next one that the record has."""
        found, _ = self._reader.steps(step - 1, 1)
        last = self._reader.last_step()
        assert last is not None
        return found[0] if found else last

    def _series(self, last: int, columns: int) -> tuple[Series, ...]:
        ranks = self._reader.ranks()
        wanted: list[tuple[str, int | None]] = [(metric, None) for metric in {*RUN_SERIES, self._view.rate_metric}]
        wanted += [(metric, rank) for metric in RANK_SERIES for rank in ranks]
        return tuple(self._reader.series(metric, rank, 0, last, columns) for metric, rank in wanted) if columns else ()

    def _view_at(self, step: StepCommitted) -> RunView:
        """Return the run's last view with what a step's own rows say in place of what came later."""
        over = step.step >= self.head.last
        parts = {part.rank: part for part in self._reader.rank_steps(step.step)}
        made = self._evaluation_by(step.step)
        return msgspec.structs.replace(
            self._view,
            state=self._view.state if over else "running",
            reason=self._view.reason if over else "",
            step=step.step,
            generation=step.generation,
            plan_version=step.plan_version,
            cursor=step.cursor,
            global_batch=step.global_batch,
            learning_rate=step.learning_rate,
            eval_step=made and made.step,
            eval_loss=made and made.loss,
            eval_values=tuple(made.values.items()) if made else (),
            boot=BOOT,
            seq=self._seq,
            cost=self._view.cost if over else _cost_at(self._view.cost, step),
            straggler=None if over else straggler_of({rank: [part] for rank, part in parts.items()}),
            ranks=self._view.ranks
            if over
            else tuple(_rank_at(rank, parts.get(rank.rank), step.committed_at) for rank in self._view.ranks),
        )

    def _evaluation_by(self, step: int) -> Evaluation | None:
        """Return the newest up to a step."""
        return next((made for made in reversed(self._reader.evaluations()) if made.step <= step), None)

    def _history(self, asked: HistoryRequest) -> History:
        last = self.head.step if asked.last_step is None else min(asked.last_step, self.head.step)
        wanted = [(name, rank) for name in asked.metrics for rank in self._reader.series_ranks(name)]
        series = (self._reader.series(name, rank, asked.first_step, last, asked.columns) for name, rank in wanted)
        return History(rid="", series=tuple(series))

    async def runs(self) -> Runs:
        view, step = self._view, self._step_at(self.head.step)
        return Runs(
            rid="",
            runs=(
                RunSummary(
                    run=view.run,
                    name=view.name,
                    state=view.state,
                    step=step.step,
                    steps=view.steps,
                    last_loss=step.loss,
                    started_at=view.started_at,
                    directory=str(self.paths.directory),
                    kind=view.kind,
                    simulated=view.simulated,
                    global_batch=step.global_batch,
                    cost=self._view.cost,
                ),
            ),
        )

    def _events(self, asked: EventsRequest) -> Events:
        shown = [event for event in self.events_known if event.id > asked.after_id and event.at <= self._shown_to]
        page = shown[-asked.limit :] if asked.newest else shown[: asked.limit]
        return Events(rid="", run=self._view.run, events=tuple(page), more=len(page) < len(shown))

    def _samples(self, limit: int) -> Samples:
        shown = tuple(sample for sample in self._samples_known if sample.at <= self._shown_to)
        return Samples(rid="", run=self._view.run, samples=shown[-limit:], last_row=0, more=False)

    def _pairs(self, limit: int) -> Pairs:
        shown = [pair for pair in self._reader.held_out_pairs(MAX_COUNT) if pair.step <= self.head.step]
        return Pairs(rid="", run=self._view.run, evaluations=tuple(shown[-limit:]))

    async def follow_run(self, run: str) -> bool:
        return False

    async def calibrations(self, node: str) -> Calibrations:
        """Return none: a run directory has no profiles of nodes."""
        return Calibrations(rid="", profiles=())

    async def log(
        self, node: str, run: str, rank: int, offset_bytes: int = -65536, limit_bytes: int = 65536
    ) -> LogPart:
        """Return a part of the whole run's log, whatever the place. Raises RefusedError where the directory has none of
        the rank."""
        file = self.paths.log(rank)
        if not file.is_file():
            raise RefusedError(f"rank: {rank} has no log in {self.paths.directory}")
        with file.open("rb") as stream:
            start, end, size, text = log_format.read_part(stream, offset_bytes, limit_bytes)
        return LogPart(rid="", run=run, rank=rank, offset_bytes=start, size_bytes=size, text=text, end_bytes=end)

    async def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[CommandReply]:
        raise RefusedError(NO_COMMANDS)
        yield  # makes it the iterator that a source's commands are


def _with_all_ranks(view: RunView, reader: RecordReader, steps: Sequence[int]) -> RunView:
    """Return the view with every rank that has a part in the record: the one of a node that didn't conduct has its own
    alone. `steps` are where the others' nodes are looked for; `view` at the record's end."""
    last = {part.rank: part for part in reader.rank_steps(max(steps))}
    nodes = {part.rank: part.node for step in steps for part in reader.rank_steps(step)}
    known = {rank.rank for rank in view.ranks}
    state: RankState = "run" if view.state in ACTIVE_RUN_STATES else "done"
    others = []
    for rank in sorted(set(reader.ranks()) - known):
        blank = RankView(rank, nodes.get(rank, f"rank {rank}"), state, view.started_at, share=0, micro_batch=0)
        found = _rank_at(blank, last.get(rank), view.started_at)
        others.append(msgspec.structs.replace(found, state=state) if rank in last else found)
    return msgspec.structs.replace(view, ranks=tuple(sorted((*view.ranks, *others), key=lambda item: item.rank)))


def _cost_at(last: RunCost | None, step: StepCommitted) -> RunCost | None:
    """Return the cost by a step, as the record has it with the step."""
    spent = step.values.get("cost")
    if last is None or spent is None:
        return None
    per_hour = step.values.get("cost_per_hour", 0.0)
    return msgspec.structs.replace(last, spent=spent, at=step.committed_at, per_hour=per_hour)


def _rank_at(rank: RankView, part: RankStep | None, at: float) -> RankView:
    """Return a rank as it was at a step, by the part that it had in it."""
    if part is None:
        return msgspec.structs.replace(rank, state="lost", why="no part in this step", share=0, since_at=at)
    return msgspec.structs.replace(
        rank, state="run", why="", share=part.samples, micro_batch=part.micro_batch, node=part.node
    )
