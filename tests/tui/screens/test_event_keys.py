"""The keys that Events offers: its own first, and undo where there is something to undo."""

import pytest
from tests.tui.support.driving import body, driven, hint, until
from tests.tui.support.recorded import source_of
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.commands import undo
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.screens import events_table
from trainctl.tui.screens.events import EventsScreen
from trainctl.tui.text import styled_line as ln


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40)])
async def test_events_offers_undo_where_the_chosen_event_has_an_inverse(size: tuple[int, int]) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("4")
        screen = app.screen
        assert isinstance(screen, EventsScreen)
        await until(pilot, lambda: "of 6" in body(app))
        for number in range(6):
            await pilot.press("home", *["down"] * number)
            event = screen.chosen
            assert event is not None
            can = isinstance(screen.undoing(event), undo.Inverse)
            assert can == (event.verb in ("set-lr", "resize-batch"))
            await until(pilot, lambda can=can: ("⏎ details u undo" in hint(app)) == can)  # type: ignore[misc]
            rows = body(app).splitlines()
            assert [row for row in rows if "u undo" in row] == ([rows[3 + number]] if can else [])
            assert hint(app).index("⏎ details") < hint(app).index("b batch")

    await driven(source_of(4), play, size=size)


async def test_undo_on_a_row_is_clicked() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("4")
        await until(pilot, lambda: "of 6" in body(app))
        await pilot.press("down", "down", "down")
        await until(pilot, lambda: "u undo" in body(app))
        row = next(at for at, text in enumerate(body(app).splitlines()) if "u undo" in text)
        await pilot.click("#body", offset=(body(app).splitlines()[row].index("u undo"), row))
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))

    await driven(source_of(4), play)


def test_a_row_without_room_keeps_its_text() -> None:
    row = ln.line(ln.Piece("12:01 anna resize-batch studio 4 → 8", "cursor"))
    assert events_table.with_key(row, "u undo", "app.undo") == row
