"""tools/pip_settings.py: what holds of the lines that `pip config list` prints."""

import pytest

from tools import pip_settings

LISTED = """
:env:.cert='/cas/all.crt'
:env:.default-timeout='180'
global.cert='/other.crt'
global.extra-index-url='file:///disk/simple\\nhttps://more.example/simple'
global.index-url="https://it's.example/simple"
install.find-links='/wheels /more'
global.find-links='/of/all'
freeze.find-links='/of/freeze'
no setting
"""


def test_variables_come_before_files_and_other_commands_settings_are_left_out() -> None:
    assert pip_settings.parse(LISTED) == {
        "cert": "/cas/all.crt",
        "default-timeout": "180",
        "extra-index-url": "file:///disk/simple\nhttps://more.example/simple",
        "find-links": "/wheels /more",
        "index-url": "https://it's.example/simple",
    }
    assert pip_settings.parse("") == {}


def test_this_machine_s_settings_are_pip_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/own/wheels")
    assert pip_settings.own()["find-links"] == "/own/wheels"
