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
from trainctl.tui.setup import version_report


def report() -> dict[str, str]:
    """Of this machine, as the command prints it; of a name that is there twice, the last."""
    done = call("--version", "--verbose")
    assert (done.returncode, done.stderr) == (0, "")
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


def test_it_has_the_versions_of_all_that_takes_part() -> None:
    found = report()
    assert found["trainctl"] == found["trainctl-client"] == protocol.__version__
    assert found["protocol"] == str(PROTOCOL_VERSION) and found["records"] == "2"
    assert found["python"].split() == [platform.python_version(), platform.python_implementation()]
    assert found["system"].startswith(platform.system()) and found["system"].endswith(platform.machine())
    for name in ("torch", "mlx", "numpy", "textual", "pyzmq"):
        assert found[name] == version(name)
    assert re.fullmatch(r"(torch|mlx) \w+[:\w ]*", found["device"])


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_report, "installed_version", lambda name: None if name == "torch" else version(name))
    assert "torch 2" not in version_report.full() and "\nnumpy " in version_report.full()


def test_it_has_nothing_of_the_machine_s_names_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of a kernel that was built on a named host."""
    for module, name in ((platform, "node"), (socket, "gethostname"), (getpass, "getuser")):
        monkeypatch.setattr(module, name, lambda: "anna-laptop")
    monkeypatch.setattr(platform, "release", lambda: "6.1.8-anna-laptop")
    text = version_report.full()
    assert not re.search(r"anna|/|@", text)
    assert "system Linux 6.1.8 " in text or platform.system() != "Linux"


def test_verbose_goes_with_version() -> None:
    assert_one_line(call("--verbose"), 2, "--verbose: applies only to --version")
