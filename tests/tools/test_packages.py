"""The two projects' wheels and source archives: reproducible, apart, complete, and of one version."""

import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.integration.support.packages import build_sdist, build_wheel, unpack_archive

from trainctl import protocol


@dataclass(frozen=True)
class Project:
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
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        yield {
            name: Project(place, build_wheel(place, folder), build_sdist(place, folder))
            for name, place in (("trainctl", ROOT), ("trainctl-client", ROOT / "protocol"))
        }


@pytest.mark.parametrize("name", ["trainctl", "trainctl-client"])
def test_an_unpacked_archive_builds_the_same_bytes_at_another_place_and_time(
    projects: dict[str, Project], name: str, tmp_path: Path
) -> None:
    first = projects[name]
    (unpacked,) = unpack_archive(first.sdist, tmp_path).iterdir()
    for path in unpacked.rglob("*"):
        os.utime(path, (1.6e9, 1.6e9))
    assert build_wheel(unpacked, tmp_path / "again").read_bytes() == first.wheel.read_bytes()
    assert build_sdist(unpacked, tmp_path / "again").read_bytes() == first.sdist.read_bytes()
    with zipfile.ZipFile(first.wheel) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_the_source_archive_leaves_out_private_keys_that_make_keys_writes(tmp_path: Path) -> None:
    """With the checkout's .gitignore, and without it, as in an unpacked archive."""
    needed = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "protocol/trainctl/protocol/__init__.py")
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


def test_the_wheels_share_no_file_and_have_all_parts(projects: dict[str, Project]) -> None:
    client, program = projects["trainctl-client"].files(), projects["trainctl"].files()
    assert not client & program
    parts = {name.split("/")[1] for name in program if name.startswith("trainctl/")}
    assert parts == {"tui", "node_agent", "trainer"}
    for room in (*parts, "protocol"):
        place = ROOT / room / "trainctl" / room
        sources = {f"trainctl/{room}/{path.relative_to(place).as_posix()}" for path in place.rglob("*.py")}
        assert sources <= (client if room == "protocol" else program)
    pages = {name for name in program if name.startswith("trainctl/tui/docs/")}
    assert {name.rpartition(".")[2] for name in pages} == {"md"}
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    topics = re.findall(r"^\| \[([a-z-]+\.md)\]", index, re.MULTILINE)
    assert {f"trainctl/tui/docs/{name}" for name in ("README.md", *topics)} == pages, "`trainctl help` prints each"


def test_both_have_one_version_complete_metadata_and_the_program_needs_that_client(
    projects: dict[str, Project],
) -> None:
    needs = {name: set(project.metadata().get_all("Requires-Dist", [])) for name, project in projects.items()}
    assert f"trainctl-client=={protocol.__version__}" in needs["trainctl"]
    assert needs["trainctl-client"] <= needs["trainctl"], "with the same bounds"
    client = {re.split(r"[<>=!~ ;\[]", need)[0] for need in needs["trainctl-client"]}
    assert client == {"pyzmq", "msgpack", "msgspec", "platformdirs", "tomli-w"}
    for name, project in projects.items():
        metadata = project.metadata()
        assert (metadata["Name"], metadata["Version"]) == (name, protocol.__version__)
        assert version(name) == protocol.__version__, "run make to install this checkout again"
        assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
        assert str(metadata.get_payload()).strip() == (project.folder / "README.md").read_text("utf-8").strip()
        assert any(file.endswith(".dist-info/licenses/LICENSE") for file in project.files())
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "protocol" / "LICENSE").read_bytes()
