"""The Dockerfile: clean by hadolint, and as the checkout and the manifests need it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.deploy import manifest_rules
from tests.deploy.command_lines import parsed
from tests.deploy.rendering import GROUPS, rendered
from tests.waiting import HANG_SECONDS

FILE = ROOT / "examples" / "deploy" / "Dockerfile"
TEXT = FILE.read_text("utf-8")
TARGETS = ("watch", "torch", "cuda")


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


def test_hadolint_finds_nothing_but_what_is_planted() -> None:
    assert hadolint(TEXT) == ""
    assert "DL3015" in hadolint(TEXT.replace(" --no-install-recommends", ""))


def test_what_is_copied_is_there_and_not_ignored() -> None:
    copied = {name for line in re.findall(r"^COPY (?!--)(.+) \S+$", TEXT, re.MULTILINE) for name in line.split()}
    kept = [
        line[1:] for line in (FILE.parent / "Dockerfile.dockerignore").read_text("utf-8").split("\n") if line[:1] == "!"
    ]
    assert copied == {*kept} and all((ROOT / name).exists() for name in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {Path(name).parts[0] for name in (*packages["packages"], *packages["force-include"])} <= copied


def test_extras_are_the_packages_and_none_is_for_watching() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    extras = {name: {*re.findall(r"--extra (\w+)", stage(f"{name}-dependencies"))} for name in TARGETS}
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


@pytest.mark.needs("kubectl")
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
