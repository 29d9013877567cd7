"""`make demo` in a new checkout: what it says while it installs, and what it leaves to the demo."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.waiting import HANG_SECONDS


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_make_demo_announces_the_download_keeps_standard_output_for_the_demo_and_says_why_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    """In an environment whose installer notes its arguments and whose trainctl prints one object."""
    venv = tmp_path / "v"
    binaries, uv = venv / "bin", tmp_path / "path" / "uv"
    for program in (binaries / "pip", binaries / "python", binaries / "trainctl", uv):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text('#!/bin/sh\necho "WARNING: x"; [ ! -e fails ]\n'.replace("fails", str(tmp_path / "fails")))
        program.chmod(0o755)
    (binaries / "trainctl").write_text("#!/bin/sh\necho '{}'\n")
    monkeypatch.setenv("PATH", f"{uv.parent}:/usr/bin:/bin" if installer == "uv" else "/usr/bin:/bin")
    words = ["make", "-C", str(ROOT), "--no-print-directory", "demo", f"VENV={venv}", f"PYTHON={sys.executable}"]

    def make() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

    (tmp_path / "fails").touch()
    failed = make()
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "WARNING: x" in failed.stderr and "make clean" in failed.stderr
    (tmp_path / "fails").unlink()
    done = make()
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr
    assert "GB to download" in done.stderr and "WARNING" not in done.stderr
    assert ("path/uv" in (venv / "setup.log").read_text()) is (installer == "uv")
    again = make()
    assert (again.returncode, again.stdout, again.stderr) == (0, "{}\n", "")
