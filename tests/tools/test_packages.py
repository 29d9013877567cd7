"""Tests of what an installation takes: the wheel's parts, lowest versions, and what make announces."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests.conftest import ROOT
from tests.integration.support.packages import build_sdist, build_wheel, unpack_archive
from tests.waiting import HANG_SECONDS

from tools import requirements
from trainctl import protocol
from trainctl.tui.setup import remote_install


class Built(NamedTuple):
    """The archives that were built of the checkout."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield Built(build_wheel(ROOT, folder), build_sdist(ROOT, folder))


def test_an_unpacked_archive_builds_the_same_bytes_at_another_place_and_time(built: Built, tmp_path: Path) -> None:
    (unpacked,) = unpack_archive(built.sdist, tmp_path).iterdir()
    for path in unpacked.rglob("*"):
        os.utime(path, (1.6e9, 1.6e9))
    assert build_wheel(unpacked, tmp_path / "again").read_bytes() == built.wheel.read_bytes()
    assert build_sdist(unpacked, tmp_path / "again").read_bytes() == built.sdist.read_bytes()
    with zipfile.ZipFile(built.wheel) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_the_source_archive_leaves_out_private_keys_that_make_keys_writes(tmp_path: Path) -> None:
    """With the checkout's .gitignore, and without it, as in an unpacked archive."""
    needed = ("pyproject.toml", "README.md", "LICENSE", "protocol/trainctl/protocol/__init__.py")
    for name in needed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    folder = tmp_path / "examples" / "deploy" / "kubernetes"
    for name in ("keys/secret/user.toml", "keys/x", "base/cluster.toml", "keys.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("planted", "utf-8")
    for ignored in ("", (ROOT / ".gitignore").read_text("utf-8")):
        (tmp_path / ".gitignore").write_text(ignored, "utf-8")
        with tarfile.open(build_sdist(tmp_path, tmp_path / "built")) as archive:
            planted = {name.partition("/kubernetes/")[2] for name in archive.getnames() if "/kubernetes/" in name}
        assert planted == {"base/cluster.toml", "keys.md"}


def test_the_wheel_has_all_parts(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        files = set(archive.namelist())
    packages = [path.parent for path in ROOT.glob("*/trainctl/*/__init__.py")]
    assert {place.name for place in packages} == {*remote_install.PACKAGES}
    assert {name.split("/")[1] for name in files if name.startswith("trainctl/")} == {place.name for place in packages}
    for place in packages:
        assert {f"trainctl/{place.name}/{path.relative_to(place).as_posix()}" for path in place.rglob("*.py")} <= files
    injected = ROOT / "protocol" / "trainctl" / "guest" / "inject"
    entry_points = [path.relative_to(injected.parents[2]).as_posix() for path in injected.rglob("entry_points.txt")]
    assert entry_points and {*entry_points} <= files, "Lightning finds its callback by them"
    documents = {name for name in files if name.startswith("trainctl/tui/docs/")}
    pages = {name for name in documents if name.endswith(".md")}
    schemas = {f"trainctl/tui/docs/{name}.schema.json" for name in ("run", "cluster", "config")}
    assert documents - pages == schemas, "`trainctl schema` prints each"
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    topics = re.findall(r"^\| \[([a-z-]+\.md)\]", index, re.MULTILINE)
    assert {f"trainctl/tui/docs/{name}" for name in ("README.md", *topics)} == pages, "`trainctl help` prints each"


def test_its_metadata_is_complete_and_a_script_needs_little(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = Parser().parsestr(archive.read(name).decode())
        assert any(file.endswith(".dist-info/licenses/LICENSE") for file in archive.namelist())
    needs = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[<>=!~ ;\[]", need)[0] for need in needs} == {
        "pyzmq", "msgpack", "msgspec", "platformdirs", "tomli-w",
    }  # fmt: skip
    assert (metadata["Name"], metadata["Version"]) == ("trainctl", protocol.__version__)
    assert version("trainctl") == protocol.__version__, "run make to install this checkout again"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text("utf-8").strip()


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


EXTRAS = ("tui", "nvidia", "parquet", "zstd", "prometheus", "tensorboard", "discovery")


def test_each_dependency_has_a_lowest_version_at_most_the_tested_one() -> None:
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    needs = [Requirement(line) for line in requirements.requirements(ROOT, EXTRAS)]
    assert {"numpy", "pyzmq", "textual", "tomli-w", "zeroconf"} <= {need.name for need in needs}
    for need in needs:
        (floor,) = (bound.version for bound in need.specifier if bound.operator == ">=")
        assert Version(floor) <= Version(tested[canonicalize_name(need.name)]), need.name
