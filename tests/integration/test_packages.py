"""The client library alone, and the wheel in environments of its own: without extras, over 0.2.0, beside an index."""

import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.integration.conftest import AgentProcess
from tests.integration.support.client_alone import BLOCKED, DRIVE
from tests.integration.support.packages import Venv, build_wheel
from tests.tui.support.cli_calls import ENVIRONMENT
from tests.waiting import HANG_SECONDS

from trainctl import protocol
from trainctl.protocol.machine import shim
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.schema import open_for_reading

OUR_NAMES, FOREIGN = ("trainctl", "trainctl-client"), "99.0"
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """Has trainctl without extras."""
    made = Venv(tmp_path_factory.mktemp("bare") / "venv")
    made.link(*LIBRARIES)
    made.install("--no-index", wheel)
    return made


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


def test_a_program_without_its_extra_prints_the_line_that_installs_it(bare: Venv) -> None:
    for program in ("trainctl", "trainctl-agent"):
        done = subprocess.run([bare.programs / program, "--version"], capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stdout == ""
        assert re.fullmatch(rf"{program}: \w+ is not installed; in a .*: pip install '\.\[tui\]'\n", done.stderr)


def test_pip_upgrades_0_2_0_to_a_program_that_works(wheel: Path, tmp_path: Path) -> None:
    """The second package of 0.2.0 goes first, by docs/install.md."""
    venv = old_release(tmp_path)
    venv.pip("uninstall", "--yes", "trainctl-client")
    venv.install("--no-index", "--no-deps", wheel)
    for room in ("protocol", "tui", "node_agent", "trainer"):
        kept = {name for name in files(venv.packages / "trainctl" / room) if not name.startswith("docs/")}
        assert kept == files(ROOT / room / "trainctl" / room), "no file of 0.2.0 is left, and none is missing"
    assert_it_works(venv)
    venv.pip("uninstall", "--yes", "trainctl")
    assert files(venv.packages / "trainctl") == set()


def test_a_second_package_that_an_upgrade_left_is_named_and_its_removal_answered(wheel: Path, tmp_path: Path) -> None:
    venv = old_release(tmp_path)
    venv.install("--no-index", "--no-deps", wheel)
    assert "trainctl-client 0.2.0 is installed there" in run_doctor(venv)
    venv.pip("uninstall", "--yes", "trainctl-client")
    done = subprocess.run([venv.programs / "trainctl", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "--force-reinstall" in done.stderr and done.stderr.count("\n") == 1
    venv.install("--no-index", "--no-deps", "--force-reinstall", wheel)
    assert_it_works(venv)


def run_doctor(venv: Venv) -> str:
    words = [venv.programs / "trainctl", "doctor", "--connect", "tcp://127.0.0.1:9"]
    return subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, check=False).stdout


class Index:
    """A package index on loopback that has higher versions of our names, and keeps what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        for name in OUR_NAMES:
            place = folder / name
            place.mkdir(parents=True)
            file = f"{name.replace('-', '_')}-{FOREIGN}"
            with zipfile.ZipFile(place / f"{file}-py3-none-any.whl", "w") as archive:
                text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {FOREIGN}\nProvides-Extra: tui\n"
                archive.writestr(f"{file}.dist-info/METADATA", text)
                archive.writestr(f"{file}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
                archive.writestr(f"{file}.dist-info/RECORD", "")
        index = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(folder))

            def log_message(self, *arguments: Any) -> None:
                index.asked.append(self.path)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    planted = Index(tmp_path / "index")
    thread = threading.Thread(target=planted.server.serve_forever)
    thread.start()
    yield planted
    planted.server.shutdown()
    thread.join()
    planted.server.server_close()


@pytest.mark.parametrize("editable", [False, True])
def test_no_path_takes_our_names_from_an_index(wheel: Path, index: Index, tmp_path: Path, *, editable: bool) -> None:
    """An installation of a checkout or a wheel with extras, as README, make, cluster add and the images do it."""
    venv = Venv(tmp_path / "venv")
    venv.link()
    wanted = ["--no-build-isolation", "-e", f"{ROOT}[torch,mlx]"] if editable else [f"{wheel}[torch,mlx]"]
    venv.install("--index-url", index.url, *wanted)
    assert venv.run(venv.programs / "trainctl", "--version") == f"trainctl {protocol.__version__}\n"
    listed = {each.name.partition(".dist-info")[0] for each in venv.packages.glob("trainctl*.dist-info")}
    assert listed == {f"trainctl-{protocol.__version__}"}
    assert not any(name in path for path in index.asked for name in OUR_NAMES)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


BLOCKER = f"""
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(name + " is not a dependency of the client library")

sys.meta_path.insert(0, Blocker())
"""


RECORD = """
from pathlib import Path
from trainctl.protocol import messages as m
from trainctl.protocol.record.rank_record import MetricsWriter

writer = MetricsWriter(Path(sys.argv[1]), "here")
for step in range(1, 4):
    writer.append(m.Report(
        run="r", rank=0, generation=m.Generation(1, 1), seq=step, kind="train", step=step, loss_sum=1.0, weight=2.0,
        own_weight=2.0, own_samples=1,
    ))
writer.close()
"""

KEEP = """
import runpy
path = sys.argv.pop(1)
runpy.run_path(path, run_name="__main__")
"""


def python(code: str, *arguments: str) -> str:
    """Return what a program prints to which none of BLOCKED can be imported."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", BLOCKER + code, *arguments], env=ENVIRONMENT, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.tier("test")
def test_a_client_attaches_commands_and_reads_history(live: AgentProcess) -> None:
    said = json.loads(python(DRIVE, live.address))
    assert said["state"] == "applied"
    assert said["committed"] >= said["step"] > 0
    assert said["run"] in said["runs"], "other tests may have had runs on this agent"
    assert {*said["points"]} == {"loss", "busy_seconds"} and all(said["points"].values())


@pytest.mark.tier("test")
def test_a_rank_keeps_its_record(tmp_path: Path) -> None:
    python(RECORD, str(tmp_path / "rank-0.db"))
    connection = open_for_reading(tmp_path / "rank-0.db")
    steps = [step for (step,) in connection.execute("SELECT step FROM rank_steps ORDER BY step")]
    connection.close()
    assert steps == [1, 2, 3]


@pytest.mark.tier("test")
def test_the_shim_keeps_an_exit_status(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    record, log = paths.process(0), tmp_path / "rank-0.log"
    python(KEEP, shim.__file__, "--record", str(record), "--log", str(log), "--", "/bin/sh", "-c", "echo hi; exit 5")
    assert json.loads(record.read_text())["exit_status"] == 5
    assert log.read_text() == "hi\n"


@pytest.mark.tier("test")
def test_what_is_blocked_is_missed() -> None:
    assert "numpy is not" in python("try:\n    import numpy\nexcept ImportError as error:\n    print(error)")
