"""Whom the screens follow: one of several leads or live runs, and another one when that is asked for."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from tests.tui.support.recorded import Recorded, committed, run_view, snapshot
from tests.tui.support.scripted import Scripted, scripted
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.errors import RefusedError
from trainctl.tui.state.live_feed import LiveFeed
from trainctl.tui.state.source import ClusterSource
from trainctl.tui.state.view_state import Clock, ViewState

RUN: m.RunView = examples.EXAMPLES["published by an agent"]["run-view"]
ROW: m.RunSummary = examples.EXAMPLES["agent to client"]["runs"].runs[0]


def leading(run: str, node: str, term: int, started_at: float, at: Callable[[], Scripted], **fields: Any) -> Any:
    """Return how an agent answers that leads a run."""
    view = msgspec.structs.replace(RUN, run=run, lead=node, state="running", generation=m.Generation(term, 1))
    row = msgspec.structs.replace(ROW, run=run, lead=node, state="running", started_at=started_at, kind="hosted")

    def answer(request: m.ClientRequest) -> list[m.AgentReply | bytes]:
        if isinstance(request, m.RunsRequest):
            return [m.Runs(rid="", runs=(row,))]
        own = msgspec.structs.replace(at().snapshot().node, node=node)
        return [at().snapshot(node=own, run=view, **{name: make() for name, make in fields.items()})]

    return answer


async def test_another_lead_s_run_is_listed_and_followed_only_when_it_is_asked_for() -> None:
    with (
        scripted(leading("newer", "mbp", 7, 20.0, lambda: other)) as other,
        scripted(
            leading(
                "older", "studio", 3, 10.0, lambda: first,
                peers=lambda: (m.PeerView("mbp", other.address, other.live_address, "connected", 0.0),),
            )
        ) as first,
    ):  # fmt: skip
        source, followed, met = ClusterSource(first.address, by="anna"), list[str](), False
        async with asyncio.timeout(HANG_SECONDS), source:
            async for node, item in source.follow(0):
                if isinstance(item, m.Snapshot):
                    followed.append(node)
                    assert item.run is not None and item.run.run == {"studio": "older", "mbp": "newer"}[node]
                    if node == "mbp":
                        break
                elif isinstance(item, m.NodeView) and node == "mbp" and not met:
                    met = True
                    assert [row.run for row in (await source.runs()).runs] == ["newer", "older"]
                    assert not await source.follow_run("older")
                    assert not await source.follow_run("unheard-of")
                    assert await source.follow_run("newer")
            assert source.address == other.address
        assert followed == ["studio", "mbp"]


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
    """Check that all that came has been taken in, each under the next number."""
    for message in messages:
        seq = feed.live.seq + 1
        source.more.put_nowait(msgspec.structs.replace(message, boot=feed.live.boot, seq=seq))
        while feed.live.seq != seq:
            await asyncio.sleep(0)


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
