"""Making a token cache: once on a node, by a process of its own if there is much to do, while others wait.

`python -m trainctl.trainer.data.tokenizing` is that process. Its first line of input is a `_Task`; each line of its
output is an `_Answer`. It ends when its input closes, so it doesn't outlive the trainer that started it.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.files import durable_files
from trainctl.protocol.machine.process_title import set_title
from trainctl.trainer.common.atomic_folder import make_folder, remove_parts
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.row_tokens import import_tokenizers
from trainctl.trainer.data.token_cache import (
    Report,
    TokenCache,
    cache_name,
    no_report,
    read_cache,
    sources_of,
    write_cache,
)  # fmt: skip
from trainctl.trainer.data.worker_pool import usable_cores

PROCESS_BYTES = 8_000_000
"""Sources of at least so many bytes are tokenized by a separate process. For less, starting it takes longer."""
_REPORT_SECONDS = 0.5
"""Seconds between two reports of progress."""
_EXIT_SECONDS = 5.0
"""Seconds after which the process ends even if it can't clean up."""
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


class _Task(msgspec.Struct):
    config: dict[str, Any]
    folder: str
    where: str


class _Answer(msgspec.Struct):
    done: int = 0
    whole: int = 0
    refused: tuple[str, str] | None = None
    failed: str = ""


def open_cache(config: RunFile, folder: Path, where: str, report: Report = no_report) -> TokenCache:
    """The token cache of `config`'s data, made under `folder` if it isn't there yet; any number of trainers may do so
    at once. Raises InvalidInputError naming file and line."""
    target = folder / cache_name(config)
    if not target.is_dir():
        if sum(source.stat().st_size for source in sources_of(config)) < PROCESS_BYTES:
            make_cache(target, lambda work, shown: write_cache(config, work, where, 0, shown), report)
        else:
            _by_process(config, folder, where, report)
    return read_cache(target)


def make_cache(target: Path, write: Callable[[Path, Report], None], report: Report = no_report) -> None:
    """A cache as `write` fills its folder, by one process at a time. What one that waits reports is the progress of the
    one that works."""
    durable_files.make_folder(target.parent)
    lock = target.with_name(f".{target.name}.lock")
    with lock.open("a+") as file:
        _acquire(file, report)
        try:
            make_folder(target, lambda work: write(work, _shown(file, report)))
        finally:
            lock.unlink(missing_ok=True)  # who waits for it, or makes another, looks for the cache again


def _acquire(file: IO[str], report: Report) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            with contextlib.suppress(ValueError):
                done, whole = map(int, file.read().split())
                report(done, whole)
            time.sleep(_REPORT_SECONDS)
        else:
            return


def _shown(file: IO[str], report: Report) -> Report:
    """Reports, and shows it to those that wait for the lock; not more often than anyone looks."""
    due = 0.0

    def show(done: int, whole: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _REPORT_SECONDS
            file.truncate(0)
            file.write(f"{done} {whole}")
            file.flush()
            report(done, whole)

    return show


def _by_process(config: RunFile, folder: Path, where: str, report: Report) -> None:
    task = _Task(run_file.to_dict(config), str(folder), where)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "trainctl.trainer.data.tokenizing"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            process.stdin.flush()
        for line in process.stdout:
            _take(msgspec.json.decode(line, type=_Answer), report)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        status = process.wait()
        remove_parts(folder)
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise TrainctlError(f"the process that tokenizes the data {how}")


def _take(answer: _Answer, report: Report) -> None:
    if answer.refused is not None:
        raise InvalidInputError(*answer.refused)
    if answer.failed:
        raise TrainctlError(answer.failed)
    report(answer.done, answer.whole)


def main() -> int:
    """Make one cache; the exit status."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # a trainer blocks them
    set_title("tokenizer")
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Task)
    threading.Thread(target=end_with_input, daemon=True).start()
    config = run_file.parse(task.config)
    try:
        with ended_by_interrupt():
            if config.data.kind != "samples":
                import_tokenizers(config.data.tokenizer)
            target = Path(task.folder) / cache_name(config)
            cores = usable_cores()
            make_cache(
                target, lambda work, shown: write_cache(config, work, task.where, cores, shown),
                lambda done, whole: _say(_Answer(done, whole)),
            )  # fmt: skip
    except InvalidInputError as error:
        _say(_Answer(refused=(error.where, error.problem)))
    except (TrainctlError, OSError, MemoryError) as error:
        _say(_Answer(failed=f"the data can't be tokenized: {first_line(error)}"))
    return 0


@contextlib.contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """End this process at once, without a word, when `end_with_input` or a closed output says so."""
    try:
        yield
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)


def end_with_input() -> None:
    """Once the input closes, interrupt the main thread, so that it removes what it has written."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_EXIT_SECONDS)
    os._exit(1)


def _say(answer: _Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
