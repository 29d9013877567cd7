"""The feeds of the screens: the state and the logs, kept up to date for as long as the program runs."""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Mapping

import msgspec

from trainctl.protocol.client.client import Connection
from trainctl.protocol.errors import TrainctlError, UnreachableError
from trainctl.protocol.messages import ATTEND_SECONDS, AttendRequest, HistoryRequest, Snapshot, SnapshotRequest
from trainctl.tui.state import reducer
from trainctl.tui.state.merged_log import PART_BYTES, LogTail, failed, take
from trainctl.tui.state.source import Connect, Source
from trainctl.tui.state.view_state import Arrived, Clock, Incoming, ViewState

RETRY_SECONDS = 1.0
SNAPSHOT_COLUMNS = 200
TOGETHER_SECONDS = 0.05
"""Time within which messages are taken into the state together, such as all of a step: each alone costs twice that."""
MAX_WAITING = 256
"""Messages that are taken in together at most, so that it never takes long."""
_HISTORY_STEPS = 256
_HISTORY_METRICS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "step_seconds",
    "tokens_per_second",
    "busy_seconds",
    "own_tokens_per_second",
)


class LiveFeed:
    """The live state and the client it comes through. `arrived` is called after each snapshot was taken in, `told`
    after each other message."""

    def __init__(
        self,
        connect: Connect,
        clock: Clock,
        arrived: Callable[[], None],
        told: Callable[[Incoming], None],
        unread: ViewState,
    ) -> None:
        self._connect, self._clock, self._arrived, self._told = connect, clock, arrived, told
        self._unread = self.live = unread  # nothing known yet
        self.opened: ViewState | None = None
        """The run that was opened beside the one that is followed: as it stands if it is live, else as recorded."""
        self.client: Source | None = None
        self._waiting: list[Arrived] = []
        self._timer: asyncio.TimerHandle | None = None

    async def snapshot_of(self, run: str) -> Snapshot:
        """Return the lead's snapshot of a run. Raises TrainctlError."""
        if self.client is None:
            raise UnreachableError("no agent answers yet")
        return await self.client.lead.ask(SnapshotRequest, SNAPSHOT_COLUMNS, run)

    async def follow_run(self, run: str) -> bool:
        """Follow another active run's lead from here on; False if no agent leads it. Raises TrainctlError."""
        return self.client is not None and await self.client.follow_run(run)

    async def reopen(self) -> None:
        """Ask the agent again for the run shown beside the one that is followed. Raises TrainctlError."""
        opened = self.opened
        if opened is not None and opened.run is not None:
            snapshot = await self.snapshot_of(opened.run.run)
            if self.opened is not None and self.opened.run is not None and self.opened.run.run == opened.run.run:
                self.show_beside(snapshot)

    def show_beside(self, snapshot: Snapshot | None) -> None:
        """Show the snapshot's run beside the one that is followed; None: no other run."""
        self._take_waiting()
        self.opened = reducer.apply(self._unread, snapshot, self._clock.monotonic()) if snapshot is not None else None

    def _take_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        self.live = reducer.take_all(self.live, waiting)
        news = [item for item in waiting if not isinstance(item[1], Snapshot)]
        if self.opened is not None and self.opened.active:
            run = self.opened.run.run if self.opened.run is not None else ""
            own = [item for item in news if getattr(item[1], "run", "") in ("", run)]  # about it, or about no run
            self.opened = reducer.take_all(self.opened, own)
        for _, message, _ in news:
            self._told(message)

    async def keep_up(self) -> None:
        """Follow the agents, and begin again whenever the client gives up; it ends by being cancelled."""
        try:
            while True:
                try:
                    async with self._connect() as client, contextlib.aclosing(client.follow(SNAPSHOT_COLUMNS)) as items:
                        self.client = client
                        async for node, message in items:
                            self._take(node, message)
                except TrainctlError as error:
                    self._take("", Connection("silent", self._clock.monotonic(), str(error)))
                finally:
                    self.client = None
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def attend(self, read_only: Callable[[], bool]) -> None:
        """Say every few seconds that somebody is here, and learn who else is; it ends by being cancelled."""
        viewer = uuid.uuid4().hex
        while True:
            client = self.client
            if client is not None:
                with contextlib.suppress(TrainctlError):
                    reply = await client.lead.ask(AttendRequest, viewer, client.by[:64], read_only=read_only())
                    self.live = msgspec.structs.replace(self.live, viewers=reply.viewers)
            await asyncio.sleep(ATTEND_SECONDS if client is not None else RETRY_SECONDS)

    def _take(self, node: str, message: Incoming) -> None:
        """Take a snapshot in at once, and any other message soon, with those that come by then."""
        self._waiting.append((node, message, self._clock.monotonic()))
        if isinstance(message, Snapshot):
            self._take_waiting()
            self._arrived()
        elif len(self._waiting) >= MAX_WAITING:
            self._take_waiting()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TOGETHER_SECONDS, self._take_waiting)

    async def refine(self) -> None:
        """Fetch the last steps one by one where the state has them only in buckets."""
        self._take_waiting()
        run = self.live.run
        coarse = any(window.bucket_steps > 1 for (_, rank), window in self.live.recent.items() if rank is not None)
        if run is None or not coarse or self.client is None:
            return
        with contextlib.suppress(TrainctlError):
            first = max(run.step - _HISTORY_STEPS + 1, 0)
            metrics = tuple(dict.fromkeys((*_HISTORY_METRICS, run.rate_metric)))
            history = await self.client.lead.ask(
                HistoryRequest, run.run, metrics, first_step=first, columns=_HISTORY_STEPS
            )
            self.live = reducer.apply_history(self.live, run.run, history)


LOG_POLL_SECONDS = 1.0
LOG_RETRY_SECONDS = 2.0


class LogFeed:
    """The tail read so far. `source` gives what to ask, or None; `arrived` is called when a rank is first known."""

    def __init__(self, source: Callable[[], Source | None], clock: Clock, arrived: Callable[[], None]) -> None:
        self._source, self._clock, self._arrived = source, clock, arrived
        self.tail = LogTail()

    async def keep_up(self, run: str, ranks: Mapping[int, str]) -> None:
        """Read the logs of the ranks, given with their nodes, until it is cancelled."""
        if self.tail.run != run:
            self.tail = LogTail(run)
        async with asyncio.TaskGroup() as readers:
            for rank, node in ranks.items():
                readers.create_task(self._read(run, rank, node))

    async def _read(self, run: str, rank: int, node: str) -> None:
        while True:
            known = rank in self.tail.files or rank in self.tail.problems
            pause = await self._read_once(run, rank, node)
            if not known:
                self._arrived()
            await asyncio.sleep(pause)

    async def _read_once(self, run: str, rank: int, node: str) -> float:
        """Take in the next part of a log, and return the seconds to wait before the one after it."""
        source = self._source()
        if source is None:
            self.tail = failed(self.tail, rank, "no agent answers yet")
            return LOG_RETRY_SECONDS
        try:
            part = await source.log(node, run, rank, self.tail.next_offset(rank), PART_BYTES)
        except TrainctlError as error:
            self.tail = failed(self.tail, rank, str(error))
            return LOG_RETRY_SECONDS
        self.tail = take(self.tail, node, rank, part, PART_BYTES, self._clock.wall())
        return 0.0 if self.tail.files[rank].behind_bytes else LOG_POLL_SECONDS
