"""What a report's redaction knows of this machine, user and program."""

import sys
from pathlib import Path

import pytest

from trainctl.tui.selftest import run_selftest
from trainctl.tui.selftest.redaction import redactor


def test_folders_of_the_user_and_the_program_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / f"Anna's {name} files" for name in ("home", "program", "current", "packages")]
    for folder in folders:
        folder.mkdir()
    home, program, current, packages = folders
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "prefix", str(program))
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages), "relative", ""])
    monkeypatch.chdir(current)
    redact = redactor([], run_selftest._folders())
    for folder in folders:
        assert redact(f"no {folder}/lib/x.py here, a relative one") == "no <path> here, a relative one"


def test_a_word_of_the_machines_domain_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, domain in (("annas-mbp.fritz", []), ("annas-mbp.lab.example", ["lab.example"])):
        monkeypatch.setattr(run_selftest.socket, "gethostname", lambda host=host: host)
        names = run_selftest._names()
        assert names[:2] == [host, "annas-mbp"]
        assert [name for name in names if name in ("fritz", "lab", "example", "lab.example")] == domain
