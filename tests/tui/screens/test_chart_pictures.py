"""Pictures of the Charts screen and of its list, with the clock and the data held still."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.tui.support.driving import until
from tests.tui.support.recorded import Recorded, app_of, run_view, source_of, under_way
from textual.pilot import Pilot

from trainctl.tui.screens.charts import ChartsScreen
from trainctl.tui.text.glyphs import ASCII

Compare = Callable[..., bool]
SIZES = [(80, 24), (120, 40), (200, 60)]


def charted(*keys: str) -> Callable[[Pilot[Any]], Any]:
    """Opens the charts, presses keys, and waits until the record has answered for what is in view."""

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


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_charts(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(source_of(4)), terminal_size=size, run_before=charted())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_charts_with_log_crosshair_smoothing_and_tokens(snap_compare: Compare, size: tuple[int, int]) -> None:
    keys = ("z", "v", "f", "f", *["left"] * 20)
    assert snap_compare(app_of(source_of(1)), terminal_size=size, run_before=charted(*keys))


def test_charts_of_a_group_in_ascii(snap_compare: Compare) -> None:
    app = app_of(Recorded(under_way(run_view(3))), glyphs=ASCII)
    assert snap_compare(app, terminal_size=(80, 24), run_before=charted("z", "z", "f", "f", "f", "left", "left"))


def test_charts_without_colours(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app_of(source_of(4)), terminal_size=(120, 40), run_before=charted("f", "f", "f", "left"))


def test_a_run_laid_over_another(snap_compare: Compare) -> None:
    keys = ("v", "m", *"sft", "enter", "escape", "left", "left")
    assert snap_compare(app_of(source_of(1)), terminal_size=(120, 40), run_before=charted(*keys))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_list_of_metrics(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(app_of(source_of(4)), terminal_size=size, run_before=charted("m", "down", "down", "enter"))
