"""`python tools/requirements.py [EXTRA ...]`: prints what trainctl needs of other projects, one a line.

Run it in a checkout. It needs nothing but Python. The image's layer of libraries and `make lowest` are made of it.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path


def requirements(checkout: Path, extras: Iterable[str] = ()) -> list[str]:
    """Return them sorted. Raises KeyError for an extra that doesn't exist."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))["project"]
    needed, waiting = [*project["dependencies"]], [*extras]
    while waiting:
        for line in project["optional-dependencies"][waiting.pop()]:
            if own := re.fullmatch(r"trainctl\[([\w,-]+)\]", line):
                waiting += own[1].split(",")
            else:
                needed.append(line)
    return sorted({*needed})


if __name__ == "__main__":
    try:
        print("\n".join(requirements(Path.cwd(), sys.argv[1:])))
    except KeyError as error:
        sys.exit(f"requirements: pyproject.toml has no extra {error}")
