"""The wheel and the source archive: reproducible and complete."""

import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conftest import ROOT
from tests.integration.support.packages import build_sdist, build_wheel, unpack_archive

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
    assert {name.split("/")[1] for name in files if name.startswith("trainctl/")} == set(remote_install.ROOMS)
    for room in remote_install.ROOMS:
        place = ROOT / room / "trainctl" / room
        assert {f"trainctl/{room}/{path.relative_to(place).as_posix()}" for path in place.rglob("*.py")} <= files
    documents = {name for name in files if name.startswith("trainctl/tui/docs/")}
    pages = {name for name in documents if name.endswith(".md")}
    schemas = {f"trainctl/tui/docs/{name}.schema.json" for name in ("run", "cluster", "config")}
    assert documents - pages == schemas, "`trainctl schema` prints each"
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    topics = re.findall(r"^\| \[([a-z-]+\.md)\]", index, re.MULTILINE)
    assert {f"trainctl/tui/docs/{name}" for name in ("README.md", *topics)} == pages, "`trainctl help` prints each"


def test_its_metadata_is_complete_and_a_script_needs_little(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
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
