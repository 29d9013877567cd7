"""Images and Debian systems that tools build, and pictures that move: by this machine's settings alone."""

import tomllib
import xml.etree.ElementTree as ElementTree
from configparser import ConfigParser
from pathlib import Path

import pytest
from tests.conftest import ROOT

from tools import debian_root, image, moving_picture

SETTINGS = {
    "cert": "/cas/all.crt",
    "extra-index-url": "file:///disk/simple https://more.example/simple",
    "index-url": "https://index.example/simple",
    "default-timeout": "180",
}


def test_pip_and_uv_read_this_machines_settings_and_its_torch_is_taken(tmp_path: Path) -> None:
    (wheels := tmp_path / "wheels").mkdir()
    settings = SETTINGS | {"find-links": f"file://{wheels} /not/there https://wheels.example"}
    options = [*image.machine_options("torch", settings, tmp_path)]
    assert options[::2] == ["--volume"] * 4
    assert options[1::2] == [
        f"{tmp_path}/pip.conf:/etc/pip.conf:ro",
        f"{tmp_path}/uv.toml:/etc/uv/uv.toml:ro",
        f"{wheels}:{wheels}:ro",
        "/cas/all.crt:/etc/ssl/certs/ca-certificates.crt:ro",
    ]
    pip = ConfigParser()
    pip.read(tmp_path / "pip.conf")
    assert dict(pip["global"]) == {
        "cert": "/etc/ssl/certs/ca-certificates.crt",
        "extra-index-url": "https://more.example/simple",
        "find-links": f"{wheels} https://wheels.example",
        "index-url": "https://index.example/simple",
    }
    uv = tomllib.loads((tmp_path / "uv.toml").read_text("utf-8"))
    assert (uv["index-url"], uv["extra-index-url"]) == (pip["global"]["index-url"], ["https://more.example/simple"])
    assert uv["find-links"] == [str(wheels), "https://wheels.example"]
    assert (uv["system-certs"], uv["index-strategy"]) == (True, "unsafe-best-match")
    (wheels / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert [*image.machine_options("torch", settings, tmp_path)][-2:] == ["--build-arg", "TORCH_BACKEND="]
    assert [*image.machine_options("watch", settings, tmp_path)] == options
    assert f"{wheels}:{wheels}:ro" not in image.machine_options("cuda", settings, tmp_path), "that torch is for CPUs"


def test_a_command_sees_the_checkout_and_pips_settings_and_nothing_else_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, config = tmp_path / "own.pem", tmp_path / "pip.conf"
    certificate.touch()
    config.write_text(f"[global]\ncert = /other.crt\n[install]\ncert = {certificate}\n[freeze]\nfind-links = /x\n")
    for name in ("PIP_CERT", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "180")
    line = debian_root.command_line(tmp_path / "root", ["python3", "--version"])
    environment = line[2 : line.index("unshare")]
    assert line[:2] == ["env", "-i"]
    assert {f"PIP_CERT={certificate}", "PIP_DEFAULT_TIMEOUT=180", f"CHECKOUT={ROOT}"} <= {*environment}
    mounted = line[line.index(str(tmp_path / "root")) + 1 : line.index("--")]
    assert {str(ROOT), str(certificate)} <= {*mounted} and "/x" not in mounted
    assert line[line.index("--") + 1 :] == ["python3", "--version"]
    assert Path(f"{tmp_path}/root{ROOT}").is_dir() and Path(f"{tmp_path}/root{certificate}").is_file()


def test_of_what_settings_name_only_what_is_there_is_mounted_and_never_the_whole_machine(tmp_path: Path) -> None:
    wheels, simple = tmp_path / "wheels", tmp_path / "index" / "simple"
    wheels.mkdir()
    simple.mkdir(parents=True)
    settings = {"a": f"{wheels} {tmp_path / 'none'} 180", "b": f"file://{simple}\nhttps://example.org/simple"}
    assert [*debian_root.local_paths(settings)] == [wheels, simple.parent]
    assert [*debian_root.local_paths({"find-links": "file:///usr"})] == [Path("/usr")]


PICTURE = '<svg viewBox="0 0 10 20" xmlns="http://www.w3.org/2000/svg"><text class="a-{0}">{0}</text></svg>'


def test_each_picture_has_its_turn() -> None:
    text = moving_picture.moving([PICTURE.format(number) for number in range(3)], seconds=2.0)
    root = ElementTree.fromstring(text)
    assert [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")] == ["0", "1", "2"]
    assert all(f".scene-{number} {{ animation-delay: {at}s; }}" in text for number, at in enumerate((-6, -4, -2)))
