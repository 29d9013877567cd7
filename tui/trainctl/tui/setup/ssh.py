"""The system's ssh: commands run on another machine over one connection, so that a password is asked for once."""

import contextlib
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trainctl.protocol.errors import InvalidInputError, RefusedError, UnreachableError

NO_CONNECTION = 255
"""ssh's own exit code when it is ssh that failed."""
CONNECT_SECONDS = 15
SAID_LINES = 3


@dataclass(frozen=True)
class SshTarget:
    """A login on another machine."""

    words: str  # user@host, or a Host of ssh's configuration
    config: Path | None = None  # instead of the user's ssh configuration


class Ssh:
    """A connection to a machine; `with` closes what ssh keeps open behind it."""

    def __init__(self, target: SshTarget, *, interactive: bool = True) -> None:
        """`interactive`: ssh may ask for a password, or whether a host's key is right, on the terminal.

        Raises InvalidInputError for what ssh would take as an option.
        """
        if not target.words or target.words.startswith("-") or any(char.isspace() for char in target.words):
            raise InvalidInputError("HOST", f"{target.words!r} must be written as user@host")
        self.target, self._interactive = target, interactive

    def __enter__(self) -> Self:
        # A short path: macOS allows 104 bytes of it, and ssh adds some.
        self._folder = tempfile.TemporaryDirectory(prefix="tc-", dir="/tmp")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [*self.options(), "-O", "exit", self.target.words], capture_output=True, timeout=10, check=False
            )
        self._folder.cleanup()

    def options(self) -> list[str]:
        """ssh and its options, without the machine; rsync adds that."""
        own = {
            "ControlMaster": "auto",
            "ControlPath": f"{self._folder.name}/%C",
            "ControlPersist": "120",
            "ConnectTimeout": str(CONNECT_SECONDS),
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
            "BatchMode": "no" if self._interactive else "yes",
        }
        config = ["-F", str(self.target.config)] if self.target.config is not None else []
        return ["ssh", *config, *(word for name, value in own.items() for word in ("-o", f"{name}={value}"))]

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs `words` there, none of them touched by the shell there."""
        return [*self.options(), self.target.words, shlex.join(words)]

    def run(self, words: Sequence[str], *, given: bytes = b"", seconds: float = 60.0, step: str = "ssh") -> str:
        """Return what a command there prints on standard output.

        Raises UnreachableError where ssh couldn't connect, RefusedError where the command failed, naming the `step`
        and what was said; InvalidInputError where there is no ssh here.
        """
        status, out, err = self.try_run(words, given=given, seconds=seconds, step=step)
        if status:
            raise RefusedError(f"{step}: {said(err) or said(out) or f'exit status {status}'}")
        return out

    def try_run(
        self, words: Sequence[str], *, given: bytes = b"", seconds: float = 60.0, step: str = "ssh"
    ) -> tuple[int, str, str]:
        """Exit status, standard output and error of a command there. Raises as `run` but for the command's failure."""
        try:
            done = subprocess.run(self.command(words), input=given, capture_output=True, timeout=seconds, check=False)
        except FileNotFoundError:
            raise InvalidInputError("ssh", "not installed on this machine; install OpenSSH's client") from None
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"{step}: didn't finish within {seconds:g} s on {self.target.words}") from None
        out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
        if done.returncode == NO_CONNECTION:
            why = said(err) or "ssh couldn't connect"
            raise UnreachableError(f"{step}: {why}")
        return done.returncode, out, err


def said(text: str) -> str:
    """Return the last lines of what a program said, as one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-SAID_LINES:])
