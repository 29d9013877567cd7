"""Fill the blocks of a page, write it, or check that it is up to date, for all commands that generate a file.

A block of a page stands between the lines `<!-- generated: NAME -->` and `<!-- end -->`. All else is written by hand.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_BLOCK: Final = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def filled(path: Path, blocks: Mapping[str, str]) -> str:
    """Return a page of this checkout with the text of each block. Raises KeyError for a block that has none."""
    text = (ROOT / path).read_text("utf-8")
    return _BLOCK.sub(lambda block: f"{block[1]}\n{blocks[block[2]].strip()}\n\n", text)


def main(module: str, generate: Callable[[], str], path: Path) -> int:
    """Write the file, or with `--check` only compare it; the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is out of date")
    parser.add_argument("path", nargs="?", type=Path, default=path)
    options = parser.parse_args()
    text = generate()
    if not options.check:
        options.path.write_text(text, "utf-8")
        return 0
    if not options.path.is_file() or options.path.read_text("utf-8") != text:
        print(f"{options.path} is out of date: run python -m {module}", file=sys.stderr)
        return 1
    return 0
