"""The system's ssh and rsync: how commands run on other machines, and how files are compared with theirs and copied."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Self

from trainctl.protocol.config.data_files import PARTIAL_FOLDER
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


OLDEST = (3, 1)
"""The first that reports the progress of all files together; macOS has an older one."""
_PLACES = ("/opt/homebrew/bin/rsync", "/usr/local/bin/rsync", "/opt/local/bin/rsync")
"""Paths of the rsync that package managers of macOS install; a command over ssh has a short PATH."""
_LOST = frozenset({NO_CONNECTION, 10, 12, 30, 35})
"""rsync's exit codes where the connection ended: socket I/O, the protocol's data stream, and time limits."""
_FAILED = re.compile(r"^(mkdir: |rsync: (?!.*(Broken pipe|Connection reset)).*: .* \(\d+\)$)", re.MULTILINE)
"""A line about a file or folder that couldn't be read or written: then the other side ends the connection itself."""
_INTERRUPTED_SECONDS = 10.0


@dataclass(frozen=True)
class Rsync:
    """A folder here, and the one on another machine that gets its files. Both calls raise UnreachableError where the
    connection is lost, and RefusedError with what rsync said where it fails."""

    program: str
    ssh: Sequence[str]  # the words of ssh up to its options
    program_there: str
    root: Path
    host: str  # user@host
    folder: str  # there; it is made if it is missing

    def differing(self, names: Iterable[str]) -> list[str]:
        """Return the names of the files that the other folder lacks, or has with other contents."""
        lines: list[str] = []
        options = ["--dry-run", "--checksum", "--8-bit-output", "--out-format=%i %n"]
        self._call(names, options, shlex.quote(self.program_there), lines.append)
        return [_unescaped(line.partition(" ")[2]) for line in lines if line.startswith("<f")]

    def copy(self, names: Iterable[str], report: Callable[[int], None], megabytes_per_second: float | None) -> int:
        """Copy these files and return the bytes that were sent. `report` gets the per cent that have arrived.

        Each file gets its name when it is complete. Until then it is in a hidden folder, where the next call continues.
        """
        sent = 0

        def read(line: str) -> None:
            nonlocal sent
            if (percent := percent_of(line)) is not None:
                report(percent)
            sent = sent_of(line) or sent

        limit = [f"--bwlimit={max(1, round(megabytes_per_second * 1e6 / 1024))}"] if megabytes_per_second else []
        options = [
            "--times",
            "--ignore-times",
            f"--partial-dir={PARTIAL_FOLDER}",
            "--info=progress2",
            "--stats",
            *limit,
        ]
        there = f"mkdir -p {shlex.quote(self.folder)} && {shlex.quote(self.program_there)}"
        self._call(names, [*options, "--no-human-readable"], there, read)
        return sent

    def _call(self, names: Iterable[str], options: Sequence[str], there: str, read: Callable[[str], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="tc-") as folder:
            list_file, errors = Path(folder) / "names", Path(folder) / "errors"
            list_file.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in names))
            command = [self.program, *options, "--copy-links", "--protect-args", "--from0", f"--files-from={list_file}"]
            command += ["--no-implied-dirs", "--no-inc-recursive", f"--rsh={shlex.join(self.ssh)}"]
            command += [f"--rsync-path={there}", "--", f"{self.root}/", place(self.host, self.folder)]
            with errors.open("w+b") as stream:
                status = _run(command, stream, read)
            problem = errors.read_text("utf-8", "replace")
        if status in _LOST and not _FAILED.search(problem):
            raise UnreachableError(f"the connection was lost: {_said(problem)}; run this again to continue")
        if status:
            raise RefusedError(f"rsync failed (exit status {status}): {_said(problem)}")


def place(host: str, folder: str) -> str:
    """Return a folder there as rsync wants it: `user@host:/folder/`, an IPv6 address in brackets."""
    user, at, address = host.rpartition("@")
    bracketed = f"[{address}]" if ":" in address and not address.startswith("[") else address
    return f"{user}{at}{bracketed}:{PurePosixPath(folder)}/"


def usable() -> str:
    """Return the path of an rsync that is new enough; empty if there is none."""
    paths = dict.fromkeys(path for path in (shutil.which("rsync"), *_PLACES) if path and os.access(path, os.X_OK))
    for path in paths:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=False)
        if version_of(done.stdout) >= OLDEST:
            return path
    return ""


def check(path: str) -> str:
    """Return the path, unless it is empty. Raises InvalidInputError then."""
    if not path:
        problem = (
            "not installed, or too old; 3.1 or newer is needed: apt install rsync, or on macOS: brew install rsync"
        )
        raise InvalidInputError("rsync", problem)
    return path


def version_of(text: str) -> tuple[int, ...]:
    """Return the version in what `rsync --version` prints; (0,) for another program, such as openrsync."""
    match = re.match(r"rsync +version v?(\d+)\.(\d+)", text)
    return tuple(map(int, match.groups())) if match else (0,)


def percent_of(line: str) -> int | None:
    """Return the per cent in a line of --info=progress2: bytes, per cent, rate, time."""
    match = re.match(r"\s*[\d,.]+\s+(\d+)%\s", line)
    return int(match[1]) if match else None


def sent_of(line: str) -> int | None:
    """Return the bytes in the line of --stats that counts those which weren't there."""
    match = re.match(r"Literal data: ([\d,.]+) bytes", line)
    return int(re.sub(r"\D", "", match[1])) if match else None


def _unescaped(name: str) -> str:
    """Return a file's name, of which rsync prints control characters as `\\#012`."""
    raw = re.sub(rb"\\#(\d{3})", lambda match: bytes([int(match[1], 8)]), os.fsencode(name))
    return os.fsdecode(raw)


def _run(command: Sequence[str], errors: IO[bytes], read: Callable[[str], None]) -> int:
    """Return the exit status. Interrupted, rsync ends first, and keeps what has arrived."""
    environment = {**os.environ, "LC_ALL": "C"}
    with (
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process,
        contextlib.ExitStack() as interrupted,
    ):
        assert process.stdout is not None
        interrupted.callback(_end, process)
        rest = ""
        while chunk := os.read(process.stdout.fileno(), 65536):
            *lines, rest = re.split(r"[\r\n]", rest + os.fsdecode(chunk))  # progress ends with a carriage return
            for line in lines:
                read(line)
        interrupted.pop_all()
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_INTERRUPTED_SECONDS)
    process.kill()


def _said(problem: str) -> str:
    """Return what rsync said, without its last line, which only repeats that there was an error."""
    lines = [line for line in problem.splitlines() if not re.match(r"rsync error: .*\(code \d+\)", line)]
    return said("\n".join(lines)) or said(problem) or "rsync didn't say why"
