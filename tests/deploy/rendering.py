"""The manifests as kubectl renders them."""

import copy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.conftest import ROOT
from tests.waiting import HANG_SECONDS

FOLDER = ROOT / "examples" / "deploy" / "kubernetes"
GROUPS = ("base", "overlays/gpu", "overlays/spot", "overlays/time-sliced")
"""Each is a whole group of pods."""
FOLDERS = (*GROUPS, "overlays/scale-to-zero")


def rendered(folder: str) -> list[dict[str, Any]]:
    """The objects of a folder with a kustomization; to be changed at will."""
    return copy.deepcopy(_rendered(folder))


@cache
def _rendered(folder: str) -> list[dict[str, Any]]:
    return render(FOLDER / folder)


def render(folder: Path) -> list[dict[str, Any]]:
    """The objects of a folder anywhere."""
    done = subprocess.run(
        [Path(sys.executable).with_name("kubectl"), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [*yaml.safe_load_all(done.stdout)]


def put(objects: list[dict[str, Any]], kind: str, path: str, value: Any) -> None:
    """Set what is at a path, such as spec.ports.0.port, in all objects of a kind; None removes it."""
    *outer, last = (int(part) if part.isdecimal() else part for part in path.split("|"))
    for one in objects:
        if one["kind"] == kind:
            place: Any = one
            for part in outer:
                place = place[part]
            if value is None:
                del place[last]
            else:
                place[last] = value
