"""tools/image.py without a build: pip and uv in the build have this machine's settings."""

import tomllib
from configparser import ConfigParser
from pathlib import Path

from tools import image

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
