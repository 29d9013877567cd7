"""pip's settings on this machine (index, folders of wheels, certificates), for systems and images made on it."""

import ast
import re
import subprocess
import sys
from typing import Final

_LINE: Final = re.compile(r"^(?P<section>\S+?)\.(?P<name>[\w-]+)=(?P<value>'.*'|\".*\")$", re.MULTILINE)
"""A line of `pip config list`."""
_SECTIONS: Final = ("global", "install", ":env:")
"""Those that `pip install` reads; a later one goes before an earlier one."""


def own() -> dict[str, str]:
    """Values by option. Raises CalledProcessError if pip fails."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    return parse(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def parse(listed: str) -> dict[str, str]:
    """Of what `pip config list` prints."""
    found = [line for line in _LINE.finditer(listed) if line["section"] in _SECTIONS]
    found.sort(key=lambda line: _SECTIONS.index(line["section"]))
    return {line["name"]: str(ast.literal_eval(line["value"])) for line in found}
