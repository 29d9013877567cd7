"""The terminal: left as it was, typed ahead, told only what changed, and driven by a Textual that is not known."""

import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest
from benchmarks.lib.pseudo_terminal import Screen, Terminal
from rich.color import ColorSystem
from rich.style import Style
from tests.tui.support.driving import burst, driven, until
from tests.tui.support.recorded import source_of
from tests.waiting import HANG_SECONDS
from textual._styles_cache import StylesCache
from textual.app import App
from textual.pilot import Pilot
from textual.strip import Strip

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.cli import doctor
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.terminal import guard, partial_update
from trainctl.tui.widgets.command_bar import CommandBar

DEADLINE_SECONDS = HANG_SECONDS
UNKNOWN = """
from trainctl.tui.terminal import guard
guard.version = lambda: "99.0.0"
"""


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    guard.allows.cache_clear()
    yield
    guard.allows.cache_clear()


def test_an_unknown_textual_goes_by_its_own_means() -> None:
    program = """
from textual.app import App
from trainctl.tui.app.app import TrainctlApp
assert not any(guard.allows(feature) for feature in guard.PARTS)
assert TrainctlApp._display is App._display
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", UNKNOWN + program], env=environment, timeout=DEADLINE_SECONDS, check=True)
    assert all(guard.allows(feature) for feature in guard.PARTS)
    assert TrainctlApp._display is not App._display


def test_an_unknown_textual_drives_a_terminal() -> None:
    arguments = ["trainctl", "attach", "--connect", "tcp://127.0.0.1:9"]
    program = f"{UNKNOWN}import sys; sys.argv = {arguments!r}\nfrom trainctl.tui.cli.main import main; sys.exit(main())"
    with Terminal([sys.executable, "-c", program], 80, 24) as terminal:
        terminal.until(lambda screen: "connecting" in screen.text, DEADLINE_SECONDS)
        terminal.press("?")
        terminal.until(lambda screen: "Textual 99.0.0 is not fully" in screen.text, DEADLINE_SECONDS)
        terminal.press("\x1b")
        terminal.until(lambda screen: " keys " not in screen.text, DEADLINE_SECONDS)
        terminal.press("q")
        assert terminal.process.wait(DEADLINE_SECONDS) == 0


def test_a_private_part_that_is_gone_turns_off_what_needs_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StylesCache, "get_inner_outer")
    assert [feature for feature in guard.PARTS if not guard.allows(feature)] == ["styles cache"]
    (found,) = doctor._of_textual()
    assert found.text == guard.fallback() and "textual==8." in found.do
    monkeypatch.undo()
    guard.allows.cache_clear()
    assert not doctor._of_textual() and not guard.fallback()


def test_each_part_is_looked_for() -> None:
    for kind, part in (
        (kind, part) for kinds in guard.PARTS.values() for kind, parts in kinds.items() for part in parts
    ):
        assert guard._has(kind, (part,))
        assert not guard._has(kind, (f"{part}_of_old",)) and not guard._has(f"{kind}OfOld", (part,))


def read_until(master: int, word: bytes) -> None:
    seen = b""
    while word not in seen:
        seen += os.read(master, 65536)


def test_the_program_ends_with_its_terminal() -> None:
    master, slave = pty.openpty()
    program = "import os, sys; os.login_tty(0); from trainctl.tui.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "attach", "--connect", "tcp://127.0.0.1:9"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        try:
            read_until(master, b"connecting")
            os.close(master)
            assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGHUP
        finally:
            process.kill()


def test_a_terminal_is_left_as_it_was_on_sigterm() -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    command = [sys.executable, "-m", "trainctl.tui.cli.main", "attach", "--connect", "tcp://127.0.0.1:9"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    ) as process:
        try:
            read_until(master, b"connecting")
            assert termios.tcgetattr(slave) != before
            process.terminate()
            read_until(master, b"\x1b[?1000l")
            assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
            assert termios.tcgetattr(slave) == before
        finally:
            process.kill()
            os.close(slave)
            os.close(master)


@pytest.mark.parametrize("keys", [("colon", "x", "y", "escape", "c"), ("question_mark", "escape", "c")])
async def test_a_key_behind_escape_goes_where_escape_has_led(keys: tuple[str, ...]) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        burst(app, *keys)
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        assert not app.screen_stack[-2].query_one(CommandBar).open

    await driven(source_of(1), play)


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
