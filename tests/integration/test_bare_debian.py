"""The wheel in a Debian system that has only Python: the client alone, the program alone, and the demo of both
libraries. `make debian` runs these tests."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.integration.conftest import AgentProcess
from tests.integration.support.client_alone import BLOCKED, DRIVE
from tests.integration.support.packages import build_wheel

from tools import debian_root
from trainctl import protocol

pytestmark = [pytest.mark.needs("mmdebstrap"), pytest.mark.tier("soak"), pytest.mark.timeout(3600)]
SUITE = "bookworm"
MOST_BASE_BYTES = 130e6
MOST_IMPORT_SECONDS = 0.15
"""Seconds of CPU time, the least of `LOADS` processes."""
LOADS = 7
LOAD = "import time; began = time.process_time(); import trainctl.protocol.client; print(time.process_time() - began)"


class System:
    """A new Debian system; its environments take the wheel of this checkout and the tested versions of libraries."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wheel = build_wheel(ROOT, folder / "dist").name

    def run(self, *words: str) -> str:
        """Return what a command prints on standard output."""
        command = debian_root.command_line(self._folder, words)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def install(self, venv: str, extras: str = "") -> None:
        if not (self._folder / venv.lstrip("/")).exists():
            self.run("python3", "-m", "venv", venv)
        self.run(
            f"{venv}/bin/pip",
            "install",
            "--quiet",
            "-c",
            f"{ROOT}/constraints.txt",
            f"/dist/{self._wheel}{extras}",
        )

    def size(self, venv: str) -> int:
        """Bytes of an environment's packages, with their byte code but without pip."""
        (packages,) = self._folder.glob(f"{venv.lstrip('/')}/lib/python3*/site-packages")
        tops = [top for top in packages.iterdir() if not top.name.startswith(("pip", "setuptools"))]
        return sum(file.lstat().st_size for top in tops for file in [top, *top.rglob("*")] if file.is_file())


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with debian_root.unpacked(SUITE) as folder:
        yield System(folder)


def test_the_client_alone_drives_a_live_agent(system: System, live: AgentProcess) -> None:
    system.install("/client")
    python = "/client/bin/python"
    for name in BLOCKED:
        system.run(python, "-c", f"import importlib.util as u; assert u.find_spec({name!r}) is None, {name!r}")
    told = json.loads(system.run(python, "-c", f"import sys\n{DRIVE}", live.address))
    assert told["state"] == "applied" and told["committed"] >= told["step"] > 0
    seconds = min(float(system.run(python, "-c", LOAD)) for _ in range(LOADS))
    print(f"client: {system.size('/client') / 1e6:.1f} MB, import takes {seconds:.3f} s of CPU time")
    assert seconds < MOST_IMPORT_SECONDS


def test_the_program_installs_and_its_demo_trains_with_both_libraries(system: System) -> None:
    system.install("/program", "[tui]")
    assert system.run("/program/bin/trainctl", "--version") == f"trainctl {protocol.__version__}\n"
    base = system.size("/program")
    print(f"trainctl: {base / 1e6:.1f} MB")
    assert base < MOST_BASE_BYTES
    system.install("/program", "[all]")
    print(f"trainctl[all]: {system.size('/program') / 1e6:.0f} MB")
    result = json.loads(
        system.run("/program/bin/trainctl", "demo", "--headless", "--steps", "40", "--json").splitlines()[-1]
    )
    assert result["ok"] and result["steps"] == 40 and result["mixed"] and result["engine"] != "none"
    assert {node["backend"] for node in result["nodes"]} == {"torch", "mlx"}
    assert all(node["tokens"] > 0 for node in result["nodes"])
