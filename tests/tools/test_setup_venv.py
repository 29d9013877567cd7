"""What a person sees while a checkout is installed: stages, progress, errors, and none of pip's warnings."""

import importlib.util
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.waiting import HANG_SECONDS

SCRIPT = ROOT / "tools" / "setup_venv.py"
_spec = importlib.util.spec_from_file_location("setup_venv", SCRIPT)
assert _spec is not None and _spec.loader is not None
setup_venv = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(setup_venv)

NOISY = "print('WARNING: Location file:///x is ignored: it is no URL', flush=True); print('Collecting a', flush=True);"
PIP = """\
WARNING: Location 'file:///somewhere' is ignored
  Downloading https://files.example.org/ab/cd/{torch}-cp311-cp311-manylinux_2_28_x86_64.whl ({size})
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    made = tmp_path / "setup.log"
    made.write_text("from an earlier stage: ERROR: nothing of mine\n")
    return made


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_stage_is_two_plain_lines_and_its_warnings_are_in_the_log(log: Path) -> None:
    said = io.StringIO()
    assert setup_venv.run_stage("installing a", python(NOISY), log, said)
    first, last = said.getvalue().splitlines()
    assert first == "setup: installing a ..."
    assert last.startswith("setup: installing a: done in ")
    assert "WARNING: Location" in log.read_text()


def test_a_stage_that_fails_tells_its_errors_where_the_log_is_and_what_to_do(log: Path) -> None:
    said = io.StringIO()
    code = f"{NOISY} print('ERROR: No matching distribution found for a'); print('WARNING: more'); raise SystemExit(1)"
    assert not setup_venv.run_stage("installing a", python(code), log, said)
    _, failed, error, advice = said.getvalue().splitlines()
    assert failed.startswith("setup: installing a: failed in ")
    assert error == "  ERROR: No matching distribution found for a"
    assert str(log) in advice and "make clean" in advice


def test_without_an_error_line_the_last_ones_are_told(log: Path) -> None:
    said = io.StringIO()
    assert not setup_venv.run_stage("making v", python("print('no room left'); raise SystemExit(1)"), log, said)
    assert "  no room left\n" in said.getvalue()


def test_on_a_terminal_the_seconds_go_by_in_one_line(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child ends once the terminal shows what it does."""
    monkeypatch.setattr(setup_venv, "TICK_SECONDS", 0.02)
    ours, theirs = pty.openpty()
    shown, said = log.with_name("shown"), [""]

    def read() -> None:
        while not said[0].endswith("END"):
            said[0] += os.read(ours, 65536).decode()
            if re.search(r"\.\.\. \d+ s, downloading torch-2\.13\.0 \(887\.9 MB\)", said[0]):
                shown.touch()

    with os.fdopen(theirs, "w") as terminal:
        reader = threading.Thread(target=read)
        reader.start()
        assert setup_venv.run_stage("installing a", python(DOWNLOADS.format(shown=str(shown))), log, terminal)
        terminal.write("END")
        terminal.flush()
        reader.join(HANG_SECONDS)
    os.close(ours)
    assert said[0].count("\n") == 1


DOWNLOADS = """
import time
from pathlib import Path
print('Downloading torch-2.13.0-cp311-x.whl (887.9 MB)', flush=True)
while not Path({shown!r}).exists():
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("text", "doing"),
    [
        (PIP.format(torch="torch-2.13.0+cpu", size="187.3 MB"), "downloading torch-2.13.0+cpu (187.3 MB)"),
        ("  Downloading numpy-2.3.5-cp311-cp311-linux.whl.metadata (62 kB)\n", "downloading numpy-2.3.5 (62 kB)"),
        ("Installing collected packages: a, b, c\n", "installing collected packages"),
        ("WARNING: Location 'x' is ignored\n", ""),
    ],
)
def test_what_pip_is_doing_is_told_in_few_words(log: Path, text: str, doing: str) -> None:
    start = log.stat().st_size
    with log.open("a") as file:
        file.write(text)
    assert setup_venv.doing(log, start) == doing


def test_the_download_is_announced_by_its_size(tmp_path: Path) -> None:
    assert "3 GB or more" in setup_venv.size_of(tmp_path, "linux")
    assert "GB" in setup_venv.size_of(tmp_path, "darwin")
    (tmp_path / "lib" / "python3.11" / "site-packages" / "torch").mkdir(parents=True)
    assert "3 GB" not in setup_venv.size_of(tmp_path, "linux")


def test_make_demo_announces_it_before_anything_is_fetched_and_keeps_standard_output_for_the_demo(
    tmp_path: Path,
) -> None:
    """In an environment whose pip fetches nothing and whose trainctl says one object."""
    binaries = tmp_path / "v" / "bin"
    binaries.mkdir(parents=True)
    for name, says in (("pip", ""), ("python", "WARNING: Location x is ignored"), ("trainctl", "{}")):
        (binaries / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (binaries / name).chmod(0o755)
    words = ["make", "-C", str(ROOT), "--no-print-directory", "demo"]
    words += [f"VENV={tmp_path / 'v'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}
    said = done.stderr.splitlines()
    assert "download" in said[0] and "GB" in said[0]
    assert any(line.startswith("setup: installing ") for line in said[1:])
    assert "WARNING" not in done.stderr
    again = subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (again.returncode, again.stdout, again.stderr) == (0, "{}\n", "")
