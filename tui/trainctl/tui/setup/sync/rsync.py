"""The system's rsync: where a usable one is, how it is called to copy files over ssh, and its progress."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from trainctl.protocol.config.data_files import PARTIAL_FOLDER
from trainctl.protocol.errors import InvalidInputError, RefusedError, UnreachableError
from trainctl.tui.setup.ssh import NO_CONNECTION, said

OLDEST = (3, 1)
"""The first that reports the progress of all files together; macOS has an older one."""
_PLACES = ("/opt/homebrew/bin/rsync", "/usr/local/bin/rsync", "/opt/local/bin/rsync")
"""Where package managers of macOS put theirs; a command over ssh has a short PATH."""
_LOST = frozenset({NO_CONNECTION, 10, 12, 30, 35})
"""rsync's exit codes where the connection ended: socket I/O, the protocol's data stream, and time limits."""
_FAILED = re.compile(r"^(mkdir: |rsync: (?!.*(Broken pipe|Connection reset)).*: .* \(\d+\)$)", re.MULTILINE)
"""A line about a file or folder that couldn't be read or written: then the other side ends the connection itself."""
_INTERRUPTED_SECONDS = 10.0


class TransferProgress(NamedTuple):
    """How far a transfer is."""

    bytes: int
    percent: int


class Transfer(NamedTuple):
    """Files to copy from a folder here to one there."""

    program: str
    ssh: Sequence[str]  # the words of ssh up to its options
    program_there: str
    root: Path
    host: str  # user@host
    folder: str  # there; it is made if it is missing
    names: Sequence[str]
    megabytes_per_second: float | None = None

    def command(self, list_file: Path) -> list[str]:
        """Each file gets its name when it is complete. Until then it is in a hidden folder, where the next call finds
        it and continues. `list_file` holds the names, each ended by a zero byte."""
        limit = self.megabytes_per_second
        return [
            self.program, "--times", "--copy-links", "--ignore-times", "--protect-args",
            f"--partial-dir={PARTIAL_FOLDER}", "--from0", f"--files-from={list_file}", "--no-implied-dirs",
            "--no-inc-recursive", "--info=progress2", "--stats", "--no-human-readable", f"--rsh={shlex.join(self.ssh)}",
            f"--rsync-path=mkdir -p {shlex.quote(self.folder)} && {shlex.quote(self.program_there)}",
            *([f"--bwlimit={max(1, round(limit * 1e6 / 1024))}"] if limit else []),
            "--", f"{self.root}/", place(self.host, self.folder),
        ]  # fmt: skip

    def carry_out(self, report: Callable[[TransferProgress], None]) -> int:
        """Copy them; the bytes that were sent, without those that were there already.

        Raises UnreachableError where the connection is lost, RefusedError with what rsync said where it fails.
        """
        with tempfile.TemporaryDirectory(prefix="tc-") as folder:
            names, errors = Path(folder) / "names", Path(folder) / "errors"
            names.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in self.names))
            with errors.open("w+b") as stream:
                status, sent = _call(self.command(names), stream, report)
                stream.seek(0)
                problem = stream.read().decode("utf-8", "replace")
        if status in _LOST and not _FAILED.search(problem):
            raise UnreachableError(f"the connection was lost: {_said(problem)}; run this again to continue")
        if status:
            raise RefusedError(f"rsync failed (exit status {status}): {_said(problem)}")
        return sent


def place(host: str, folder: str) -> str:
    """Return a folder there as rsync wants it: `user@host:/folder/`, an IPv6 address in brackets."""
    user, at, address = host.rpartition("@")
    bracketed = f"[{address}]" if ":" in address and not address.startswith("[") else address
    return f"{user}{at}{bracketed}:{PurePosixPath(folder)}/"


def usable() -> str:
    """Return the path of an rsync that is new enough; empty if there is none."""
    paths = dict.fromkeys(path for path in (shutil.which("rsync"), *_PLACES) if path and os.access(path, os.X_OK))
    return next((path for path in paths if _version(path) >= OLDEST), "")


def check(path: str) -> str:
    """Return the path, unless it is empty. Raises InvalidInputError then."""
    if not path:
        raise InvalidInputError(
            "rsync",
            "not installed, or too old; 3.1 or newer is needed: apt install rsync, or on macOS: brew install rsync",
        )
    return path


def _version(path: str) -> tuple[int, ...]:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", check=False)
    return version_of(done.stdout)


def version_of(text: str) -> tuple[int, ...]:
    """Of what `rsync --version` prints; (0,) for another program, such as openrsync."""
    found = re.match(r"rsync +version v?(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0,)


def progress_of(line: str) -> TransferProgress | None:
    """Of a line that rsync prints with --info=progress2: bytes, per cent, rate, time."""
    found = re.match(r"\s*([\d,.]+)\s+(\d+)%\s", line)
    return TransferProgress(int(re.sub(r"\D", "", found[1])), int(found[2])) if found else None


def sent_of(line: str) -> int | None:
    """Of the line of --stats that counts the bytes that weren't there."""
    found = re.match(r"Literal data: ([\d,.]+) bytes", line)
    return int(re.sub(r"\D", "", found[1])) if found else None


def _call(command: Sequence[str], errors: IO[bytes], report: Callable[[TransferProgress], None]) -> tuple[int, int]:
    """Exit status, and bytes sent. Interrupted, rsync ends first, and keeps what has arrived."""
    sent = 0
    environment = {**os.environ, "LC_ALL": "C"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
    ) as process:
        assert process.stdout is not None
        with contextlib.ExitStack() as interrupted:
            interrupted.callback(_end, process)
            for line in _lines(process.stdout):
                if (progress := progress_of(line)) is not None:
                    report(progress)
                sent = sent_of(line) or sent
            interrupted.pop_all()
    return process.returncode, sent


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_INTERRUPTED_SECONDS)
    process.kill()


def _lines(stream: IO[bytes]) -> Iterable[str]:
    """What ends with a line feed, or with the carriage return before the next progress."""
    rest = ""
    while chunk := os.read(stream.fileno(), 65536):
        *whole, rest = re.split(r"[\r\n]", rest + chunk.decode("utf-8", "replace"))
        yield from whole
    yield rest


def _said(problem: str) -> str:
    """Without rsync's last line, which only repeats that there was an error."""
    lines = [line for line in problem.splitlines() if not re.match(r"rsync error: .*\(code \d+\)", line)]
    return said("\n".join(lines)) or said(problem) or "rsync didn't say why"
