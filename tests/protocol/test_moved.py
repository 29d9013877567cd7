"""Import paths that the docs and examples of 0.1.0 named still work, and warn with the new one."""

import ast
import importlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import HANG_SECONDS

import trainctl.protocol.client as package
from trainctl.protocol.client import client

ROOT = Path(__file__).parents[2]
MOVED = [
    ("blocking", "BlockingClient", "client"),
    ("cluster_client", "attach_cluster", "client"),
    ("keyring", "Keyring", "security.keyring"),
    ("keys", "KeyFolder", "security.keys"),
    ("verbs", "VERBS", "messages.verbs"),
]
KEPT = [
    ("client", "Client"), ("client", "Connection"), ("client", "make_command"), ("client", "check_reply"),
    ("client", "BlockingClient"), ("client", "attach_cluster"), ("messages", "Snapshot"), ("errors", "TrainctlError"),
]  # fmt: skip

WHEEL = ROOT / "tests" / "golden" / "release-0.1.0" / "trainctl-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(("old", "name", "new"), MOVED)
def test_an_old_path_gives_the_same_thing_and_warns_who_imports_it(
    old: str, name: str, new: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"from trainctl.protocol.{old} import {name}\nfrom trainctl.protocol.{new} import {name} as now\n"
        f"assert {name} is now\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-W", "always::DeprecationWarning", script],
        env={"PYTHONPATH": str(ROOT / "protocol")}, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{script}:1: DeprecationWarning: trainctl.protocol.{old} is now trainctl.protocol.{new}" in done.stderr


def test_the_paths_that_stay_do_not_warn() -> None:
    script = "; ".join(f"from trainctl.protocol.{module} import {name}" for module, name in KEPT)
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", script]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(ROOT / "protocol")},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_package_exports_what_the_module_did() -> None:
    public = {name for name, value in vars(client).items() if name.isupper() or _is_defined_there(value)}
    assert {name for name in public if not name.startswith("_")} <= {*vars(package)}


def _is_defined_there(value: object) -> bool:
    return getattr(value, "__module__", "") == client.__name__ and not getattr(value, "__name__", "_").startswith("_")


def names_of_0_1_0(module: str) -> Iterator[str]:
    """The public names that a module of that release has of its own; what it only imports isn't one."""
    with zipfile.ZipFile(WHEEL) as wheel:
        tree = ast.parse(wheel.read(f"trainctl/protocol/{module}.py"))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        for target in targets:
            name = getattr(target, "id", getattr(target, "name", "_"))
            if not name.startswith("_"):
                yield name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "module", ["client", "blocking", "cluster_client", "keyring", "keys", "verbs", "messages", "errors"]
)
def test_no_public_name_of_0_1_0_is_gone(module: str) -> None:
    names = {*names_of_0_1_0(module)}
    assert names
    now = importlib.import_module(f"trainctl.protocol.{module}")
    assert not {name for name in names if not hasattr(now, name)}
