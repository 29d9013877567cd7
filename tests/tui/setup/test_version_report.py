"""`trainctl --version --verbose`: what a bug report needs, and nothing private."""

import getpass
import platform
import re
import socket
from importlib.metadata import version

import pytest
from tests.tui.support.cli_calls import assert_one_line, call

from trainctl import protocol
from trainctl.protocol.messages.base import PROTOCOL_VERSION
from trainctl.tui.setup import installed


def test_it_has_the_versions_of_all_that_takes_part() -> None:
    done = call("--version", "--verbose")
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert found["trainctl"] == protocol.__version__
    assert found["protocol"] == str(PROTOCOL_VERSION)
    assert {name: found[name] for name in ("torch", "mlx")} == {name: version(name) for name in ("torch", "mlx")}
    assert_one_line(call("--verbose"), 2, "--verbose: applies only to --version")


def test_it_has_nothing_of_the_machine_s_names_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of a kernel that was built on a named host."""
    for module, name in ((platform, "node"), (socket, "gethostname"), (getpass, "getuser")):
        monkeypatch.setattr(module, name, lambda: "anna-laptop")
    monkeypatch.setattr(platform, "release", lambda: "6.1.8-anna-laptop")
    text = installed.versions()
    assert not re.search(r"anna|/|@", text)
    assert "system Linux 6.1.8 " in text or platform.system() != "Linux"
