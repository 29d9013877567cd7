"""The Charts screen driven by keys and mouse over a recorded agent: what it asks for, what it shows, what stays."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.tui.support.driving import body, burst, running, until
from tests.tui.support.pictures import Pictures, at_columns, screen_strips
from tests.tui.support.recorded import (
    CONNECTED,
    RUNS,
    Recorded,
    app_of,
    committed,
    rank_step,
    run_view,
    snapshot,
    source_of,
    under_way,
)
from textual import events
from textual.pilot import Pilot

from trainctl.protocol import messages as m
from trainctl.protocol.errors import UnreachableError
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.charts.plots import renamed
from trainctl.tui.charts.viewport import ALL_RANKS, Pick
from trainctl.tui.dialogs.chart_picker import ChartPicker
from trainctl.tui.screens.charts import ChartsScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.widgets.line_view import ChartArea, Lines


@asynccontextmanager
async def charted(
    source: Recorded, size: tuple[int, int] = (120, 40), **options: Any
) -> AsyncIterator[tuple[Pilot[int], TrainctlApp, ChartsScreen]]:
    """Run the program on the Charts screen once the record has answered."""
    async with running(source, size, **options) as (pilot, app):
        await pilot.press("3")
        screen = app.screen
        assert isinstance(screen, ChartsScreen)
        await until(pilot, lambda: bool(screen.data) or source.refuses)
        yield pilot, app, screen


def asked_of(source: Recorded, run: str) -> list[m.HistoryRequest]:
    return [ask for ask in source.asked if ask.run == run and "tokens_total" in ask.metrics]


async def test_each_zoom_asks_for_about_as_many_buckets_as_there_are_columns() -> None:
    source = source_of(4)

    async with charted(source) as (pilot, app, screen):
        run = screen.owner.shown.run
        assert run is not None
        await pilot.press("left", "plus", "plus", "plus")
        await until(pilot, lambda: asked_of(source, run.run)[-1].first_step > 1)
        await until(pilot, lambda: not screen._missing())
        fine = screen.data[run.run].fine
        assert fine is not None
        dots = 2 * screen._drawn.columns
        assert 80 <= screen._drawn.columns <= 120
        assert all(0.7 * dots <= ask.columns <= 1.3 * dots for ask in asked_of(source, run.run))
        assert fine.ask.columns == dots
        assert 0.2 * dots < len(fine.windows["loss", None]) <= dots
        count = len(asked_of(source, run.run))
        for _ in range(3):
            app.paint()
            await pilot.pause()
        assert len(asked_of(source, run.run)) == count, "what is answered isn't asked again"


async def test_keys_zoom_pan_cross_scale_smooth_and_go_back() -> None:
    async with charted(source_of(4)) as (pilot, app, screen):
        assert "all steps · live" in body(app)
        burst(app, "left", "plus", "plus", "v", "f", "z")  # as a slow line delivers them
        await until(pilot, lambda: screen.view.x == "tokens")
        assert screen.view.span is not None and screen.view.crosshair is not None
        assert "loss, eval loss, log, half-life" in body(app)
        assert "tokens  step 18,2" in body(app)
        assert "5,120 steps · paused" in body(app)
        burst(app, "left_square_bracket", "home")
        await until(pilot, lambda: abs((screen.view.last or 0) - 5120) < 1)
        await pilot.press("end")
        assert "live" in body(app)
        await pilot.press("escape", "escape")
        assert screen.view.span is None and screen.view.crosshair is None
        await pilot.press("z", "minus")
        assert screen.view.x == "time"
        assert re.search(r"^\s+(\w{3} )?\d\d:\d\d  .*\d\d:\d\d", body(app), re.M), "times of day under the charts"
        await pilot.press("tab", "k", "j", "enter")
        assert screen.view.alone and screen.view.focus == 1
        assert [place.chart for place in screen._drawn.places] == [1]
        await pilot.press("R", "R", "R", "R", "R", "1")
        assert len(screen.view.charts) == 1
        assert isinstance(app.screen, OverviewScreen)


async def test_the_mouse_points_zooms_where_it_is_and_drags() -> None:
    async with charted(source_of(4)) as (pilot, app, screen):
        area = screen.query_one(ChartArea)
        place = screen._drawn.places[1]
        at = (place.left + place.columns // 2, place.first_row + 3)
        await pilot.hover(area, offset=at)
        await until(pilot, lambda: screen.view.crosshair is not None)
        middle = screen.view.crosshair
        assert middle is not None and 9_000 < middle < 11_500
        await pilot.click(area, offset=at)
        assert screen.view.focus == 1
        area.post_message(ChartArea.Wheeled(-1, *at))
        await until(pilot, lambda: screen.view.span is not None)
        area.post_message(ChartArea.Wheeled(-1, *at))
        await until(pilot, lambda: (screen.view.span or 0) < 6000)
        first, last = screen.view.last - screen.view.span, screen.view.last  # type: ignore[operator]
        assert first < middle < last
        await pilot.mouse_down(area, offset=at)
        area.on_mouse_move(events.MouseMove(area, *at, 12, 0, 1, False, False, False, *at))
        await until(pilot, lambda: screen.view.last != last)
        assert screen.view.last < last  # type: ignore[operator]
        await pilot.mouse_up(area, offset=at)
        assert app.mouse_captured is None
        area.post_message(ChartArea.Wheeled(1, *at))
        area.post_message(ChartArea.Wheeled(1, *at))
        await until(pilot, lambda: screen.view.span is None)
        line = next(row for row, text in enumerate(area.shown) if "x: step" in text)
        await pilot.click(area, offset=(area.shown[line].index("z x:"), line))
        await until(pilot, lambda: screen.view.x == "tokens")


async def test_the_list_ticks_metrics_of_nodes_and_runs_by_keys_and_mouse() -> None:
    source = source_of(1)

    async with charted(source) as (pilot, app, screen):
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, ChartPicker))
        assert "[x] loss" in "\n".join(app.screen.query_one("#dialog-text", Lines).shown)
        await pilot.press(*"grad", "enter")
        assert Pick("grad_norm") in screen.view.chart.picks
        await pilot.press(*["backspace"] * 4, *"wait")
        await pilot.click("#dialog-text", offset=(4, 0))
        await until(pilot, lambda: Pick("wait_seconds", ALL_RANKS) in screen.view.chart.picks)
        await pilot.press(*["backspace"] * 4, "up", "space")
        assert Pick("loss") not in screen.view.chart.picks
        await pilot.press(*"sft", "enter", "escape")
        assert screen.view.runs == (RUNS[1].run,)
        await until(pilot, lambda: RUNS[1].run in screen.data)
        await until(pilot, lambda: "sft-1b" in body(app))
        assert asked_of(source, RUNS[1].run)[0].last_step == 18_240
        await pilot.press("z", "A")
        await until(pilot, lambda: isinstance(app.screen, ChartPicker))
        await pilot.press("escape")
        assert "empty: press m" in body(app)
        assert len(screen.view.charts) == 6
        await pilot.press("R")


async def test_live_values_are_appended_and_the_axis_stands_still() -> None:
    source = source_of(1)
    view = run_view(1)

    async with charted(source) as (pilot, app, screen):
        await pilot.press("f")
        for _ in range(2):  # drawing what came says how many columns there are: then it is asked for just so many
            app.paint()
            await pilot.pause()
            await until(pilot, lambda: not screen._missing() and not screen._under_way)
        await until(pilot, lambda: " 100 " in body(app))
        axis = [text for text in body(app).splitlines() if " 100 " in text][-1]
        count = len(source.asked)
        for seq in range(1, 11):
            source.more.put_nowait(committed(view, 118 + seq, seq=2 * seq - 1, loss=9.0 if seq == 7 else None))
            source.more.put_nowait(rank_step(view, 118 + seq, 0, seq=2 * seq))
        await until(pilot, lambda: app.live.seq == 20)
        app.paint()
        assert axis in body(app)
        await pilot.press("right")
        seen = []
        for _ in range(12):
            await pilot.press("left")
            seen.append("9.000" in body(app))
        assert any(seen)
        assert len(source.asked) == count, source.asked


class SlowRecord(Recorded):
    slow = False
    waiting = 0

    async def history(self, asked: m.HistoryRequest) -> m.History:
        if self.refuses:
            raise UnreachableError("no answer from tcp://127.0.0.1:7474 within 5 s")
        if self.slow:
            self.waiting += 1
            await asyncio.Event().wait()
        return await super().history(asked)


async def test_the_old_picture_stays_while_the_record_is_asked_and_where_it_fails() -> None:
    source = SlowRecord(source_of(4).messages)

    def dots(app: TrainctlApp) -> int:
        return sum("\u2801" <= char <= "\u28ff" for char in body(app))

    async with charted(source) as (pilot, app, _screen):
        source.slow = True
        await pilot.press("left", "plus", "plus")
        await until(pilot, lambda: source.waiting > 0)
        await pilot.pause(0.3)
        count = source.waiting
        assert dots(app) > 100
        app.paint()
        await pilot.pause(0.25)
        assert source.waiting == count, "an ask under way is not begun again"
        source.refuses = True
        await pilot.press("plus")
        await until(pilot, lambda: "no answer from" in body(app))
        assert dots(app) > 50


@pytest.mark.parametrize(("parent", "over"), [(RUNS[1].run, (RUNS[1].run,)), ("gone-20261001-120000", ())])
async def test_a_branch_lies_over_its_parent_where_that_is_known(parent: str, over: tuple[str, ...]) -> None:
    async with charted(source_of(branch=m.BranchPoint(parent, 100))) as (pilot, _app, screen):
        await until(pilot, lambda: not screen._missing() and not screen._under_way)
        assert screen.view.runs == over and not screen._problem


async def test_without_a_run_and_with_another_one_it_begins_again() -> None:
    source = Recorded([CONNECTED, snapshot(None)], runs=RUNS[1:])

    async with running(source) as (pilot, app):
        await pilot.press("3")
        await until(pilot, lambda: "no run yet" in body(app))
        await pilot.press("plus", "left", "v", "z", "f", "escape")
        source.more.put_nowait(snapshot(run_view(1)))
        await until(pilot, lambda: "loss, eval loss" in body(app))
        screen = app.screen
        assert isinstance(screen, ChartsScreen)
        assert screen.view.span is None


async def test_sizes_and_ascii_are_filled_without_another_character() -> None:
    async with charted(source_of(4), in_ascii=True) as (pilot, app, screen):
        await pilot.press("left", "f", "v", "m")
        await until(pilot, lambda: isinstance(app.screen, ChartPicker))
        rows = [strip.text for strip in screen_strips(app)]
        assert all(row.isascii() for row in rows), rows
        await pilot.press("escape")
        for size in ((60, 15), (50, 12), (200, 60), (400, 120), (80, 24)):
            await pilot.resize_terminal(*size)
            await until(pilot, lambda size=size: app.size == size)  # type: ignore[misc]
            await pilot.pause()
            assert len(screen.query_one(ChartArea).shown) in (1, size[1] - 1)


def test_runs_of_one_name_have_labels_that_differ() -> None:
    ids = "sft-20261126-174052-3b1c", "sft-20261126-174126-cf8b"
    views = {run: msgspec.structs.replace(run_view(1), run=run, name="sft") for run in ids}
    assert [renamed(view, views).name for view in views.values()] == ["3b1c", "cf8b"]
    assert renamed(views[ids[0]], {ids[0]: views[ids[0]]}).name == "sft"


# ---------------------------------------------------------------- pictures


def pictured(*keys: str) -> Callable[[Pilot[Any]], Awaitable[None]]:
    """Open the charts, press keys, and wait until the record has answered for what is in view."""

    async def play(pilot: Pilot[Any]) -> None:
        await pilot.pause()
        await pilot.press("3")
        screen = pilot.app.get_screen("charts")
        assert isinstance(screen, ChartsScreen)
        await until(pilot, lambda: bool(screen.data) and not screen._missing())
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        await until(pilot, lambda: not screen._missing())
        for widget in pilot.app.screen.query("Input"):
            widget.cursor_blink = False  # type: ignore[attr-defined]
        pilot.app.paint()  # type: ignore[attr-defined]
        await pilot.pause()

    return play


@at_columns(80, 120, 200)
async def test_charts(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(source_of(4)), columns, play=pictured())


@at_columns(80, 120)
async def test_charts_with_log_crosshair_smoothing_and_tokens(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(source_of(1)), columns, play=pictured("z", "v", "f", "f", *["left"] * 20))


async def test_charts_of_a_group_in_ascii(pictures: Pictures) -> None:
    app = app_of(Recorded(under_way(run_view(3))), in_ascii=True)
    await pictures.compare(app, 80, play=pictured("z", "z", "f", "f", "f", "left", "left"))


async def test_charts_without_colours(pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    await pictures.compare(app_of(source_of(4)), 120, play=pictured("f", "f", "f", "left"))


async def test_a_run_laid_over_another(pictures: Pictures) -> None:
    keys = ("v", "m", *"sft", "enter", "escape", "left", "left")
    await pictures.compare(app_of(source_of(1)), 120, play=pictured(*keys))


@at_columns(80, 120)
async def test_the_list_of_metrics(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(source_of(4)), columns, play=pictured("m", "down", "down", "enter"))
