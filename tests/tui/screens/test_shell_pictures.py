"""Pictures of the shell: the themes, the `:` line's prediction, dialogs with their predictions, the palette."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.tui.support.driving import until
from tests.tui.support.pictures import Compare, Typed, settled, still
from tests.tui.support.recorded import Recorded, app_of, source_of
from textual.pilot import Pilot

from trainctl.protocol import messages as m


def seen_by_two(theme: str = "night") -> tuple[Any, Recorded]:
    source = source_of(4)
    source.viewers = (m.Viewer(by="anna", since_at=0.0), m.Viewer(by="cron", since_at=1.0, read_only=True))
    app = app_of(source)
    app.theme = theme
    return app, source


def attended(keys: tuple[str, ...] = ()) -> Callable[[Pilot[Any]], Any]:
    """Others are known to be attached, then the keys."""

    async def play(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: bool(pilot.app.live.viewers))  # type: ignore[attr-defined]
        await still(keys)(pilot)

    return play


@pytest.mark.parametrize("theme", ["day", "contrast", "terminal"])
def test_overview_by_theme(snap_compare: Compare, theme: str) -> None:
    app, _ = seen_by_two(theme)
    assert snap_compare(app, terminal_size=(120, 40), run_before=attended())


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_prediction_of_the_command_line(snap_compare: Compare, size: tuple[int, int]) -> None:
    app, _ = seen_by_two()
    keys = ("colon", Typed("rebalance studio=17 mbp=8 forge=39"))
    assert snap_compare(app, terminal_size=size, run_before=attended(keys))


@pytest.mark.parametrize(
    ("verb", "keys"),
    [("resize-batch", ("4",)), ("set-global-batch", ("1", "2", "8")), ("drain", ()), ("evaluate", ()), ("promote", ())],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_dialog_with_its_prediction(snap_compare: Compare, verb: str, keys: tuple[str, ...]) -> None:
    app = app_of(source_of(4))

    async def play(pilot: Pilot[Any]) -> None:
        await settled(pilot)
        app.selected = 2
        app.open_dialog(verb)
        await still(keys)(pilot)

    assert snap_compare(app, terminal_size=(80, 24), run_before=play)


def test_dialog_in_the_terminal_s_own_colours(snap_compare: Compare) -> None:
    """What is under it stays in sight: half transparent there would be wholly blank."""
    app, _ = seen_by_two("terminal")
    assert snap_compare(app, terminal_size=(120, 40), run_before=attended(("l",)))


def test_dialog_read_only(snap_compare: Compare) -> None:
    assert snap_compare(app_of(source_of(4), read_only=True), terminal_size=(80, 24), run_before=still(("l",)))
