"""`python tools/lowest.py`: the lowest versions that both projects declare, one pip constraint per line.

Of the libraries that the program, the client and the small extras need: not those that train (torch, MLX and what goes
with them), of which an old version fits only an old system. It needs nothing but Python, and runs in the checkout.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[1]
EXTRAS: Final = ("nvidia", "parquet", "zstd", "prometheus", "tensorboard", "discovery")
_FLOOR = re.compile(r"(?P<name>[\w.-]+)>=(?P<version>[\d.]+)(,<[\d.]+)?")


def main() -> int:
    """The exit status."""
    sys.stdout.writelines(f"{line}\n" for line in constraints())
    return 0


def constraints() -> Iterator[str]:
    """`numpy==2` of `numpy>=2`. Raises ValueError for a dependency without a lowest version."""
    program, client = _project(ROOT), _project(ROOT / "protocol")
    hook = program["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    needs = {*hook["dependencies"], *client["project"]["dependencies"]}
    needs.update(need for extra in EXTRAS for need in program["project"]["optional-dependencies"][extra])
    for need in sorted(needs):
        floor = _FLOOR.fullmatch(need)
        if floor is None:
            raise ValueError(f"pyproject.toml: {need!r} must be NAME>=VERSION")
        yield f"{floor['name']}=={floor['version']}"


def _project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))


if __name__ == "__main__":
    sys.exit(main())
