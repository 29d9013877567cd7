"""Commands of the README and the docs, read from the pages and run as they are written."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.integration.support.namespaces import Network
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text("utf-8")
BEGIN = "set -euo pipefail\n"


def block(heading: str, number: int = 0) -> list[str]:
    """The commands of a block of code under a heading."""
    part = README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```\n(.*?)```", part, re.DOTALL)[number].strip().splitlines()


def run(folder: Path, script: str) -> str:
    """Return what a shell prints that has this environment's programs, its own home and no network but loopback."""
    home = folder / "home"
    home.mkdir()
    folders = {name: str(home / name) for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")}
    taken = {name: value for name, value in os.environ.items() if not name.startswith("TRAINCTL_")}
    environment = {**taken, **folders, "HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with contextlib.closing(Network(["here"])) as network:
        done = subprocess.run(
            network.on("here", "bash", "-c", BEGIN + script), cwd=folder, env=environment, capture_output=True,
            text=True, check=False, timeout=HANG_SECONDS,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
