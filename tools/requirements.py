"""`python tools/requirements.py [EXTRA ...]`: prints what trainctl and its client need of other projects, one a line.

Run it in a checkout. It reads the two pyproject.toml files, so that an image's layer of libraries is built again only
when one of them changes. It needs nothing but Python.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

_OWN = re.compile(r"trainctl\[([\w,-]+)\]")
"""An extra that consists of others."""


def requirements(checkout: Path, extras: Iterable[str] = ()) -> list[str]:
    """Sorted, without trainctl-client. Raises KeyError for an extra that doesn't exist."""
    program, client = (
        tomllib.loads((checkout / folder / "pyproject.toml").read_text("utf-8")) for folder in (".", "protocol")
    )
    needed = {*program["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]}
    needed |= {*client["project"]["dependencies"]}
    known = program["project"]["optional-dependencies"]
    return sorted(needed.union(*(_of_extra(extra, known) for extra in extras)))


def _of_extra(extra: str, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for line in known[extra]:
        own = _OWN.fullmatch(line)
        if own is None:
            yield line
        else:
            for each in own[1].split(","):
                yield from _of_extra(each, known)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; 2 for an extra that doesn't exist."""
    extras = sys.argv[1:] if arguments is None else arguments
    try:
        lines = requirements(Path.cwd(), extras)
    except KeyError as error:
        sys.stderr.write(f"requirements: pyproject.toml has no extra {error}\n")
        return 2
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
