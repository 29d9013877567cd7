"""A copy of the product with a patch on it, and programs that run from that copy alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("protocol", "trainer", "node_agent", "tui")
PATCHES = Path(__file__).parent / "patches"


def touched(patch: Path) -> list[str]:
    """The files that a patch changes or adds."""
    return re.findall(r"^\+\+\+ b/(\S+)", patch.read_text("utf-8"), flags=re.MULTILINE)


def patched(patch: Path, into: Path, *, without: str = "") -> Path:
    """Copies the product, its tools and its pages, and applies the patch but for the file `without`."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*ROOMS, "tools", "docs"):
        shutil.copytree(ROOT / name, into / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", into)
    words = ["git", "apply", "-C1", *([f"--exclude={without}"] if without else []), str(patch)]
    done = subprocess.run(words, cwd=into, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, f"{patch.name} no longer fits the code; make it again with git diff\n{done.stderr}"
    return into


def run_in(tree: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """`python WORDS` in the copy, whose product comes before that of the checkout."""
    paths = [*(str(tree / room) for room in ROOMS), str(tree), str(ROOT)]
    return subprocess.run(
        [sys.executable, *words], cwd=tree, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
