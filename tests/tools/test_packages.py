"""The two projects' wheels and source archives: reproducible, apart, complete, and of one version."""

import hashlib
import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import ROOT
from tests.integration.support.packages import build_sdist, build_wheel, unpack_archive

from trainctl import protocol

NOT_IN_CLIENT = ("textual", "numpy", "psutil", "typer", "setproctitle")
EPOCH = "1700000000"


class Project(NamedTuple):
    """A project's folder and what was built of it."""

    folder: Path
    wheel: Path
    sdist: Path

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return Parser().parsestr(archive.read(name).decode())

    def files(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Project]]:
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", EPOCH)
        yield {
            name: Project(place, build_wheel(place, folder), build_sdist(place, folder))
            for name, place in (("trainctl", ROOT), ("trainctl-client", ROOT / "protocol"))
        }


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["trainctl", "trainctl-client"])
def test_an_unpacked_archive_builds_the_same_bytes_at_another_place_and_time(
    projects: dict[str, Project], name: str, tmp_path: Path
) -> None:
    first = projects[name]
    (unpacked,) = unpack_archive(first.sdist, tmp_path).iterdir()
    for path in unpacked.rglob("*"):
        os.utime(path, (1.6e9, 1.6e9))
    assert digest(build_wheel(unpacked, tmp_path / "again")) == digest(first.wheel)
    assert digest(build_sdist(unpacked, tmp_path / "again")) == digest(first.sdist)


def test_the_source_archive_leaves_out_private_keys_that_make_keys_writes(tmp_path: Path) -> None:
    """With the checkout's .gitignore, and without it, as in an unpacked archive."""
    needed = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "protocol/trainctl/protocol/__init__.py")
    for name in needed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    folder = tmp_path / "examples" / "deploy" / "kubernetes"
    for name in ("keys/secret/user.toml", "keys/trainctl-0/agent.toml", "keys/x", "base/cluster.toml", "keys.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("planted", "utf-8")
    for ignored in ("", (ROOT / ".gitignore").read_text("utf-8")):
        (tmp_path / ".gitignore").write_text(ignored, "utf-8")
        with tarfile.open(build_sdist(tmp_path, tmp_path / "built")) as archive:
            planted = {name.partition("/kubernetes/")[2] for name in archive.getnames() if "/kubernetes/" in name}
        assert planted == {"base/cluster.toml", "keys.md"}


def test_time_stamps_are_those_of_the_epoch_that_is_set(projects: dict[str, Project]) -> None:
    for project in projects.values():
        with zipfile.ZipFile(project.wheel) as archive:
            assert {info.date_time for info in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_the_wheels_share_no_file_and_have_all_parts(projects: dict[str, Project]) -> None:
    client, program = projects["trainctl-client"].files(), projects["trainctl"].files()
    assert not client & program
    parts = {name.split("/")[1] for name in program if name.startswith("trainctl/")}
    assert parts == {"tui", "node_agent", "trainer"}
    assert {name.split("/")[1] for name in client if name.startswith("trainctl/")} == {"protocol"}
    for room in ("tui", "node_agent", "trainer", "protocol"):
        place = ROOT / room / "trainctl" / room
        sources = {f"trainctl/{room}/{path.relative_to(place).as_posix()}" for path in place.rglob("*.py")}
        assert sources <= client | program


def test_both_have_one_version_and_the_program_needs_that_client(projects: dict[str, Project]) -> None:
    found = {name: project.metadata() for name, project in projects.items()}
    assert {metadata["Version"] for metadata in found.values()} == {protocol.__version__}
    needs = found["trainctl"].get_all("Requires-Dist", [])
    assert f"trainctl-client=={protocol.__version__}" in needs
    assert {version(name) for name in projects} == {protocol.__version__}, "run make to install this checkout again"
    for project in projects.values():
        text = (project.folder / "pyproject.toml").read_text("utf-8")
        assert not re.search(rf'"{re.escape(protocol.__version__)}"', text), "the version is in one place"


def test_metadata_are_complete(projects: dict[str, Project]) -> None:
    for name, project in projects.items():
        metadata = project.metadata()
        assert metadata["Name"] == name
        assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
        assert metadata["Requires-Python"] == ">=3.11"
        assert metadata["Summary"] and metadata["Author"] and metadata["Keywords"]
        classifiers = metadata.get_all("Classifier", [])
        assert "Programming Language :: Python :: 3.11" in classifiers and "Typing :: Typed" in classifiers
        readme = (project.folder / "README.md").read_text("utf-8")
        assert str(metadata.get_payload()).strip() == readme.strip()
        assert any(file.endswith(".dist-info/licenses/LICENSE") for file in project.files())
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "protocol" / "LICENSE").read_bytes()


def test_the_client_needs_five_libraries(projects: dict[str, Project]) -> None:
    needs = projects["trainctl-client"].metadata().get_all("Requires-Dist", [])
    names = {re.split(r"[<>=!~ ;\[]", need)[0] for need in needs}
    assert names == {"pyzmq", "msgpack", "msgspec", "platformdirs", "tomli-w"}
    assert set(needs) <= set(projects["trainctl"].metadata().get_all("Requires-Dist", [])), "with the same bounds"
