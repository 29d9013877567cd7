"""Two live runs on one agent: the one that is followed, and the one that was opened beside it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from tests.tui.support.recorded import Recorded, committed, run_view, snapshot

from trainctl.protocol import messages as m
from trainctl.protocol.errors import RefusedError
from trainctl.tui.state.live_feed import LiveFeed
from trainctl.tui.state.view_state import Clock, ViewState

HOSTED = run_view(3)
GUEST = msgspec.structs.replace(run_view(4, run="ppo-7"), step=7000, kind="guest")


class TwoRuns(Recorded):
    """An agent with a hosted run and a guest."""

    def snapshot(self, asked: m.SnapshotRequest) -> m.Snapshot:
        if asked.run != GUEST.run:
            raise RefusedError(f"no run {asked.run!r} here")
        return snapshot(GUEST)


@contextlib.asynccontextmanager
async def following(source: TwoRuns) -> AsyncIterator[LiveFeed]:
    came = asyncio.Event()
    feed = LiveFeed(lambda: source, Clock(), came.set, lambda _: None, ViewState())
    task = asyncio.create_task(feed.keep_up())
    await came.wait()
    yield feed
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def taken(feed: LiveFeed, source: TwoRuns, *messages: Any) -> None:
    """What came has been taken in, each under the next number."""
    for message in messages:
        source.more.put_nowait(msgspec.structs.replace(message, boot=feed.live.boot, seq=feed.live.seq + 1))
        while not source.more.empty() or not feed._waiting:
            await asyncio.sleep(0)
        feed.live  # noqa: B018  takes it in


def step(of: m.RunView, number: int) -> m.StepCommitted:
    return msgspec.structs.replace(committed(of, number), run=of.run)


async def test_a_live_run_that_is_opened_goes_on_beside_the_one_that_is_followed() -> None:
    source = TwoRuns([snapshot(HOSTED)])
    async with following(source) as feed:
        feed.show_beside(await feed.snapshot_of(GUEST.run))
        await taken(feed, source, step(GUEST, 7001), step(HOSTED, HOSTED.step + 1), step(GUEST, 7002))
        assert (feed.opened.run.run, feed.opened.run.step) == (GUEST.run, 7002)
        assert (feed.live.run.run, feed.live.run.step) == (HOSTED.run, HOSTED.step + 1)
        ended = msgspec.structs.replace(GUEST, state="finished", step=7002)
        await taken(feed, source, ended, step(GUEST, 7003))
        assert (feed.opened.active, feed.opened.run.step) == (False, 7002)
        feed.show_beside(None)
        assert feed.opened is None


async def test_an_opened_run_is_fetched_again_after_a_gap() -> None:
    async with following(TwoRuns([snapshot(HOSTED)])) as feed:
        feed.show_beside(snapshot(msgspec.structs.replace(GUEST, step=6000)))
        await feed.reopen()
        assert feed.opened.run.step == 7000
