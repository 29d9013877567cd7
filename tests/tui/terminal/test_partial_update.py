"""What a change on the screen costs a terminal, and that it shows what Textual itself would have."""

from benchmarks.lib.pseudo_terminal import Screen
from rich.color import ColorSystem
from rich.style import Style
from tests.tui.support.driving import driven
from tests.tui.support.recorded import source_of
from textual.app import App
from textual.strip import Strip

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.terminal import partial_update


def test_a_style_is_told_by_what_differs() -> None:
    red, blue, bold = (partial_update.codes_of(Style.parse(text), ColorSystem.TRUECOLOR)
                       for text in ("#ff0000 on #000000", "#0000ff on #000000", "bold #0000ff on #000000"))  # fmt: skip
    assert partial_update.turn(red, red) == ""
    assert partial_update.turn(red, blue) == "\x1b[38;2;0;0;255m"
    assert partial_update.turn(blue, bold) == "\x1b[1m"
    assert partial_update.turn(bold, red) == "\x1b[0;38;2;255;0;0;48;2;0;0;0m"


async def test_partial_updates_show_what_the_whole_screen_does() -> None:
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
        ours = partial_update.SpanUpdate(update).render_segments(app.console)
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
