"""What the commands that generate a file share: write it, or only check that it is up to date."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def main(module: str, made: Callable[[], str], path: Path) -> int:
    """Write the file, or with `--check` only compare it; the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is out of date")
    parser.add_argument("path", nargs="?", type=Path, default=path)
    given = parser.parse_args()
    text = made()
    if not given.check:
        given.path.write_text(text, "utf-8")
        return 0
    if not given.path.is_file() or given.path.read_text("utf-8") != text:
        print(f"{given.path} is out of date: run python -m {module}", file=sys.stderr)
        return 1
    return 0
