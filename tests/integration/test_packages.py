"""Wheels of this checkout in environments of their own: the client alone, and the program over version 0.2.0."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.integration.conftest import AgentProcess
from tests.integration.support.client_alone import BLOCKED, DRIVE
from tests.integration.support.packages import Venv, build_wheel
from tests.tui.support.cli_calls import ENVIRONMENT

from trainctl import protocol

OLD = sorted((ROOT / "tests" / "golden" / "release-0.2.0").glob("*.whl"))
LIBRARIES = ("pyzmq", "msgpack", "msgspec", "platformdirs", "tomli-w")
MOST_TIMES_ITS_LIBRARIES = 2.5
"""CPU time to import the client, by that of what it needs: on a quiet machine some 1.4."""
LOAD = """
import time
began = time.process_time()
import asyncio, ssl, logging, tomllib, zmq.asyncio, msgpack, msgspec, platformdirs, tomli_w
libraries = time.process_time() - began
import trainctl.protocol.client
print(libraries, time.process_time() - began)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both."""
    folder = tmp_path_factory.mktemp("dist")
    build_wheel(ROOT, folder)
    build_wheel(ROOT / "protocol", folder)
    return folder


@pytest.fixture(scope="module")
def bare(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """Has trainctl-client and its libraries alone."""
    made = Venv(tmp_path_factory.mktemp("bare") / "venv")
    made.link(*LIBRARIES)
    made.install("--no-index", "--find-links", wheels, "trainctl-client")
    return made


def test_the_client_alone_drives_a_live_agent(bare: Venv, live: AgentProcess) -> None:
    for name in (*BLOCKED, "trainctl.tui"):
        done = subprocess.run([bare.python, "-I", "-c", f"import {name}"], capture_output=True, check=False)
        assert b"ModuleNotFoundError" in done.stderr, f"{name} is not in this environment"
    said = json.loads(bare.run(bare.python, "-I", "-c", f"import sys\n{DRIVE}", live.address))
    assert said["state"] == "applied" and said["committed"] >= said["step"] > 0


def test_the_client_loads_in_little_more_time_than_its_libraries(bare: Venv) -> None:
    bare.run(bare.python, "-I", "-c", LOAD)  # writes the byte code
    times = [tuple(map(float, bare.run(bare.python, "-I", "-c", LOAD).split())) for _ in range(7)]
    libraries, whole = min(one[0] for one in times), min(one[1] for one in times)
    assert whole < MOST_TIMES_ITS_LIBRARIES * libraries, f"{whole:.3f} s with {libraries:.3f} s of libraries"


def old_release(folder: Path) -> Venv:
    made = Venv(folder / "venv")
    made.link()
    made.install("--no-index", "--no-deps", *OLD)
    assert made.run(made.programs / "trainctl", "--version") == "trainctl 0.2.0\n"
    return made


def assert_it_works(venv: Venv) -> None:
    """The program starts, from this environment's files, and all of it can be imported."""
    assert venv.run(venv.programs / "trainctl", "--version") == f"trainctl {protocol.__version__}\n"
    assert venv.run(venv.programs / "trainctl", "help", "install").startswith("# Install\n")
    assert "trainctl-agent" in venv.run(venv.programs / "trainctl-agent", "--help")
    names = sorted(
        ".".join(file.relative_to(venv.packages).with_suffix("").parts).removesuffix(".__init__")
        for file in (venv.packages / "trainctl" / "protocol").rglob("*.py")
    )
    assert len(names) > 100
    bodies = f"import {', '.join(names)}, trainctl.tui.app.launch, trainctl.trainer.runtime"
    venv.run(venv.python, "-c", f"{bodies}; assert trainctl.tui.__file__.startswith({str(venv.packages)!r})")


def test_pip_upgrades_0_2_0_to_a_program_that_works(wheels: Path, tmp_path: Path) -> None:
    venv = old_release(tmp_path)
    venv.install("--no-index", "--no-deps", *sorted(wheels.glob("*.whl")))
    folder = venv.packages / "trainctl" / "protocol"
    assert files(folder) == files(ROOT / "protocol" / "trainctl" / "protocol"), "no file of 0.2.0 is left"
    assert_it_works(venv)
    venv.pip("uninstall", "--yes", "trainctl")
    assert files(folder) == files(ROOT / "protocol" / "trainctl" / "protocol"), "it removes no file of the client"
    venv.pip("uninstall", "--yes", "trainctl-client")
    assert files(venv.packages / "trainctl") == set(), "together they remove all"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_editable_projects_lie_beside_each_other() -> None:
    """As this checkout is installed: the parts of one namespace come from two projects."""
    code = "import trainctl.tui, trainctl.protocol; print(trainctl.tui.__file__, trainctl.protocol.__file__)"
    kept = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, check=True, cwd="/")
    assert re.findall(r"trainctl/(\w+)/__init__", done.stdout) == ["tui", "protocol"]
    assert all(Path(word).is_relative_to(ROOT) for word in done.stdout.split())
