"""What reads the logs that are on screen: one task a rank, by offset, once a second, and never all of it again."""

import asyncio
from collections.abc import Callable, Mapping

from trainctl.protocol.errors import TrainctlError
from trainctl.tui.state import merged_log as lt
from trainctl.tui.state.clock import Clock
from trainctl.tui.state.source import Source

POLL_SECONDS = 1.0
RETRY_SECONDS = 2.0


class LogFeed:
    """The tail read so far. `source` gives what to ask, or None; `arrived` is called when a rank is first known."""

    def __init__(self, source: Callable[[], Source | None], clock: Clock, arrived: Callable[[], None]) -> None:
        self._source, self._clock, self._arrived = source, clock, arrived
        self.tail = lt.LogTail()

    async def keep_up(self, run: str, ranks: Mapping[int, str]) -> None:
        """Reads the logs of the ranks, given with their nodes, until it is cancelled."""
        if self.tail.run != run:
            self.tail = lt.LogTail(run)
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
        """One part; gives the seconds to wait for the next."""
        source = self._source()
        if source is None:
            self.tail = lt.failed(self.tail, rank, "no agent answers yet")
            return RETRY_SECONDS
        try:
            part = await source.log(node, run, rank, self.tail.next_offset(rank), lt.PART_BYTES)
        except TrainctlError as error:
            self.tail = lt.failed(self.tail, rank, str(error))
            return RETRY_SECONDS
        self.tail = lt.take(self.tail, node, rank, part, lt.PART_BYTES, self._clock.wall())
        return 0.0 if self.tail.files[rank].behind_bytes else POLL_SECONDS
