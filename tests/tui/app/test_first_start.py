"""The first start shows its keys, once."""

from pathlib import Path

import pytest
from tests.tui.support.driving import driven
from tests.tui.support.recorded import source_of
from tests.waiting import until
from textual._xterm_parser import XTermParser
from textual.pilot import Pilot

from trainctl.tui.app import keymap, launch
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.help import FirstKeysScreen
from trainctl.tui.dialogs.popup import Dialog


def test_only_the_first_start_in_a_folder_that_can_be_written_is_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    assert [launch.claim_first_start() for _ in range(3)] == [True, False, False]
    (tmp_path / "file").write_text("a file", "utf-8")
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "file"))
    assert not launch.claim_first_start()


@pytest.mark.parametrize(("key", "screen"), [("escape", "overview"), ("q", "overview"), ("3", "charts")])
async def test_a_key_closes_them_and_one_that_they_name_acts(key: str, screen: str) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert isinstance(app.screen, FirstKeysScreen)
        await pilot.press(key)
        assert app.screen.name == screen and app.is_running

    await driven(source_of(4), play, first_keys=lambda: keymap.first_keys({}))


async def test_a_key_right_after_escape_acts_on_the_screen_below() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        parser = XTermParser()
        for message in [*parser.feed("\x1bb"), *until(lambda: list(parser.tick()), 10, "the keys")]:
            app.post_message(message)
        await pilot.pause()
        await pilot.pause()
        assert isinstance(app.screen, Dialog) and not isinstance(app.screen, FirstKeysScreen), app.screen

    await driven(source_of(4), play, first_keys=lambda: keymap.first_keys({}))
