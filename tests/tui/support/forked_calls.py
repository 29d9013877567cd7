"""A process that has loaded both programs, and calls them in children of its own: a call costs milliseconds.

It reads cases as JSON from its standard input, and prints the children's exit codes and what they printed. Its own
environment is that of all calls.
"""

import contextlib
import io
import json
import os
import pwd
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NoReturn

import typer

from trainctl.node_agent import cli as agent_program
from trainctl.tui.cli import main as program

STREAMS = {"stdout": 1, "stderr": 2}
AT_ONCE = 16
"""Calls at the same time: those that look for an agent mostly wait."""


def _no_entry(_: object) -> NoReturn:
    raise KeyError("no such user")


def _put(name: str, kind: str, captured: int) -> None:
    """Give a standard stream of this process a place: captured, closed, full, or a pipe that nobody reads."""
    descriptor = STREAMS[name]
    if kind == "closed":
        os.close(descriptor)
        setattr(sys, name, None)
        return
    target = captured
    if kind == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    elif kind == "unread":
        reading, target = os.pipe()
        os.close(reading)
    os.dup2(target, descriptor)
    stream = getattr(sys, name)
    fresh = io.TextIOWrapper(
        os.fdopen(descriptor, "wb", closefd=False), encoding=stream.encoding, errors=stream.errors,
        line_buffering=name == "stderr",
    )  # fmt: skip
    setattr(sys, name, fresh)
    setattr(sys, f"__{name}__", fresh)


def _call(case: dict[str, Any], files: list[int]) -> int:
    for stream, file in zip(STREAMS, files, strict=True):
        _put(stream, case.get(stream, "captured"), file)
    name, sys.argv = case["words"][0], case["words"]
    os.chdir(case["folder"].encode())  # the locale's encoding may lack its characters
    return program.main() if name == "trainctl" else agent_program.main()


def load(command: Any) -> None:
    """Load the modules of all commands below one."""
    for below in getattr(command, "commands", {}).values():
        load(below)


def main() -> None:
    given = json.load(sys.stdin)
    if given["no_user"]:
        os.environ.pop("HOME", None)
        pwd.getpwuid = pwd.getpwnam = _no_entry  # type: ignore[assignment]
    for app in (agent_program.app, program.app):
        load(typer.main.get_command(app))
    results = []
    for cases in (given["cases"][at : at + AT_ONCE] for at in range(0, len(given["cases"]), AT_ONCE)):
        with contextlib.ExitStack() as stack:
            kept = [[stack.enter_context(tempfile.TemporaryFile()) for _ in STREAMS] for _ in cases]
            children = []
            for case, files in zip(cases, kept, strict=True):
                if (child := os.fork()) == 0:
                    sys.exit(_call(case, [file.fileno() for file in files]))
                children.append(child)
            for child, files in zip(children, kept, strict=True):
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                results.append([status, *map(_text, files)])
    Path(os.fsdecode(given["results"].encode())).write_text(json.dumps(results), "utf-8")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("latin-1")  # any bytes


if __name__ == "__main__":
    main()
