"""`python -m benchmarks NAME [OPTION ...]` runs one benchmark, `all` runs them all, and nothing lists them.

Each exits with 0 if its bars were met or nothing could be measured, 1 if one was missed.
"""

import ast
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
OPTIONS: dict[str, Sequence[str]] = {
    "finetune_speed": ("--backends torch", "--backends mlx --batch 1 --steps 1"),
    "simulate": ("--real",),
}
"""The options of each call that `all` makes; without an entry it makes one call without options."""


def list_all() -> int:
    for name in NAMES:
        text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))) or ""
        sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0]
        print(f"{name:<16}{textwrap.shorten(sentence, 103, placeholder=' ...')}")
    return 0


def run_all() -> int:
    """Run all, also after one that misses its bar or fails; 1 if one did."""
    codes: dict[str, int] = {}
    for name in NAMES:
        for options in OPTIONS.get(name, ("",)):
            call = f"{name} {options}".strip()
            print(f"benchmark {call}", flush=True)
            codes[call] = subprocess.run(command(name, options.split()), check=False).returncode
    print("exit codes:")
    for call, code in codes.items():
        print(f"{code:>4}  {call}")
    return 1 if any(codes.values()) else 0


def command(name: str, options: Sequence[str]) -> list[str]:
    return [sys.executable, str(FOLDER / f"{name}.py"), *options]


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case []:
            return list_all()
        case ["all"]:
            return run_all()
        case [name, *options] if name in NAMES:
            os.execv(sys.executable, command(name, options))
    print(f"benchmarks: no benchmark {arguments[0]!r}; `python -m benchmarks` lists them", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
