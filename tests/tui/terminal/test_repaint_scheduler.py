"""Tests of what is shown when: all messages of a moment taken in at once, repaints in parts, and keys before the next
part."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tui.support.driving import driven, until
from tests.tui.support.recorded import BOOT, CONNECTED, committed, host, rank_step, run_view, snapshot, source_of
from tests.waiting import HANG_SECONDS
from textual import events as textual_events
from textual.pilot import Pilot

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.state.live_feed import LiveFeed
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.terminal.repaint_scheduler import SLOWEST_SECONDS, RepaintThrottle

VIEW = run_view(4, step=18_240, steps=60_000)
NODES = [rank.node for rank in VIEW.ranks]


def message(kind: str, step: int, rank: int, seq: int) -> tuple[str, md.Incoming]:
    """Return a message of a kind, and the node whose agent says it."""
    node = NODES[rank]
    match kind:
        case "step":
            return NODES[0], committed(VIEW, VIEW.step + step, seq=seq)
        case "rank":
            return NODES[0], rank_step(VIEW, VIEW.step + step, rank, seq=seq)
        case "host":
            return node, host(node, seq=seq)
        case "beat":
            return node, m.Heartbeat(
                node=node, at=1.0, step_age_seconds=None, loop_lag_seconds=0.01, boot=BOOT, seq=seq
            )
        case "alerts":
            return node, m.Alerts(node=node, boot=BOOT, seq=seq)
        case "snapshot":
            return NODES[0], msgspec.structs.replace(snapshot(VIEW), series=())
        case _:
            return node, Connection("silent", float(step), "gone")


KINDS = ("step", "rank", "rank", "rank", "host", "beat", "alerts", "silent", "snapshot")
drawn = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 6), st.integers(0, 3)), max_size=30)


def known(state: md.ViewState) -> dict[str, object]:
    """All of a state, to compare."""
    made = msgspec.structs.asdict(state)
    for name in ("windows", "recent"):
        windows = made[name].items()
        made[name] = {key: [*map(list, (window.first, window.total, window.count))] for key, window in windows}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in made.items()}


@given(drawn, st.lists(st.integers(1, 20), max_size=8))
@settings(deadline=None, max_examples=15)
def test_messages_taken_at_once_make_what_they_make_one_by_one(
    made: list[tuple[str, int, int]], sizes: list[int]
) -> None:
    told = [(*message(*item, seq), float(seq)) for seq, item in enumerate([("snapshot", 1, 0), *made], 1)]
    alone, together, left = md.ViewState(), md.ViewState(), list(told)
    for size in [*sizes, len(told)]:
        part, left = left[:size], left[size:]
        before, seen = together, known(together)
        for item in part:
            alone = reducer.take(alone, *item)
        together = reducer.take_all(before, part)
        assert known(before) == seen, "what somebody holds is never changed"
        assert known(together) == known(alone)
    for name in ("ranks", "windows", "agents"):
        with pytest.raises(TypeError):
            getattr(together, name)["new"] = None


class Talkative:
    """A source that says many things at once."""

    def __init__(self, items: list[tuple[str, Any]]) -> None:
        self.items = items

    async def __aenter__(self) -> "Talkative":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def follow(self, columns: int) -> AsyncGenerator[tuple[str, Any], None]:
        for item in self.items:
            yield item
        await asyncio.Event().wait()


async def test_what_comes_at_once_is_taken_in_together_and_a_snapshot_before_it() -> None:
    said = [message("rank", step, 0, step) for step in range(1, 400)]
    arrived: list[md.ViewState] = []
    told: list[object] = []
    source: Any = Talkative([(NODES[0], CONNECTED), message("snapshot", 1, 0, 1), *said])
    feed = LiveFeed(lambda: source, Clock(), lambda: arrived.append(feed.live), told.append, ViewState())
    following = asyncio.create_task(feed.keep_up())
    async with asyncio.timeout(HANG_SECONDS):
        while len(told) < 400:
            await asyncio.sleep(0)
    assert arrived[0].run == VIEW and not arrived[0].parts[0][-1].step > VIEW.step
    assert feed.live.parts[0][-1].step == VIEW.step + 399
    assert told[-1] is said[-1][1]
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following


def test_the_pause_between_repaints_follows_their_cost() -> None:
    throttle = RepaintThrottle(0.5)
    now = cpu = 0.0
    for _ in range(20):
        now, cpu = now + throttle.seconds, cpu + 0.2 * throttle.seconds
        throttle.after(cpu, now)
    assert throttle.seconds == SLOWEST_SECONDS
    for _ in range(20):
        now += throttle.seconds
        throttle.after(cpu, now)
    assert throttle.seconds == 0.5


@given(st.lists(st.tuples(st.floats(0.001, 1.5), st.booleans()), max_size=60))
def test_never_more_than_two_repaints_a_second_nor_later_than_one(gaps: list[tuple[float, bool]]) -> None:
    throttle, now, painted = RepaintThrottle(0.5), 0.0, [0.0]
    throttle.begun(0.0)
    waiting: list[float] = []
    for gap, prompt in [*gaps, (5.0, True)]:
        while throttle.due <= now + gap:
            painted.append(throttle.due)
            assert all(painted[-1] - at < 1.0 for at in waiting)
            waiting = []
            throttle.begun(painted[-1])
        now += gap
        waiting.append(now)
        throttle.told(now, prompt=prompt)
    assert all(0.499 < after - before < 1.2001 for before, after in itertools.pairwise(painted))


async def test_a_key_that_comes_during_a_repaint_is_handled_and_shown_before_its_next_part() -> None:
    order: list[str] = []

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        screen: Any = app.screen
        await pilot.press("colon")
        whole, field = screen.painting, screen.query_one("#command")
        app._repainting._wait = lambda: None  # type: ignore[method-assign]  no other than the one begun here

        def painting() -> Iterator[None]:
            for number, _ in enumerate(whole()):
                order.append(f"part {number}")
                if number == 1:
                    app.post_message(textual_events.Key("x", "x"))
                yield
            order.append("end")

        screen.painting = painting
        screen.watch(field, "value", lambda value: order.append(f"value {value}"), init=False)
        app._repainting._begin()
        await until(pilot, lambda: "end" in order and "value x" in order)

    await driven(source_of(4), play, size=(120, 40))
    assert order[:2] == ["part 0", "part 1"] and order.index("value x") < order.index("end"), order


async def test_an_error_in_a_repaint_ends_the_program_and_is_reported() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        def parts() -> Iterator[None]:
            yield
            raise ZeroDivisionError

        app._repainting._parts = parts
        app._repainting._begin()
        await until(pilot, lambda: app.return_code == 1)

    with pytest.raises(ZeroDivisionError):
        await driven(source_of(1), play)


async def test_what_is_painted_during_a_repaint_in_parts_stays() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        screen: Any = app.screen
        parts = screen.painting()
        next(parts)
        screen.action_choose(1)
        newer = screen.query_one("#body").shown
        assert list(parts) == [] and screen.query_one("#body").shown == newer
        for _ in screen.painting():
            pass
        assert screen.query_one("#body").shown == newer, "in parts or at once, it is the same"

    await driven(source_of(4), play)
