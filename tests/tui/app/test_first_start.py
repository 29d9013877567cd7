"""The first start shows five keys, once."""

from pathlib import Path

import pytest
from tests.tui.support.driving import dialog_text, driven
from tests.tui.support.recorded import source_of
from textual.pilot import Pilot

from trainctl.tui.app import first_start, keymap
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.first_keys import FirstKeysScreen


def test_only_the_first_start_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    assert [first_start.claim() for _ in range(3)] == [True, False, False]


def test_a_folder_that_cannot_be_written_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state").write_text("a file", "utf-8")
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    assert not first_start.claim()


def test_the_keys_are_the_person_s_own() -> None:
    assert dict(keymap.first_keys({"undo": "f5"})) == {
        "?": "all keys for this screen",
        "2": "one node in detail",
        "s": "split the batch between nodes",
        "f5": "undo a change",
        "q": "quit; the run continues",
    }


async def test_a_key_that_they_name_closes_them_and_acts() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert isinstance(app.screen, FirstKeysScreen)
        await pilot.press("3")
        assert app.screen.name == "charts"

    await driven(source_of(4), play, first_keys=lambda: keymap.first_keys({}))


@pytest.mark.parametrize("key", ["escape", "enter", "q"])
async def test_they_are_shown_over_the_first_screen_until_a_key_closes_them(key: str) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert isinstance(app.screen, FirstKeysScreen)
        shown = dialog_text(app)
        assert "    ?  all keys for this screen" in shown
        assert "    q  quit; the run continues" in shown
        await pilot.press(key)
        assert app.screen.name == "overview" and app.is_running

    await driven(source_of(4), play, first_keys=lambda: keymap.first_keys({}))
