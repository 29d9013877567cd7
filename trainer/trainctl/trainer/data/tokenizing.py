"""Making a token cache: once on a node, by a process of its own if there is much to do, while others wait.

`python -m trainctl.trainer.data.tokenizing` is that process. Its first line of input is a `_Task`; each line of its
output is a `_Progress`. It ends when its input closes, so it doesn't outlive the trainer that started it.
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
from typing import IO, Any, TypeVar

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
)

PROCESS_BYTES = 8_000_000
"""Sources of at least so many bytes are tokenized by a separate process. For less, starting it takes longer."""
_REPORT_SECONDS = 0.5
"""Seconds between two reports of progress."""
_EXIT_SECONDS = 20.0
"""Seconds after which the process ends even if it can't clean up: it does so between two calls of the library."""
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


class _Task(msgspec.Struct):
    config: dict[str, Any]
    folder: str
    where: str


class Answer(msgspec.Struct, omit_defaults=True):
    """A line of a process that tokenizes: news, or why there will be no more."""

    refused: tuple[str, str] | None = None
    failed: str = ""


class _Progress(Answer):
    done: int = 0
    whole: int = 0


AnswerT = TypeVar("AnswerT", bound=Answer)


def open_cache(config: RunFile, folder: Path, where: str, report: Report = no_report) -> TokenCache:
    """Return the token cache of `config`'s data, made under `folder` if it isn't there yet; any number of trainers may
    do so at once. Raises InvalidInputError naming file and line."""
    target = folder / cache_name(config)
    if not target.is_dir():
        if sum(source.stat().st_size for source in sources_of(config)) < PROCESS_BYTES:
            make_cache(target, lambda work, show: write_cache(config, work, where, show), report)
        else:
            _by_process(config, folder, where, report)
    return read_cache(target)


def make_cache(target: Path, write: Callable[[Path, Report], None], report: Report = no_report) -> None:
    """Make a cache as `write` fills its folder, by one process at a time. One that waits reports the progress of the
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
    """Return what reports progress, and shows it to those that wait for the lock; not more often than anyone looks."""
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
    process = start_process("trainctl.trainer.data.tokenizing", config, folder, where)
    assert process.stdin is not None and process.stdout is not None
    try:
        for answer in answers_of(process, _Progress):
            report(answer.done, answer.whole)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        status = process.wait()
        remove_parts(folder)
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise TrainctlError(f"the process that tokenizes the data {how}")


# ------------------------------------------------------------ processes that tokenize


def start_process(module: str, config: RunFile, folder: Path, where: str) -> "subprocess.Popen[bytes]":
    """Start a module that runs `serve`, and give it its task."""
    command = [sys.executable, "-P", "-m", module]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(_Task(run_file.to_dict(config), str(folder), where)) + b"\n")
        process.stdin.flush()
    return process


def answers_of(process: "subprocess.Popen[bytes]", kind: type[AnswerT]) -> Iterator[AnswerT]:
    """Yield what the process says until it ends. Raises InvalidInputError or TrainctlError if it says why it does."""
    assert process.stdout is not None
    for line in process.stdout:
        answer = msgspec.json.decode(line, type=kind)
        if answer.refused is not None:
            raise InvalidInputError(*answer.refused)
        if answer.failed:
            raise TrainctlError(answer.failed)
        yield answer


def serve(work: Callable[[RunFile, Path, str], None], problem: str) -> int:
    """Do the task that `start_process` gave: `work` takes the run file, the folder of caches, and what errors name.
    Return the exit status. `problem` begins the line that says why it failed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # a trainer blocks them
    set_title("tokenizer")
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Task)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        config = run_file.parse(task.config)
        if config.data.kind != "samples":
            import_tokenizers(config.data.tokenizer)
        work(config, Path(task.folder), task.where)
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)
    except InvalidInputError as error:
        say(Answer(refused=(error.where, error.problem)))
    except (TrainctlError, OSError, MemoryError) as error:
        say(Answer(failed=f"{problem}: {first_line(error)}"))
    return 0


def say(answer: Answer) -> None:
    """Write a line for the trainer."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_input() -> None:
    """Once the input closes, interrupt the main thread, so that it removes what it has written."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_EXIT_SECONDS)
    os._exit(1)


def _tokenize(config: RunFile, folder: Path, where: str) -> None:
    make_cache(
        folder / cache_name(config),
        lambda work, show: write_cache(config, work, where, show),
        lambda done, whole: say(_Progress(done=done, whole=whole)),
    )


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # by default the library uses all cores
    sys.exit(serve(_tokenize, "the data can't be tokenized"))
