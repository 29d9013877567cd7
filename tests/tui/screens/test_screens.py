"""Promises of all screens: help, palette, repaints, copies, pictures, clicks, and plain ASCII."""

from pathlib import Path

import pytest
from tests.tui.support.driving import body, dialog_text, hint, running, until
from tests.tui.support.pictures import screen_strips
from tests.tui.support.recorded import Recorded, committed, run_view, source_of
from textual.command import CommandList
from textual.screen import ModalScreen

from trainctl.protocol.errors import VersionError
from trainctl.protocol.messages import verbs
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.app.keymap import PaletteProvider
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.dialogs.help import HelpScreen
from trainctl.tui.dialogs.popup import Chooser


def rows_of(app: TrainctlApp) -> list[str]:
    return [strip.text for strip in screen_strips(app)]


async def test_help_lists_the_live_bindings_and_keys_at_the_bottom_are_clicked() -> None:
    async with running(source_of(1)) as (pilot, app):
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        assert all(getattr(binding, "tooltip", "") in dialog_text(app) for binding in TrainctlApp.BINDINGS)
        assert "next node" in dialog_text(app)
        await pilot.press("question_mark", "0", "question_mark")
        assert "next run" in dialog_text(app)
        await pilot.press("escape", "1")
        await pilot.click("#keys", offset=(hint(app).index("b batch"), 0))
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))


async def test_the_palette_has_every_verb() -> None:
    async with running(source_of(1)) as (pilot, app):
        everything = [hit.display async for hit in PaletteProvider(app.screen).discover()]
        assert everything[: len(verbs.VERBS)] == list(verbs.VERBS)
        assert {*everything} >= {"overview", "events", "help", "theme contrast", "picture", "detach", "read-only"}
        await pilot.press("ctrl+p", *"evaluate")
        await until(pilot, lambda: app.screen.query_one(CommandList).option_count == 1)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        assert app.screen.form.verb == "evaluate"  # type: ignore[attr-defined]
        await pilot.press("escape")
        await app.run_action("read_only")
        assert "READ-ONLY" in body(app)


async def test_repaints_wait_for_the_tick_however_many_messages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(1)

    async with running(source) as (pilot, app):
        paints: list[int] = []
        paint = app.paint
        monkeypatch.setattr(app, "paint", lambda: (paints.append(app.live.seq), paint()))
        for seq in range(1, 31):
            source.more.put_nowait(committed(run_view(1), 118 + seq, seq=seq))
        await until(pilot, lambda: app.live.seq == 30)
        assert len(paints) <= 1


async def test_ascii_screens_have_no_other_character_and_no_row_is_wider_or_narrower() -> None:
    """No sign is a `?` but the key's, and none moves anything out of its row."""
    known = ("? help", "?+-", " ?  this", "copy what?", "undo which change?")

    async with running(source_of(4), in_ascii=True) as (pilot, app):
        await until(pilot, lambda: "forge" in body(app))
        for key in ("", "b", "s", "u", "y", "question_mark", "ctrl+p", "0", "2", "a", "4", "enter"):
            await pilot.press(*[key] * bool(key))
            await pilot.pause()
            rows = rows_of(app)
            assert all(row.isascii() and len(row) == 80 for row in rows), (key, rows)
            shown = "\n".join(rows)
            for sign in known:
                shown = shown.replace(sign, "")
            assert "?" not in shown, (key, shown)
            if key in ("", "4"):
                await until(pilot, lambda: any(" 4>8 " in row for row in rows_of(app)))
                assert next(row for row in rows_of(app) if " 4>8 " in row).split()[-1].isdigit()
            if isinstance(app.screen, ModalScreen):
                await pilot.press("escape")


async def test_an_agent_of_another_version_is_named_and_tried_again() -> None:
    class Foreign(Recorded):
        tries = 0

        async def __aenter__(self) -> "Foreign":
            self.tries += 1
            raise VersionError("tcp://127.0.0.1:7474: protocol version 2 is not supported; this program uses 1")

    source = Foreign([])

    async with running(source) as (pilot, app):
        await until(pilot, lambda: "this program uses 1" in body(app))
        await until(pilot, lambda: source.tries > 1)


async def test_a_picture_is_saved_and_a_bad_folder_is_said(tmp_path: Path) -> None:
    async with running(source_of(1), pictures=tmp_path) as (pilot, app):
        await pilot.press("S")
        saved = tmp_path / "trainctl-20261120-143105.svg"
        await until(pilot, saved.exists)
        assert "stdlib" in saved.read_text()
        app._pictures = tmp_path / "none"
        await pilot.press("S")
        await until(pilot, lambda: any("can't write" in str(note.message) for note in app._notifications))


@pytest.mark.parametrize("gone", ["#body", "#keys", "#filter-note"])
async def test_a_screen_that_is_being_taken_down_is_not_painted(gone: str) -> None:
    """Its children go one by one, and a repaint can come between two of them."""

    async with running(source_of(1)) as (_pilot, app):
        before = app.screen.paints
        parts = app._painting()
        next(parts)
        await app.screen.query_one(gone).remove()
        app.paint()
        assert len([*parts]) >= 1
        assert app.screen.paints == before


async def test_y_copies_a_value_by_osc_52() -> None:
    copied: list[str] = []

    async with running(source_of(4)) as (pilot, app):
        app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        await pilot.press("down", "y")
        assert isinstance(app.screen, Chooser)
        assert "1 node        studio" in dialog_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: copied == ["studio"])
        await pilot.press("y", "2")
        await until(pilot, lambda: copied[1:] == ["tcp://127.0.0.1:7474"])
        assert any("copied address: tcp://" in str(item.message) for item in app._notifications)
        await pilot.press("4", "y", "2")
        await until(pilot, lambda: copied[2:] == ["mini slowed by 0.14 s in backward"])
        await pilot.press("enter", "y", "3")
        await until(pilot, lambda: copied[3:] == ["18240"])
        await pilot.press("0")
        await until(pilot, lambda: "stdlib" in body(app))
        await pilot.press("y", "1")
        await until(pilot, lambda: copied[4:] == ["stdlib-20261120-142900"])


async def test_escape_leaves_every_view() -> None:
    async with running(source_of(1)) as (pilot, app):
        for key in [*"02345670aDP", "2C"]:
            await pilot.press(*key)
            assert app.screen.name != "overview", key
            for _ in range(3):  # what narrows a view goes first; the calibration is left for its node
                await pilot.press("escape")
            assert app.screen.name == "overview", key
