"""tools/image.py without a build: what it gives to buildah and mmdebstrap, and what it says where they are missing."""

import shutil
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
from tests.conftest import ROOT

from tools import image

SETTINGS = {
    "cert": "/cas/all.crt",
    "extra-index-url": "file:///disk/simple https://more.example/simple",
    "index-url": "https://index.example/simple",
    "default-timeout": "180",
}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


def options(wheels: Path, tmp_path: Path, target: str = "torch") -> list[str]:
    given = SETTINGS | {"find-links": f"file://{wheels} /not/there https://wheels.example"}
    return [*image.machine_options(target, given, tmp_path)]


def test_pip_and_uv_read_this_machines_settings(wheels: Path, tmp_path: Path) -> None:
    assert options(wheels, tmp_path) == [
        "--volume", f"{tmp_path}/pip.conf:/etc/pip.conf:ro",
        "--volume", f"{tmp_path}/uv.toml:/etc/uv/uv.toml:ro",
        "--volume", f"{wheels}:{wheels}:ro",
        "--volume", "/cas/all.crt:/etc/ssl/certs/ca-certificates.crt:ro",
    ]  # fmt: skip
    pip = ConfigParser()
    pip.read(tmp_path / "pip.conf")
    assert dict(pip["global"]) == {
        "cert": "/etc/ssl/certs/ca-certificates.crt",
        "extra-index-url": "https://more.example/simple",
        "find-links": f"{wheels} https://wheels.example",
        "index-url": "https://index.example/simple",
    }
    assert tomllib.loads((tmp_path / "uv.toml").read_text("utf-8")) == {
        "system-certs": True,
        "index-strategy": "unsafe-best-match",
        "extra-index-url": ["https://more.example/simple"],
        "find-links": [str(wheels), "https://wheels.example"],
        "index-url": "https://index.example/simple",
    }


def test_a_torch_among_the_wheels_is_the_one_that_is_meant(wheels: Path, tmp_path: Path) -> None:
    (wheels / "torch-2.13.0+cpu-cp312-cp312-linux_x86_64.whl").touch()
    assert "--build-arg" not in options(wheels, tmp_path)
    (wheels / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert options(wheels, tmp_path)[-2:] == ["--build-arg", "TORCH_BACKEND="]
    assert "--build-arg" not in options(wheels, tmp_path, "watch")
    assert f"{wheels}:{wheels}:ro" not in options(wheels, tmp_path, "cuda"), "that torch is one for CPUs"


def test_the_dockerfile_takes_what_it_is_given() -> None:
    text = (ROOT / "examples" / "deploy" / "Dockerfile").read_text("utf-8")
    assert all(f"FROM runtime AS {target}\n" in text for target in image.TARGETS)
    assert {"ARG BASE=", "ARG TORCH_BACKEND="} <= {line[: line.find("=") + 1] for line in text.splitlines()}
    command = image.build_command("torch", ["--no-cache"])
    assert command[:2] == ["buildah", "bud"] and command[-2:] == ["--no-cache", str(ROOT)]
    assert all(Path(command[command.index(name) + 1]).is_file() for name in ("--file", "--ignorefile"))


def test_the_base_is_what_the_dockerfile_needs_of_one(tmp_path: Path) -> None:
    command = image.base_command(tmp_path / "base.tar")
    (packages,) = (word.removeprefix("--include=").split(",") for word in command if word.startswith("--include="))
    assert {"python3", "python3-venv", "ca-certificates"} <= {*packages}
    assert command[-2:] == [image.SUITE, f"{tmp_path}/base.tar"]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert image.main([]) == 2 and image.main(["tocrh"]) == 2
    assert "no target 'tocrh'; choose watch, torch, cuda\n" in capsys.readouterr().err
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "mmdebstrap" else program)
    assert image.main(["watch"]) == 2
    expected = "image: mmdebstrap not found; install it: apt-get install buildah mmdebstrap\n"
    assert capsys.readouterr().err == expected
