"""The Dockerfile and the images that are built of it: clean, small, and as the checkout and the manifests need it."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.conftest import ROOT
from tests.deploy.support.builds import Build, Builds, mounts_under
from tests.deploy.support.containers import Containers, Image
from tests.deploy.support.manifests import FOLDERS, agent_of, containers, parsed, pods, rendered
from tests.integration.support.packages import build_wheel
from tests.waiting import HANG_SECONDS, slowness

from tools import image
from trainctl import protocol

FILE = ROOT / "examples" / "deploy" / "Dockerfile"
TEXT = FILE.read_text("utf-8")
IGNORED = (FILE.parent / "Dockerfile.dockerignore").read_text("utf-8").splitlines()


def stage(name: str) -> str:
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def extras_of(target: str) -> list[str]:
    """Return the extras whose requirements the target's layer of libraries has."""
    (words,) = re.findall(r"python3 requirements\.py ?(.*) > requirements\.txt", stage(f"{target}-dependencies"))
    return str(words).split()


def is_sent(path: str) -> bool:
    """Return whether a file is in the build's context: the last pattern that fits it, or a folder it is in, decides."""
    sent, own = True, PurePosixPath(path)
    for line in IGNORED:
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if line[:1] != "#" and any(re.fullmatch(pattern, str(each)) for each in (own, *own.parents)):
            sent = line[:1] == "!"
    return sent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the image's wheels are built: what COPY copies there of what is sent, and nothing else."""
    folder = tmp_path_factory.mktemp("src")
    for names, target in re.findall(r"^COPY (?!--)(.+) (\S+)$", stage("uv") + stage("program"), re.MULTILINE):
        for name in names.split():
            if name != ".":
                assert target.endswith("/") and is_sent(name), f"COPY {name} {target}"
                (folder / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / name, folder / target)
                continue
            for kept in (ROOT / line[1:] for line in IGNORED if line[:1] == "!"):
                for path in (kept, *kept.rglob("*")):
                    place = folder / path.relative_to(ROOT)
                    if path.is_file() and is_sent(path.relative_to(ROOT).as_posix()):
                        place.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(path, place)
    return folder


@pytest.fixture(scope="module")
def wheels(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheels that the image's build makes there, in its order."""
    (project,) = re.findall(r"--out-dir /wheels (\S+)", stage("program"))
    return [build_wheel(source / project, tmp_path_factory.mktemp("wheels"))]


def required(wheels: Sequence[Path], extras: Iterable[str]) -> set[str]:
    """Return what wheels need of other projects on this machine, by their own metadata."""
    found = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
            lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
        found |= {line for extra in ("", *extras) for line in taken(lines, extra)}
    return {line for line in found if not line.startswith("trainctl")}


def taken(lines: Iterable[str], extra: str) -> set[str]:
    """Return the requirements that hold on this machine, without their conditions."""
    return {
        f"{canonicalize_name(need.name)}[{','.join(sorted(need.extras))}]{need.specifier}"
        for need in map(Requirement, lines)
        if need.marker is None or need.marker.evaluate({"extra": extra})
    }


def test_hadolint_finds_nothing() -> None:
    command = [Path(sys.executable).with_name("hadolint"), "--no-color", "--format", "gnu", "-"]
    done = subprocess.run(command, input=TEXT, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_wheel_is_built_from_what_is_sent_and_is_whole(wheels: Sequence[Path]) -> None:
    names: set[str] = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names |= {*archive.namelist()}
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["trainctl"]
    for room in ("protocol", "node_agent", "trainer", "tui"):
        place = ROOT / room / "trainctl" / room
        assert {f"trainctl/{room}/{path.relative_to(place).as_posix()}" for path in place.rglob("*.py")} <= names
    assert "trainctl/tui/docs/deploy.md" in names
    kept_back = ("tools/pages.py", ".git/config", "examples/x.toml", "tui/trainctl/tui/__pycache__/x.pyc")
    assert not any(is_sent(name) for name in kept_back)


@pytest.mark.parametrize("target", image.TARGETS)
def test_the_libraries_of_each_image_are_those_that_its_wheels_need(
    source: Path, wheels: Sequence[Path], target: str
) -> None:
    extras = extras_of(target)
    command = [sys.executable, "-I", source / "requirements.py", *extras]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert taken(done.stdout.splitlines(), "") == required(wheels, extras)
    assert ("torch" in extras, "nvidia" in extras) == (target != "watch", target == "cuda")


def test_an_image_runs_a_program_under_an_init_as_the_user_and_with_the_volume_of_the_manifests() -> None:
    _, agent = agent_of(rendered("base"))
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", TEXT, re.MULTILINE)
    assert json.loads(entry) == agent["command"][:2] == ["tini", "--"]
    for name in image.TARGETS:
        (command,) = re.findall(r"^CMD (.+)$", stage(name), re.MULTILINE)
        parsed(json.loads(command))
        assert re.findall(r"^USER (.+)$", stage(name), re.MULTILINE) == ["1000:1000"]
        assert re.findall(r"^VOLUME (.+)$", stage(name), re.MULTILINE) == ["/var/lib/trainctl"]
    places = re.findall(r"^(?:ENV )? *(?:HOME|TRAINCTL_\w+)=(\S+)", stage("runtime"), re.MULTILINE)
    assert len(places) == 3 and all(place.startswith("/var/lib/trainctl") for place in places)
    mounts = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
    assert (mounts["state"], mounts["tmp"]) == ("/var/lib/trainctl", "/tmp")
    images = [item["image"] for folder in FOLDERS for pod in pods(rendered(folder)) for item in containers(pod)]
    assert {name.partition(":")[2] for name in images if name.startswith("trainctl")} == {*image.TARGETS}


MOST_WATCH_BYTES = 150e6
MOST_COLD_SECONDS, MOST_EDIT_SECONDS = 600.0, 20.0
EDIT = "PLANTED = 1\n"


def shown(target: str, sizes: list[int], first: Build) -> None:
    parts = ", ".join(f"{size / 1e6:.1f}" for size in sizes)
    print(
        f"\n{target}: {sum(sizes) / 1e6:.0f} MB compressed (base and layers: {parts}), cold in {first.seconds:.0f} s,"
        f" load {slowness():.1f}"
    )


@pytest.mark.tier("soak")
@pytest.mark.needs("buildah")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["watch", "torch"])
def test_an_image_is_built_without_a_registry(builds: Builds, target: str, tmp_path: Path) -> None:
    built = builds[target]
    sizes = builds.compressed(built.name, tmp_path)
    shown(target, sizes, built)
    assert built.seconds < MOST_COLD_SECONDS * slowness()
    assert target != "watch" or sum(sizes) < MOST_WATCH_BYTES
    with Image.mounted(built.name, **builds.env) as image:
        assert not (image.root / "opt" / "uv").exists() and not [*(image.root / "src").glob("*")]
        assert not [*(image.root / "var/lib/apt/lists").glob("*")] and not [*(image.root / "root").glob(".cache/*")]
        assert image.user == [1000, 1000] and (image.root / "opt/trainctl/bin/trainctl").stat().st_uid == 0
        assert [path for path in _others_write(image.root) if path.name not in ("tmp", "lock")] == []


def _others_write(root: Path) -> list[Path]:
    """The folders of an image in which each user may write."""
    folders = [Path(folder) for folder, _, _ in os.walk(root)]
    return [folder for folder in folders if folder.stat().st_mode & stat.S_IWOTH]


@pytest.mark.tier("soak")
@pytest.mark.needs("buildah")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["watch", "torch"])
def test_an_edit_of_the_source_builds_only_the_last_layer_again(builds: Builds, target: str) -> None:
    before = builds.layers(builds[target].name)
    file = builds.source / "tui" / "trainctl" / "tui" / "__init__.py"
    text = file.read_text("utf-8")
    file.write_text(text + EDIT, "utf-8")
    try:
        again = builds.build(target)
    finally:
        file.write_text(text, "utf-8")
    print(f"\n{target}: built again after an edit in {again.seconds:.1f} s, load {slowness():.1f}")
    after = builds.layers(again.name)
    assert len(after) == len(before) and [old == new for old, new in zip(before, after, strict=True)].count(False) == 1
    with Image.mounted(again.name, **builds.env) as image:
        (copied,) = image.root.glob("opt/trainctl/lib/python3*/site-packages/trainctl/tui/__init__.py")
        assert copied.read_text("utf-8") == text + EDIT
    assert again.seconds < MOST_EDIT_SECONDS * slowness()


@pytest.mark.tier("soak")
@pytest.mark.needs("buildah")
@pytest.mark.timeout(3600)
@pytest.mark.needs("runc", "namespaces")
def test_the_watch_image_runs_trainctl_and_nothing_of_it_is_left(builds: Builds, tmp_path: Path) -> None:
    words = ["tini", "--", "trainctl", "--version"]
    with Image.mounted(builds["watch"].name, **builds.env) as image:
        containers = Containers(tmp_path)
        try:
            process = containers.start("watch", image.configuration(words, {}, [], Path("/proc/self/ns/net")))
            assert process.wait(600) == 0, containers.said("watch")
        finally:
            containers.close()
        assert containers.said("watch") == f"trainctl {protocol.__version__}\n"
        assert containers.left() == []
        root = image.root
    assert mounts_under(root) == []
