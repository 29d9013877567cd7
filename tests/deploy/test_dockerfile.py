"""The Dockerfile: clean by hadolint, and as the checkout and the manifests need it."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.conftest import ROOT
from tests.deploy import manifest_rules
from tests.deploy.command_lines import parsed
from tests.deploy.rendering import GROUPS, rendered
from tests.integration.support.packages import build_wheel
from tests.waiting import HANG_SECONDS

from tools import requirements

FILE = ROOT / "examples" / "deploy" / "Dockerfile"
TEXT = FILE.read_text("utf-8")
TARGETS = ("watch", "torch", "cuda")
COPIED = r"^COPY (?!--)(.+) (\S+)$"


def hadolint(text: str) -> str:
    """What it finds, one rule and place per line."""
    command = [Path(sys.executable).with_name("hadolint"), "--no-color", "--format", "gnu", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    return done.stdout


def stage(name: str) -> str:
    """The lines of a stage."""
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def extras_of(target: str) -> list[str]:
    """Those whose requirements its layer of libraries has."""
    (words,) = re.findall(r"python3 requirements\.py ?(.*) > requirements\.txt", stage(f"{target}-dependencies"))
    return str(words).split()


def is_sent(path: str) -> bool:
    """Whether the file of the checkout is in the build's context: the last pattern that fits it, or a folder that it
    is in, decides."""
    sent, own = True, PurePosixPath(path)
    for line in (FILE.parent / "Dockerfile.dockerignore").read_text("utf-8").splitlines():
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if line[:1] != "#" and any(re.fullmatch(pattern, str(each)) for each in (own, *own.parents)):
            sent = line[:1] == "!"
    return sent


def kept() -> list[str]:
    """The files and folders of the checkout that are in the build's context."""
    lines = (FILE.parent / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    return [line[1:] for line in lines if line[:1] == "!"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the image's wheels are built: what COPY copies there of what is sent, and nothing else."""
    folder = tmp_path_factory.mktemp("src")
    for names, target in re.findall(COPIED, stage("uv") + stage("program"), re.MULTILINE):
        for name in names.split():
            if name == ".":
                copy_sent(folder / target)
            else:
                assert target.endswith("/") and is_sent(name), f"COPY {name} {target}"
                (folder / target).mkdir(exist_ok=True)
                shutil.copy(ROOT / name, folder / target)
    return folder


def copy_sent(target: Path) -> None:
    """As `COPY . TARGET`."""
    for path in (path for name in kept() for path in (ROOT / name, *(ROOT / name).rglob("*"))):
        name = path.relative_to(ROOT).as_posix()
        if path.is_file() and is_sent(name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / name)


@pytest.fixture(scope="module")
def wheels(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Those that the image's build makes there, in its order."""
    (projects,) = re.findall(r"for project in (.*); do", stage("program"))
    folder = tmp_path_factory.mktemp("wheels")
    return [build_wheel(source / project, folder) for project in projects.split()]


def required(wheels: Sequence[Path], extras: Iterable[str]) -> set[str]:
    """What wheels need of other projects on this machine, by their own metadata."""
    found = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
        found |= {line for extra in ("", *extras) for line in taken(lines, extra)}
    return {line for line in found if not line.startswith("trainctl")}


def taken(lines: Iterable[str], extra: str) -> set[str]:
    """The requirements that hold on this machine, without their conditions."""
    parsed_lines = [Requirement(line) for line in lines]
    return {
        f"{canonicalize_name(one.name)}[{','.join(sorted(one.extras))}]{one.specifier}"
        for one in parsed_lines
        if one.marker is None or one.marker.evaluate({"extra": extra})
    }


def test_hadolint_finds_nothing_but_what_is_planted() -> None:
    assert hadolint(TEXT) == ""
    assert "DL3015" in hadolint(TEXT.replace(" --no-install-recommends", ""))


def test_what_is_copied_is_there_and_not_ignored() -> None:
    copied = {name for line in re.findall(COPIED, TEXT, re.MULTILINE) for name in line[0].split()} - {"."}
    assert "pyproject.toml" in copied and all((ROOT / name).is_file() and is_sent(name) for name in copied)
    assert all((ROOT / name).exists() for name in kept())


def test_a_file_is_sent_only_if_the_dockerignore_says_so() -> None:
    sent = ("docs/deploy.md", "tools/requirements.py", "tui/trainctl/tui/__init__.py")
    kept_back = ("tools/pictures.py", ".git/config", "examples/x.toml", "tui/trainctl/tui/__pycache__/x.pyc")
    assert all(is_sent(name) for name in sent) and not any(is_sent(name) for name in kept_back)


def test_both_wheels_are_built_from_what_is_copied_and_are_whole(wheels: Sequence[Path]) -> None:
    """As they are built from the checkout."""
    names: set[str] = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names |= {*archive.namelist()}
    assert [wheel.name.split("-")[0] for wheel in wheels] == ["trainctl_client", "trainctl"]
    for room in ("protocol", "node_agent", "trainer", "tui"):
        place = ROOT / room / "trainctl" / room
        assert {f"trainctl/{room}/{path.relative_to(place).as_posix()}" for path in place.rglob("*.py")} <= names
    assert "trainctl/tui/docs/deploy.md" in names


def test_the_libraries_of_each_image_are_those_that_its_wheels_need(source: Path, wheels: Sequence[Path]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for extra in known:
        assert taken(requirements.requirements(source, [extra]), "") == required(wheels, [extra]), extra
    for extras in map(extras_of, TARGETS):
        printed = subprocess.run(
            [sys.executable, "-I", source / "requirements.py", *extras],
            cwd=source, capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
        ).stdout  # fmt: skip
        assert taken(printed.splitlines(), "") == required(wheels, extras), extras
    assert {"torch", "numpy", "pyzmq"} <= {re.split(r"[\[<>=]", line)[0] for line in required(wheels, ["torch"])}


def test_an_unknown_extra_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert requirements.main(["torhc"]) == 2
    assert capsys.readouterr().err == "requirements: pyproject.toml has no extra 'torhc'\n"


def test_extras_are_the_packages_and_none_is_for_watching() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    extras = {name: {*extras_of(name)} for name in TARGETS}
    assert extras["watch"] == set() and {"torch", "prometheus"} <= extras["torch"] < extras["cuda"] <= {*known}
    assert extras["cuda"] - extras["torch"] == {"nvidia"}


def test_containers_run_as_a_user_with_all_that_they_write_on_a_volume() -> None:
    for name in TARGETS:
        assert re.findall(r"^USER (.+)$", stage(name), re.MULTILINE) == ["1000:1000"]
        assert re.findall(r"^VOLUME (.+)$", stage(name), re.MULTILINE) == ["/var/lib/trainctl"]
    places = re.findall(r"^(?:ENV )? *(HOME|TRAINCTL_\w+)=(\S+)", stage("runtime"), re.MULTILINE)
    assert [name for name, _ in places] == ["HOME", "TRAINCTL_STATE", "TRAINCTL_KEYS"]
    assert all(place.startswith("/var/lib/trainctl") for _, place in places)


def test_each_image_starts_a_program_under_an_init() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", TEXT, re.MULTILINE)
    assert json.loads(entry) == ["tini", "--"]
    for name in TARGETS:
        (command,) = re.findall(r"^CMD (.+)$", stage(name), re.MULTILINE)
        parsed(json.loads(command))


def test_the_manifests_name_its_targets_and_run_them_as_it_says() -> None:
    for folder in (*GROUPS, "overlays/scale-to-zero"):
        for where, template in manifest_rules.pods(rendered(folder)):
            own = [one for one in manifest_rules.containers(template) if one["image"].startswith("trainctl")]
            assert {one["image"].partition(":")[2] for one in own} <= {*TARGETS}, where
            assert template["spec"]["securityContext"]["runAsUser"] == 1000
    ((_, agent),) = manifest_rules.agents(rendered("base"))
    assert agent["command"] == ["tini", "--", "trainctl-agent", "run"]
    mounts = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
    assert mounts["state"] == "/var/lib/trainctl" and mounts["tmp"] == "/tmp"
