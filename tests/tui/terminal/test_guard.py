"""With a Textual whose private parts weren't tried, or aren't there, the program runs the way Textual does."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from benchmarks.lib.pseudo_terminal import Terminal
from tests.waiting import HANG_SECONDS
from textual._styles_cache import StylesCache
from textual.app import App

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.terminal import guard

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
        terminal.until(lambda screen: " keys " in screen.text, DEADLINE_SECONDS)
        terminal.press("\x1b")
        terminal.until(lambda screen: " keys " not in screen.text, DEADLINE_SECONDS)
        terminal.press("q")
        assert terminal.process.wait(DEADLINE_SECONDS) == 0


def test_a_private_part_that_is_gone_turns_off_what_needs_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StylesCache, "get_inner_outer")
    assert [feature for feature in guard.PARTS if not guard.allows(feature)] == ["styles cache"]


def test_each_part_is_looked_for() -> None:
    for kind, part in (
        (kind, part) for kinds in guard.PARTS.values() for kind, parts in kinds.items() for part in parts
    ):
        assert guard._has(kind, (part,))
        assert not guard._has(kind, (f"{part}_of_old",)) and not guard._has(f"{kind}OfOld", (part,))
