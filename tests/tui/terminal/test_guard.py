"""With a Textual whose private parts weren't tried, or aren't there, the program runs the way Textual does."""

import asyncio
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from benchmarks.lib.pseudo_terminal import Terminal
from tests.tui.support.driving import driven, until
from tests.tui.support.recorded import source_of
from tests.waiting import HANG_SECONDS
from textual._context import visible_screen_stack
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver
from textual.pilot import Pilot
from textual.screen import Screen

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.screens.charts import ChartsScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.terminal import guard
from trainctl.tui.terminal.driver import TerminalDriver

ROOT = Path(__file__).parents[3]
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


async def seen(pilot: Pilot[int], app: TrainctlApp) -> list[list[str]]:
    """What three screens and a dialog show."""
    made = []
    # The bottom line of the screen below a dialog is drawn with the next repaint.
    for key, *shown in (
        ("1", "NODE"),
        ("2", "where a step's time goes"),
        ("3", "values"),
        ("question_mark", " keys ", "? close"),
    ):

        def is_shown(shown: Sequence[str] = shown) -> bool:
            text = "\n".join(text_of(app))
            return all(word in text for word in shown) and has_its_data(app)

        await pilot.press(key)
        await until(pilot, is_shown)
        made.append(await settled(pilot, app))
    return made


async def settled(pilot: Pilot[int], app: TrainctlApp) -> list[str]:
    """What is shown once nothing more is drawn: the last data that came may not be on the screen yet."""
    before: list[str] = []
    while before != (now := text_of(app)):
        before = now
        await pilot.pause(0.2)
    return now


def has_its_data(app: TrainctlApp) -> bool:
    """Whether charts on screen have been given all that they ask for."""
    charts = app.screen
    return not isinstance(charts, ChartsScreen) or (
        bool(charts.data) and not charts._missing() and not charts._under_way
    )


def text_of(app: TrainctlApp) -> list[str]:
    visible_screen_stack.set(app._background_screens)  # what is behind a dialog; the compositor says so as it draws
    return [strip.text for strip in app.screen._compositor.render_strips()]


async def everything_seen() -> tuple[TrainctlApp, list[list[str]]]:
    made: list[list[str]] = []

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        made.extend(await seen(pilot, app))

    return await driven(source_of(4), play, size=(120, 40)), made


def plainly_seen() -> None:
    """In a process of its own that takes its Textual for an unknown one: the same, by Textual's own means."""
    app, made = asyncio.run(everything_seen())
    assert not any(guard.allows(feature) for feature in guard.PARTS)
    assert app.get_driver_class() is LinuxDriver
    assert TrainctlApp._display is App._display
    assert OverviewScreen._compositor_refresh is Screen._compositor_refresh
    print(json.dumps(made))


async def test_an_unknown_textual_shows_the_same_by_its_own_means() -> None:
    command = [sys.executable, "-c", f"{UNKNOWN}from tests.tui.terminal import test_guard; test_guard.plainly_seen()"]
    plain = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=DEADLINE_SECONDS, check=True)
    app, made = await everything_seen()
    assert all(guard.allows(feature) for feature in guard.PARTS)
    assert app.get_driver_class() is TerminalDriver
    assert TrainctlApp._display is not App._display
    assert OverviewScreen._compositor_refresh is not Screen._compositor_refresh
    assert json.loads(plain.stdout) == made


def test_an_unknown_textual_drives_a_terminal() -> None:
    arguments = ["trainctl", "attach", "--connect", "tcp://127.0.0.1:9"]
    program = f"{UNKNOWN}import sys; sys.argv = {arguments!r}\nfrom trainctl.tui.cli.main import main; sys.exit(main())"
    with Terminal([sys.executable, "-c", program], 80, 24) as terminal:
        terminal.until(lambda screen: "connecting" in screen.text, DEADLINE_SECONDS)
        terminal.press("?")
        terminal.until(lambda screen: " keys " in screen.text, DEADLINE_SECONDS)
        terminal.press("\x1b")
        terminal.until(lambda screen: " keys " not in screen.text, DEADLINE_SECONDS)
        terminal.press("q")
        assert terminal.process.wait(DEADLINE_SECONDS) == 0


def test_another_version_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert guard.version() == importlib.metadata.version("textual")
    monkeypatch.setattr(guard, "version", lambda: "8.20.0")
    assert not any(guard.allows(feature) for feature in guard.PARTS)


async def test_a_private_part_that_is_gone_turns_off_what_needs_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(XTermParser, "_sequence_to_key_events")
    assert [feature for feature in guard.PARTS if not guard.allows(feature)] == ["driver"]

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert app.get_driver_class() is LinuxDriver

    await driven(source_of(1), play)


@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kinds in guard.PARTS.values() for kind, parts in
                                            kinds.items() for part in parts])  # fmt: skip
def test_each_part_is_looked_for(kind: str, part: str) -> None:
    assert guard._has(kind, (part,))
    assert not guard._has(kind, (f"{part}_of_old",)) and not guard._has(f"{kind}OfOld", (part,))
