"""What a bare Debian system gets of this machine: pip's settings, the folders that they name, and the checkout."""

from pathlib import Path

import pytest
from tests.conftest import ROOT

from tools import debian_root


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
