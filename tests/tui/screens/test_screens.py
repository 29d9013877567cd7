"""The screens driven by keys: runs, events, help, palette, pictures, themes, and a lost agent."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tui.support.driving import body, driven, hint, until
from tests.tui.support.recorded import (
    BRANCHES,
    CLOCK,
    CONNECTED,
    RUNS,
    Recorded,
    app_of,
    committed,
    run_view,
    snapshot,
    source_of,
)  # fmt: skip
from textual._context import visible_screen_stack
from textual.pilot import Pilot
from textual.screen import ModalScreen
from textual.widgets import Input

from trainctl.protocol import messages as m
from trainctl.protocol.errors import VersionError
from trainctl.protocol.messages import verbs
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.app.command_palette import PaletteProvider
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.dialogs.help import HelpScreen
from trainctl.tui.dialogs.start_run import BranchDialog
from trainctl.tui.screens.events import EventsScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.screens.runs import RunsScreen
from trainctl.tui.screens.runs_view import as_tree, row_of
from trainctl.tui.text.glyphs import ASCII
from trainctl.tui.text.styled_line import Piece, crop, line
from trainctl.tui.widgets.line_view import Lines, changed_spans


async def test_without_a_run_it_opens_on_the_runs() -> None:
    source = Recorded([CONNECTED, snapshot(None)], runs=RUNS[1:])

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert isinstance(app.screen, RunsScreen)
        await until(pilot, lambda: "sft-1b" in body(app))
        assert "18,240/60,000" in body(app)
        assert "n/a" in body(app)
        await pilot.press("down", "s")
        assert isinstance(app.screen, CommandDialog)
        assert app.screen.values() == {"resume": RUNS[2].run}
        await pilot.press("enter")
        await until(pilot, lambda: bool(source.commands))

    await driven(source, play)
    assert source.commands[0][:2] == ("start-run", {"resume": RUNS[2].run})


async def test_another_run_is_opened_from_the_record_and_1_comes_back() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("0")
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        await until(pilot, lambda: screen.runs is not None)
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
        assert "FROM RECORD" in body(app)
        assert "STOPPED" in body(app)
        await pilot.press("1")
        assert "118/150" in body(app)
        await pilot.press("0", "down", "down", "enter")
        await until(pilot, lambda: bool(app._notifications))
        assert isinstance(app.screen, RunsScreen)

    await driven(source_of(1), play)


async def test_events_are_listed_filtered_and_unfiltered() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("4")
        assert isinstance(app.screen, EventsScreen)
        await until(pilot, lambda: "of 6" in body(app))
        await pilot.press("slash", *"anna", "enter")
        assert "of 2" in body(app)
        assert "1.8e-4→1.62e-4 scaled" in body(app)
        assert "checkpoint" not in body(app)
        await pilot.press("slash", "escape")
        assert "of 6" in body(app)
        await pilot.press("down", "end", "home", "pagedown", "pageup", "1")
        assert isinstance(app.screen, OverviewScreen)

    await driven(source_of(1), play)


async def test_help_lists_the_live_bindings() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        shown = "\n".join(app.screen.query_one("#dialog-text", Lines).shown)
        for binding in TrainctlApp.BINDINGS:
            assert getattr(binding, "tooltip", "") in shown
        assert "next node" in shown
        await pilot.press("question_mark")
        await pilot.press("0", "question_mark")
        assert "next run" in "\n".join(app.screen.query_one("#dialog-text", Lines).shown)

    await driven(source_of(1), play)


async def test_the_palette_has_every_verb() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        provider = PaletteProvider(app.screen)
        everything = [hit.display async for hit in provider.discover()]
        assert everything[: len(verbs.VERBS)] == list(verbs.VERBS)
        assert {*everything} >= {
            "overview",
            "events",
            "runs",
            "help",
            "theme contrast",
            "picture",
            "detach",
            "read-only",
        }
        hits = [hit async for hit in provider.search("evaluate")]
        assert any(hit.help == verbs.VERBS["evaluate"].summary for hit in hits)  # type: ignore[union-attr]
        await pilot.press("ctrl+p", *"evaluate")
        await pilot.pause(0.3)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        assert app.screen.form.verb == "evaluate"  # type: ignore[attr-defined]
        await pilot.press("escape", "ctrl+p", *"every event")
        await until(pilot, lambda: len(app.screen.query("OptionList")) == 1)
        await pilot.pause(0.3)
        await pilot.press("escape", "escape")
        await app.run_action("read_only")
        assert "READ-ONLY" in body(app)

    await driven(source_of(1), play)


async def test_repaints_wait_for_the_tick_however_many_messages_come() -> None:
    source = source_of(1)
    view = run_view(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        painted = 0
        original = app.paint

        def counting() -> None:
            nonlocal painted
            painted += 1
            original()

        app.paint = counting  # type: ignore[method-assign]
        for seq in range(1, 31):
            source.more.put_nowait(committed(view, 118 + seq, seq=seq))
        await until(pilot, lambda: app.live.seq == 30)
        assert painted <= 1

    await driven(source, play)


async def test_an_agent_of_another_version_is_named_and_tried_again() -> None:
    class Foreign(Recorded):
        tries = 0

        async def __aenter__(self) -> "Foreign":
            self.tries += 1
            raise VersionError("tcp://127.0.0.1:7474: protocol version 2 is not supported; this program uses 1")

    source = Foreign([])

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await until(pilot, lambda: "this program uses 1" in body(app))
        await until(pilot, lambda: source.tries > 1)

    await driven(source, play)


async def test_the_screen_says_when_it_is_too_small_and_recovers() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.resize_terminal(50, 12)
        await until(pilot, lambda: "50x12 is too small" in body(app))
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: "TREND" in body(app))

    await driven(source_of(4), play)


async def test_a_picture_is_saved_and_a_bad_folder_is_said(tmp_path: Path) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("S")
        saved = tmp_path / "trainctl-20261120-143105.svg"
        await until(pilot, saved.exists)
        assert "stdlib" in saved.read_text()
        app._pictures = tmp_path / "none"
        await pilot.press("S")
        await until(pilot, lambda: any("can't write" in str(note.message) for note in app._notifications))

    await driven(source_of(1), play, pictures=tmp_path)


async def test_a_key_at_the_bottom_can_be_clicked() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.click("#keys", offset=(hint(app).index("b batch"), 0))
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))

    await driven(source_of(1), play)


ASCII_WAYS = (
    ("b",),
    ("s",),
    ("u",),
    ("y",),
    ("question_mark",),
    ("ctrl+p",),
    ("0",),
    ("2",),
    ("a",),
    ("4",),
    ("enter",),
)
NO_SIGN = ("? help", "?+-", " ?  this", "copy what?", "undo which change?")


async def test_ascii_screens_have_no_other_character() -> None:
    """And every row is as wide as the screen, and no sign is a `?` but the key's."""

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await until(pilot, lambda: "forge" in body(app))
        for keys in ((), *ASCII_WAYS):
            await pilot.press(*keys)
            await pilot.pause()
            rows = screen_rows(app)
            assert all(row.isascii() and len(row) == 80 for row in rows), (keys, rows)
            said = "\n".join(rows)
            for known in NO_SIGN:
                said = said.replace(known, "")
            assert "?" not in said, (keys, said)
            if isinstance(app.screen, ModalScreen):
                await pilot.press("escape")

    await driven(source_of(4), play, glyphs=ASCII)


async def test_what_ascii_has_two_signs_for_moves_nothing_out_of_a_row() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        for keys in ((), ("4",)):
            await pilot.press(*keys)
            await until(pilot, lambda: any(" 4->8 " in row for row in screen_rows(app)))
            row = next(row for row in screen_rows(app) if " 4->8 " in row)
            assert row.split()[-1].isdigit(), row
        assert "enter details" in hint(app)

    await driven(source_of(4), play, glyphs=ASCII)


def screen_rows(app: TrainctlApp) -> list[str]:
    """What the terminal is sent, row by row."""
    visible_screen_stack.set(app._background_screens)  # what is behind a dialog; the compositor says so as it draws
    return [strip.text for strip in app.screen._compositor.render_strips()]


async def test_a_message_takes_no_more_than_the_row_above_the_keys() -> None:
    app = app_of(source_of(4))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, lambda: "14:31" in body(app))
        newest = next(row for row in body(app).splitlines() if row.startswith("14:31"))
        await pilot.press("w")
        await until(pilot, lambda: any("no open alerts" in row for row in screen_rows(app)))
        rows = screen_rows(app)
        assert "no open alerts" in rows[22]
        assert newest in rows
        told = app.screen.query_one("Toast").region
        assert told.height == 1
        assert told.right >= 78
        assert told.width < 24


def test_only_the_cells_that_differ_are_painted() -> None:
    assert changed_spans(line("step 118/150"), line("step 119/150")) == [(7, 1)]
    assert changed_spans(line("same"), line("same")) == []
    assert changed_spans(line("ab"), line("abcd")) == [(0, 4)]
    assert changed_spans(line("a漢b"), line("a漢c")) == [(0, 4)]
    apart = ["x" + " " * 30 + tail for tail in ("ab", "ac")]
    assert changed_spans(line(apart[0]), line("y" + apart[1][1:])) == [(0, 1), (32, 1)]
    assert changed_spans(line(Piece("a ", "dim")), line(Piece("a", "dim"), Piece(" ", "text"))) == []


PIECES = st.lists(
    st.builds(Piece, st.text("ab ", max_size=9), st.sampled_from(["text", "dim"]), st.sampled_from(["", "app.help"]))
)


@given(PIECES, PIECES)
@settings(max_examples=200, deadline=None)
def test_what_is_not_painted_is_the_same_in_both(old: list[Piece], new: list[Piece]) -> None:
    def cells(pieces: list[Piece]) -> list[tuple[str, str, str]]:
        return [(char, piece.role if char != " " else "", piece.action) for piece in pieces for char in piece.text]

    size = min(len(cells(old)), len(cells(new)))
    before, after = crop(old, size), crop(new, size)
    spans = changed_spans(before, after)
    painted = {index for start, count in spans for index in range(start, start + count)}
    pairs = list(zip(cells(list(before)), cells(list(after)), strict=True))
    assert {index for index, (a, b) in enumerate(pairs) if a != b} <= painted
    assert all(pairs[edge][0] != pairs[edge][1] for start, count in spans for edge in (start, start + count - 1))


async def test_a_click_on_a_row_opens_its_node() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        row = next(at for at, text in enumerate(app.screen.query_one("#body", Lines).shown) if text.startswith("NODE"))
        await pilot.click("#body", offset=(3, row + 2))
        await until(pilot, lambda: app.screen.name == "node")
        assert app.selected == 1

    await driven(source_of(4), play)


@pytest.mark.parametrize("gone", ["#body", "#keys", "#filter-note"])
async def test_a_screen_that_is_being_taken_down_is_not_painted(gone: str) -> None:
    """Its children go one by one, and a repaint can come between two of them."""

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        before = app.screen.paints
        parts = app._painting()
        next(parts)
        await app.screen.query_one(gone).remove()
        app.paint()
        assert len([*parts]) >= 1
        assert app.screen.paints == before

    await driven(source_of(1), play)


async def test_a_branch_is_started_from_a_checkpoint_with_settings() -> None:
    source = Recorded([CONNECTED, snapshot(None)], runs=RUNS[1:])

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await until(pilot, lambda: "sft-1b" in body(app))
        await pilot.press("B")
        screen = app.screen
        assert isinstance(screen, BranchDialog)
        screen.query_one("#field-step", Input).value = "0"
        await pilot.press("enter")
        assert not source.commands, "no step of a checkpoint"
        screen.query_one("#field-step", Input).value = "9000"
        screen.query_one("#field-settings", Input).value = "optimizer.learning_rate=1e-5 run.name='a b'"
        await pilot.press("enter")
        await until(pilot, lambda: bool(source.commands))

    await driven(source, play)
    overrides = {"optimizer.learning_rate": "1e-5", "run.name": "a b"}
    assert source.commands[0][:2] == ("start-run", {"branch": f"{RUNS[1].run}@9000", "overrides": overrides})


def test_branches_stand_below_their_parents_in_the_order_of_the_newest() -> None:
    shown = [(row.run.name, row.depth) for row in as_tree([row_of(run, CLOCK) for run in BRANCHES])]
    assert shown == [("sft-1b", 0), ("sft-1b-low", 1), ("sft-1b-warm", 2), ("sft-2", 0), ("tiny", 0)]
    around = [msgspec.structs.replace(one, branch=m.BranchPoint(other.run, 1))
              for one, other in ((BRANCHES[0], BRANCHES[1]), (BRANCHES[1], BRANCHES[0]))]  # fmt: skip
    assert len(as_tree([row_of(run, CLOCK) for run in around])) == 2, "a damaged record ends no screen"
