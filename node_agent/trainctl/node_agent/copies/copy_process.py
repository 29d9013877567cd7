"""`python -m trainctl.node_agent.copies.copy_process RUN_DIRECTORY TARGET`: copies the newest checkpoint.

TARGET is what checkpoint.copy_to may be. It gets RUN/checkpoints/step-N, the manifest last: a copy without one is
incomplete, and the next try continues it. A newer checkpoint that is completed meanwhile is copied afterwards. While
another process copies checkpoints of the run, this one waits until that process has ended. Each change is a line on
standard output, as `CopyLine`; who reads it may be gone. Exit status 0: the newest is copied; 1: the last line says why
not.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import psutil

from trainctl.protocol.config.run_file import COPY_COMMAND, STORES, is_rsync_target
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import make_folder, sync
from trainctl.protocol.machine.process_title import set_title
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.checkpoints import COPYING, MANIFEST_NAME, FileEntry, Manifest, own_command

PIECE_BYTES: Final = 1024**2
NICENESS: Final = 10
_SIGNALS: Final = {signal.SIGTERM, signal.SIGINT}
LOCK: Final = ".copy.lock"
"""File in `checkpoints`: the lock of the only copying process."""
BACKOFF_SECONDS: Final = (5.0, 20.0, 60.0, 180.0)
"""Waits before another try of the same checkpoint; after the last one it has failed."""
RSYNC: Final = ("rsync", "-aR", "--partial", "--ignore-times", "--timeout=120")
"""Ends after 120 s without a byte. -R makes the folders of the path there. Files of a step that was done again may have
the same size and be written in the same second, so rsync compares what is in them."""
SSH: Final = "ssh -oBatchMode=yes -oConnectTimeout=20"
"""Command by which rsync reaches other machines: it asks for no password."""
_CONSEQUENCES: Final = re.compile(r"rsync error: |rsync: .*(connection unexpectedly closed|Broken pipe|reset by peer)")
"""Beginnings of the lines with which rsync ends, whatever the reason was."""


_REPLACED: Final = "the step was done again, and its checkpoint replaced, while it was copied"


class CopyLine(msgspec.Struct, frozen=True):
    """State of the copy of one step's checkpoint."""

    step: int
    state: Literal["copying", "copied", "failed"]
    seconds: float = 0.0
    problem: str = ""


class CopyError(Exception):
    """One try failed; the text is why, on one line."""


def copy_newest(run_directory: Path, copy: Callable[[Path], None], say: Callable[[CopyLine], None]) -> bool:
    """Copy the newest complete checkpoint, and newer ones that come meanwhile. Return whether the newest is copied."""
    folder, done = run_directory / "checkpoints", None
    while (newest := newest_checkpoint(folder)) is not None and newest != done:
        step, begun = step_of(newest), time.monotonic()
        say(CopyLine(step, "copying"))
        try:
            (folder / COPYING).write_text(f"{os.getpid()} {step}", "utf-8")
            problem = _tried(newest, copy)
        except OSError as error:
            problem = _first_line(error)
        say(CopyLine(step, "failed" if problem else "copied", time.monotonic() - begun, problem))
        if problem and newest_checkpoint(folder) == newest:  # else the newer one is tried
            return False
        done = newest
    return True


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in `checkpoints`; None without one, or if that is set aside."""
    newest = checkpoints.newest_complete(folder, hashes=False)
    return newest if newest is not None and not newest.name.startswith(".") else None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _tried(folder: Path, copy: Callable[[Path], None]) -> str:
    """Return why the last try failed, after which there is a newer checkpoint or no try left; empty if one
    succeeded."""
    for wait_seconds in (*BACKOFF_SECONDS, None):
        try:
            copy(folder)
        except Exception as error:  # noqa: BLE001  also what a store's library raises
            problem = _first_line(error)
        else:
            return ""
        if wait_seconds is None or newest_checkpoint(folder.parent) != folder:
            break
        time.sleep(wait_seconds)
    return problem


def to_path(target: Path, folder: Path) -> None:
    """Copy into `target`/RUN/checkpoints. What an earlier try has copied stays. Raises OSError, and InvalidInputError
    if the copy isn't what the manifest says."""
    if not target.is_dir():
        raise FileNotFoundError(f"{target} is no folder; make it, or mount its disk")
    place = target / folder.parent.parent.name / "checkpoints"
    for old in place.glob(".step-*.part") if place.is_dir() else ():
        if old.name != f".{folder.name}.part":  # a copy that was given up
            shutil.rmtree(old, ignore_errors=True)
    final, part = place / folder.name, place / f".{folder.name}.part"
    manifest = checkpoints.read_manifest(folder)
    if final.is_dir() and _holds(final, manifest):
        sync(place)  # the process that gave it its name may have died before this
        return
    make_folder(part)
    for name, entry in manifest.files.items():
        _copy_file(folder / name, part / name, entry)
    shutil.copyfile(folder / MANIFEST_NAME, part / MANIFEST_NAME)
    sync(part / MANIFEST_NAME)
    sync(part)
    checkpoints.verify(part)
    shutil.rmtree(final, ignore_errors=True)  # of a step that was done again
    part.rename(final)
    sync(place)


def _copy_file(source: Path, target: Path, entry: FileEntry) -> None:
    """Append what `target` lacks; if its beginning isn't the source's, copy all of it. Raises OSError."""
    size_bytes = target.stat().st_size if target.is_file() else -1
    if 0 < size_bytes < entry.size_bytes:
        with source.open("rb") as read, target.open("ab") as written:
            read.seek(size_bytes)
            shutil.copyfileobj(read, written, PIECE_BYTES)
        size_bytes = entry.size_bytes
    if size_bytes != entry.size_bytes or checkpoints.digest_of(target) != entry.sha256:
        shutil.copyfile(source, target)
    sync(target)


def _holds(final: Path, manifest: Manifest) -> bool:
    try:
        return checkpoints.read_manifest(final) == manifest
    except InvalidInputError:
        return False


def to_rsync(target: str, folder: Path) -> None:
    """Send to `target`/RUN/checkpoints, the manifest last; one that is there, of a step that was done again, goes
    first. Raises CopyError, also if the checkpoint is replaced meanwhile, and InvalidInputError without a manifest."""
    runs, run = folder.parent.parent.parent, folder.parent.parent.name
    inside = f"{run}/checkpoints/{folder.name}"
    place, manifest = f"{target.rstrip('/')}/", checkpoints.read_manifest(folder)
    files = ("--delete-before", "--delete-excluded", f"--exclude={MANIFEST_NAME}", f"{inside}/")
    _run([*RSYNC, *files, place], cwd=runs)
    if checkpoints.read_manifest(folder) != manifest:
        raise CopyError(_REPLACED)
    _run([*RSYNC, f"{inside}/{MANIFEST_NAME}", place], cwd=runs)


def to_store(url: str, folder: Path) -> None:
    """Upload to `url`/RUN/checkpoints, the manifest last, what isn't there with the same digest. The library reads the
    credentials that the agent's environment has. Raises CopyError if the checkpoint is replaced meanwhile, and what the
    library raises."""
    import obstore
    from obstore.store import from_url

    store, inside = from_url(url), f"{folder.parent.parent.name}/checkpoints/{folder.name}"
    manifest = checkpoints.read_manifest(folder)
    with contextlib.suppress(FileNotFoundError):
        obstore.delete(store, f"{inside}/{MANIFEST_NAME}")
    for name, entry in manifest.files.items():
        with contextlib.suppress(FileNotFoundError):
            if obstore.get(store, f"{inside}/{name}").attributes.get("sha256") == entry.sha256:
                continue
        obstore.put(store, f"{inside}/{name}", folder / name, attributes={"sha256": entry.sha256})
    if checkpoints.read_manifest(folder) != manifest:
        raise CopyError(_REPLACED)
    obstore.put(store, f"{inside}/{MANIFEST_NAME}", folder / MANIFEST_NAME)


def by_command(words: Sequence[str], folder: Path) -> None:
    """Run a command with {folder}, {run} and {step} replaced in its words, without a shell. Raises CopyError."""
    values = {"folder": str(folder), "run": folder.parent.parent.name, "step": folder.name.removeprefix("step-")}
    command = [re.sub(r"\{(folder|run|step)\}", lambda match: values[match[1]], word) for word in words]
    _run(command if any("{folder}" in word for word in words) else [*command, str(folder)])


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    env = {"RSYNC_RSH": SSH, **os.environ}  # not -e, with which rsync:// goes through ssh too
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise CopyError(f"{command[0]}: {error.strerror}") from None
    except SystemExit:
        for child in psutil.Process().children():  # the signal came as it was started: subprocess lost it
            child.kill()
        raise
    if done.returncode:
        reason = _reason(command[0], done.stderr.decode("utf-8", "replace"))
        raise CopyError(f"{command[0]} exited with {done.returncode}: {reason}")


def _reason(program: str, said: str) -> str:
    """Return what a program that failed said, on one line: the first one of a node's own command. With rsync, warnings
    of ssh and the other machine's banner come before the reason, so it is the last line that names one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if program == RSYNC[0]:
        lines = [line for line in lines if not _CONSEQUENCES.match(line)][-1:] or lines
    return lines[0][:200] if lines else "no error text"


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Wait until no other process copies checkpoints of this run; then none does until the end. The system takes the
    lock from a process that dies. False: the agent that this one was started by has ended meanwhile, and the next one
    has what is left to be copied."""
    agent = os.getppid()
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.getppid() != agent:
                yield False
                return
        try:
            yield True
        finally:
            (folder / COPYING).unlink(missing_ok=True)


def _say(line: CopyLine) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), msgspec.json.encode(line) + b"\n")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def copier(target: str) -> Callable[[Path], None]:
    """Return what copies one checkpoint's folder to a target."""
    if target == COPY_COMMAND:
        return lambda folder: by_command(own_command(), folder)
    if target.startswith(STORES):
        return lambda folder: to_store(target, folder)
    if is_rsync_target(target):
        return lambda folder: to_rsync(target, folder)
    return lambda folder: to_path(Path(target), folder)


def main() -> int:
    """Copy; returns the exit status."""
    parser = argparse.ArgumentParser(description="Copy a run's newest complete checkpoint to another place.")
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIRECTORY", help="folder with run.toml")
    parser.add_argument("target", metavar="TARGET", help='absolute path, rsync target, URL of a store, or "command"')
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # also ends the program that copies
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    run_directory: Path = arguments.run_directory.resolve()
    set_title("checkpoint copy", f"of {run_directory.name}")
    with _turn(run_directory / "checkpoints") as is_wanted:
        return 0 if not is_wanted or copy_newest(run_directory, copier(arguments.target), _say) else 1


if __name__ == "__main__":
    sys.exit(main())
