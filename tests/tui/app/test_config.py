"""config.toml: each value that can't be used is named, the rest counts, and the keys that were chosen act."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tui.support.cli_calls import call, call_json
from tests.tui.support.driving import body, driven, hint
from tests.tui.support.recorded import source_of
from textual.pilot import Pilot

from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.app import config as settings
from trainctl.tui.app import keymap
from trainctl.tui.app import launch as program
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.help import HelpScreen
from trainctl.tui.screens.events import EventsScreen

FILE = Path("config.toml")
THEMES = ("night", "day", "contrast", "terminal")


def parsed(text: str) -> settings.Found:
    return settings.parse(text, FILE, THEMES, keymap.checked)


def test_what_a_file_says_counts() -> None:
    found = parsed(
        'theme = "contrast"\nascii = true\nbell = false\n[keys]\ndetach = "Q,f10"\nruns = "1"\noverview="0"\n'
    )
    assert not found.problems
    assert found.settings.theme == "contrast"
    assert (found.settings.ascii, found.settings.bell, found.settings.mouse) == (True, False, True)
    assert found.settings.keys == {"detach": "Q,f10", "runs": "1", "overview": "0"}
    assert parsed('columns = ["user:reward", "memory_use"]').settings.columns == ("user:reward", "memory_use")
    assert parsed('theme = "auto"\nascii = "auto"').settings == settings.Settings()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('theme = "dusk"', "theme: no theme 'dusk'; the themes are auto, night, day, contrast, terminal"),
        ("ascii = 1", "ascii: "),
        ("colour = true", "colour: 'colour' is not one of theme, ascii"),
        ("theme = 5", "theme: must be text"),
        ("mouse = 1", "mouse: must be true or false"),
        ('[keys]\ndetach = "ctrl+c"', "keys.detach: ctrl+c always quits"),
        ('[keys]\nfly = "f"', "keys.fly: no such action; the closest are "),
        ('[keys]\ndetach = "alt+q"', "keys.detach: terminals send alt+q as escape"),
        ('[keys]\ndetach = ",,"', "keys.detach: ',,' is not a key"),
        ("[keys]\ndetach = 5", "keys.detach: must be text"),
        ('[keys]\nhelp = "b"', "keys.help: b is already used by resize-batch"),
        ('[keys]\ntable-filter = "c"', "keys.table-filter: c is already used by checkpoint on"),
        ("columns = [1]", "columns[0]: must be text"),
        ('columns = ["user:reward", "grad_norm"]', "columns: grad_norm is not a per-rank metric"),
    ],
)
def test_a_bad_value_is_named_and_the_rest_counts(line: str, says: str) -> None:
    text = f"read_only = true\n\n# mine\n{line}\n"
    found = parsed(text)
    (problem,) = found.problems
    assert problem.text.startswith(says)
    assert problem.line == 3 + line.count("\n") + 1
    assert problem.column == line.splitlines()[-1].index("=") + 3
    assert str(problem).startswith(f"config.toml:{problem.line}:{problem.column}: ")
    assert found.settings.read_only is True


def test_a_file_that_is_not_toml_sets_nothing_and_its_line_is_named() -> None:
    found = parsed("bell = false\nmouse = yes\n")
    assert [str(problem) for problem in found.problems] == ["config.toml:2:9: not TOML: invalid value"]
    assert found.settings == settings.Settings()


@given(st.text(alphabet="abk=\"[]{}\n.,#1'\\", max_size=80))
def test_any_text_is_read_and_keeps_a_good_setting(text: str) -> None:
    found = parsed(f"mouse = false\n{text}")
    assert found.settings.mouse is False or found.problems


def test_a_file_that_was_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = program.configuration()
    assert (found.exists, found.settings, found.problems) == (False, settings.Settings(), ())
    assert found.path == settings.default_path()
    with pytest.raises(InvalidInputError, match="no such configuration file: check the path"):
        program.configuration(tmp_path / "none.toml")
    settings.default_path().parent.mkdir(parents=True, exist_ok=True)
    settings.default_path().write_bytes(b"\xff\xfe")
    assert "not a readable TOML file" in str(program.configuration().problems[0])


def test_the_command_prints_what_counts_and_names_the_bad_lines(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('theme = "day"\nsize = 3\n[keys]\ndetach = "Q"\n')
    done = call("config", "--config", file)
    assert done.returncode == 2
    assert 'theme = "day"' in done.stdout
    assert done.stderr.startswith(f"trainctl: {file}:2:8: size: ")
    (tmp_path / "again.toml").write_text(done.stdout)
    again = call("--config", tmp_path / "again.toml", "config")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[1:]
    found = call_json("config", "--config", tmp_path / "again.toml")
    assert (found["theme"], found["keys"]["detach"], found["keys"]["help"]) == ("day", "Q", "?")


async def test_chosen_keys_act_are_shown_and_a_bad_line_is_said_once() -> None:
    config = parsed('size = 3\n[keys]\nevents = "f4"\ntable-filter = "f"\nhelp = "h"\ndetach = "Q"\n')

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert [str(note.message) for note in app._notifications] == [str(config.problems[0])]
        await pilot.press("4", "question_mark", "q")
        assert app.is_running
        await pilot.press("f4")
        assert isinstance(app.screen, EventsScreen)
        await pilot.press("f", *"anna", "enter")
        assert "1-2 of 2" in body(app)
        await pilot.press("h")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape")
        await pilot.pause()
        await pilot.click("#keys", offset=(hint(app).index("Q detach"), 0))
        await pilot.pause()
        assert not app.is_running or app.return_code == 0

    await driven(source_of(1), play, config=config)
