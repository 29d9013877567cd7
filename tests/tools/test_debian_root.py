"""What a bare Debian system gets of this machine: pip's settings, the folders that they name, and the checkout."""

import shutil
from pathlib import Path

import pytest
from tests.conftest import ROOT

from tools import debian_root, pip_settings


def test_settings_of_pip_become_variables() -> None:
    assert debian_root.pip_environment({"find-links": "/a", "cert": "/b"}) == {"PIP_FIND_LINKS": "/a", "PIP_CERT": "/b"}


def test_what_settings_name_is_mounted_if_it_is_there(tmp_path: Path) -> None:
    wheels, simple = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    simple.mkdir(parents=True)
    named = {"A": f"{wheels} {tmp_path / 'none'} 180", "B": f"file://{simple}\nhttps://example.org/simple"}
    assert [*debian_root.local_paths(named)] == [wheels, simple.parent]
    assert [*debian_root.local_paths({"PIP_FIND_LINKS": "file:///usr"})] == [Path("/usr")], "never the whole machine"


def test_a_command_sees_the_checkout_and_nothing_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = tmp_path / "own.pem"
    certificate.touch()
    monkeypatch.setattr(pip_settings, "own", lambda: {"cert": str(certificate)})
    line = debian_root.command_line(tmp_path / "root", ["python3", "--version"])
    assert line[:2] == ["env", "-i"] and f"PIP_CERT={certificate}" in line
    start = line.index(str(tmp_path / "root"))
    assert line[start + 1 :] == [*map(str, sorted([ROOT, certificate])), "--", "python3", "--version"]
    assert Path(f"{tmp_path}/root{ROOT}").is_dir() and Path(f"{tmp_path}/root{certificate}").is_file()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert debian_root.main(["trixie"]) == 2
    monkeypatch.setattr(shutil, "which", lambda program: None)
    assert debian_root.main(["trixie", "true"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split("; ")[0] for line in said] == [
        "debian_root: needs a Debian suite and a command, such as: trixie python3 --version",
        "debian_root: mmdebstrap not found",
    ]
