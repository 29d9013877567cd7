"""`make demo` and `make watch-demo` in a new checkout: what they install and say, and what they leave to the demo."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.waiting import HANG_SECONDS


class Checkout:
    """An environment whose installer notes its arguments and fails on request, and whose trainctl prints its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, installer: str) -> None:
        self.fails, self.venv = folder / "fails", folder / "v"
        uv, binaries = folder / "path" / "uv", self.venv / "bin"
        for program in (binaries / "pip", binaries / "python", uv):
            _write_program(program, f'echo "WARNING: $0 $@"; [ ! -e {self.fails} ] && [ "$1" != -c ]')
        _write_program(binaries / "trainctl", 'echo "trainctl $@"')
        monkeypatch.setenv("PATH", f"{uv.parent}:/usr/bin:/bin" if installer == "uv" else "/usr/bin:/bin")

    def make(self, *words: str) -> "subprocess.CompletedProcess[str]":
        line = [
            "make",
            "-C",
            str(ROOT),
            "--no-print-directory",
            f"VENV={self.venv}",
            f"PYTHON={sys.executable}",
            *words,
        ]
        return subprocess.run(line, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

    @property
    def log(self) -> str:
        return (self.venv / "setup.log").read_text()


def _write_program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("installer", ["pip", "uv"])
@pytest.mark.parametrize(
    ("target", "size", "command"),
    [("demo", "GB to download", "trainctl demo\n"), ("watch-demo", "25 MB to download", "trainctl demo --simulated\n")],
)
def test_make_announces_the_download_keeps_standard_output_for_the_demo_and_says_why_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: str, target: str, size: str, command: str
) -> None:
    checkout = Checkout(tmp_path, monkeypatch, installer)
    checkout.fails.touch()
    failed = checkout.make(target)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert "WARNING" in failed.stderr and "make clean" in failed.stderr
    checkout.fails.unlink()
    done = checkout.make(target)
    assert (done.returncode, done.stdout) == (0, command), done.stderr
    assert size in done.stderr and "WARNING" not in done.stderr
    assert ("path/uv pip install" in checkout.log) is (installer == "uv")
    again = checkout.make(target)
    assert (again.returncode, again.stdout, again.stderr) == (0, command, "")


def test_only_the_demo_that_trains_installs_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Checkout(tmp_path, monkeypatch, "pip")
    assert checkout.make("watch-demo", "TORCH=cpu").returncode == 0
    assert ".[tui]" in checkout.log and "torch" not in checkout.log
    assert checkout.make("demo", "TORCH=cpu").returncode == 0
    assert "--index-url https://download.pytorch.org/whl/cpu torch" in checkout.log and ".[all]" in checkout.log
    assert checkout.make("watch-demo").stderr == "", "what installs all has this too"


def test_without_the_build_for_cpus_the_size_of_what_is_taken_instead_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Checkout(tmp_path, monkeypatch, "uv")
    checkout.fails.touch()  # pip, which is asked for that build; then uv
    said = checkout.make("demo", "TORCH=cpu").stderr
    assert said.index("0.5 GB") < said.index("no PyTorch for cpu at download.pytorch.org") < said.index("0.5 to 3 GB")
