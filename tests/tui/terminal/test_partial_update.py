"""What a change on the screen costs a terminal, and that it shows what Textual itself would have."""

from typing import Any

import msgspec
import pytest
from benchmarks.lib.pseudo_terminal import Screen
from rich.color import ColorSystem
from rich.style import Style
from tests.tui.support.driving import driven, until
from tests.tui.support.recorded import app_of, committed, host, rank_step, run_view, source_of
from textual.app import App
from textual.geometry import Region
from textual.pilot import Pilot
from textual.strip import Strip

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.terminal import partial_update, spans
from trainctl.tui.terminal.rhythm import SLOWEST_SECONDS, Rhythm
from trainctl.tui.text.glyphs import ASCII
from trainctl.tui.text.styled_line import line
from trainctl.tui.widgets.line_view import Lines


def test_a_style_is_told_by_what_differs() -> None:
    red, blue, bold = (spans.codes_of(Style.parse(text), ColorSystem.TRUECOLOR)
                       for text in ("#ff0000 on #000000", "#0000ff on #000000", "bold #0000ff on #000000"))  # fmt: skip
    assert spans.turn(red, red) == ""
    assert spans.turn(red, blue) == "\x1b[38;2;0;0;255m"
    assert spans.turn(blue, bold) == "\x1b[1m"
    assert spans.turn(bold, red) == "\x1b[0;38;2;255;0;0;48;2;0;0;0m"


async def test_partial_updates_show_what_the_whole_screen_does(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, str]] = []

    async def play(pilot: object, app: TrainctlApp) -> None:
        compositor = app.screen._compositor
        shown = Screen(80, 24)
        shown.feed(_whole(app))
        app.choose(1)
        app.screen.paint()  # type: ignore[attr-defined]
        app.screen.refresh()
        compositor._dirty_regions.update(region for region in (app.screen.region,))
        update = compositor.render_partial_update()
        assert update is not None
        ours = spans.SpanUpdate(update).render_segments(app.console)
        shown.feed(ours)
        again = Screen(80, 24)
        again.feed(_whole(app))
        assert shown.text == again.text
        written.append((ours, update.render_segments(app.console)))

    await driven(source_of(4), play)
    ours, theirs = written[0]
    assert len(ours) < 0.7 * len(theirs)


def _whole(app: App[int]) -> str:
    strips: list[Strip] = app.screen._compositor.render_strips()
    return "".join(f"\x1b[{row};1H{strip.text}" for row, strip in enumerate(strips, 1))


def test_the_pause_between_repaints_follows_their_cost() -> None:
    rhythm = Rhythm(0.5)
    now = cpu = 0.0
    for _ in range(20):
        now, cpu = now + rhythm.seconds, cpu + 0.2 * rhythm.seconds
        rhythm.after(cpu, now)
    assert rhythm.seconds == SLOWEST_SECONDS
    for _ in range(20):
        now += rhythm.seconds
        rhythm.after(cpu, now)
    assert rhythm.seconds == 0.5


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_lines_written_straight_are_what_textual_would_write(ascii_only: bool) -> None:
    told, view = 0, run_view(4, step=18_240, steps=60_000)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        nonlocal told
        screen: Any = app.screen
        for columns, rows in ((80, 24), (120, 40)):
            await pilot.resize_terminal(columns, rows)
            await until(pilot, lambda: screen.size.region not in screen._compositor._dirty_regions)
            for message in (host("mbp"), committed(view, 18_241 + told, loss=1.5), rank_step(view, 18_241 + told, 1)):
                app.feed._take("studio", msgspec.structs.replace(message, seq=app.live.seq + 1, boot="boot-1"))
                app.choose(1)
                screen.paint()
                screen._compositor.update_widgets(set(screen._compositor.visible_widgets))
                changed = set(screen._compositor._dirty_regions)
                theirs = screen._compositor.render_partial_update()
                screen._compositor._dirty_regions = set(changed)
                ours = partial_update.take(screen)
                assert ours is not None and not screen._compositor._dirty_regions, changed
                assert ours.render_segments(app.console) == spans.SpanUpdate(theirs).render_segments(app.console)
                told += len(ours.stretches)

    await driven(source_of(4), play, **({"glyphs": ASCII} if ascii_only else {}))
    assert told > 40


async def test_what_lies_under_a_notice_or_holds_wide_characters_is_left_to_textual() -> None:
    app = app_of(source_of(4))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, lambda: app.live.heard_at is not None)
        screen: Any = app.screen
        app.notify("a notice")
        await until(pilot, lambda: any(toast.region.area for toast in screen.query("Toast")))
        notice = next(iter(screen.query("Toast"))).region
        below = Region(notice.x, notice.y, 4, 1)
        screen._compositor._dirty_regions = {below, Region(0, 0, 10, 1)}
        ours = partial_update.take(screen)
        assert ours is not None and [stretch.row for stretch in ours.stretches] == [0]
        assert screen._compositor._dirty_regions == {below}
        screen.query_one("#body", Lines).show([line("宽\u0301 x"), *[line("y")] * 10])
        screen._compositor._dirty_regions = {Region(0, 0, 4, 1)}
        assert partial_update.take(screen) is None and screen._compositor._dirty_regions
