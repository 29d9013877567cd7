"""Processes that make token caches: of whole files while trainers wait, and of a file that still grows as they train.

`python -m trainctl.trainer.data.tokenizing [--follow]` is such a process. Its first line of input is a `_Task`; each
line of its output is `News`. It ends when its input closes, so it doesn't outlive the trainer that started it. A cache
is made once on a node: if several trainers need it, one tokenizes and the others wait.
"""

import contextlib
import fcntl
import functools
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
from trainctl.protocol.config.run_file import end_mark
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.files import durable_files
from trainctl.protocol.machine.process_title import set_title
from trainctl.trainer.common.atomic_folder import make_folder, remove_parts
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.row_tokens import import_tokenizers
from trainctl.trainer.data.rows import Chunk
from trainctl.trainer.data.token_cache import (
    Report,
    TokenCache,
    cache_name,
    chunk_name,
    no_report,
    read_cache,
    recipe_of,
    sources_of,
    write_cache,
    write_chunk,
)

PROCESS_BYTES = 8_000_000
"""Sources of at least so many bytes are tokenized by a separate process. For less, starting it takes longer."""
_REPORT_SECONDS = 0.5
"""Seconds between two reports of progress."""
_POLL_SECONDS = 0.2
"""Seconds between two looks at a file that has not grown."""
_READ_BYTES = 1 << 20
_EXIT_SECONDS = 20.0
"""Seconds after which the process ends even if it can't clean up: it does so between two calls of the library."""


class _Task(msgspec.Struct):
    config: dict[str, Any]
    folder: str
    where: str


class News(msgspec.Struct, omit_defaults=True):
    """A line of a process that tokenizes: how far it has come, or why there will be no more."""

    refused: tuple[str, str] | None = None
    failed: str = ""
    done: int = 0  # bytes of whole sources
    whole: int = 0
    cache: str = ""  # of a growing file: the token cache of a sealed chunk, a folder below that of all caches
    following: int = 0  # samples after the last whole chunk
    caught_up: bool = False  # all that was in the file has been read
    ended: bool = False  # and its end is marked


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
    process = start_process(config, folder, where)
    assert process.stdin is not None and process.stdout is not None
    try:
        for news in news_of(process):
            report(news.done, news.whole)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        status = process.wait()
        remove_parts(folder)
    if status:
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        raise TrainctlError(f"the process that tokenizes the data {how}")


def start_process(config: RunFile, folder: Path, where: str, *, follows: bool = False) -> "subprocess.Popen[bytes]":
    """Start a process that tokenizes the data of `config` into a cache under `folder`, or that `follows` a growing
    file."""
    command = [sys.executable, "-P", "-m", "trainctl.trainer.data.tokenizing", *(["--follow"] if follows else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(_Task(run_file.to_dict(config), str(folder), where)) + b"\n")
        process.stdin.flush()
    return process


def news_of(process: "subprocess.Popen[bytes]") -> Iterator[News]:
    """Yield what the process says until it ends. Raises InvalidInputError or TrainctlError if it says why it does."""
    assert process.stdout is not None
    for line in process.stdout:
        news = msgspec.json.decode(line, type=News)
        if news.refused is not None:
            raise InvalidInputError(*news.refused)
        if news.failed:
            raise TrainctlError(news.failed)
        yield news


# ------------------------------------------------------------ a file that grows


class ChunkCutter:
    """The chunks of a file, whose bytes come in pieces of any size. Lines that aren't blank are samples; a chunk ends
    with the line of its last sample."""

    def __init__(self, path: Path, samples: int) -> None:
        self._path, self._whole, self._rest = path, samples, b""
        self._lines: list[bytes] = []
        self._first = 1
        self.samples = 0  # of the chunk that isn't whole yet

    def feed(self, piece: bytes) -> Iterator[Chunk]:
        """Yield the chunks that `piece` completes. A line counts when it has its end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._lines.append(line + b"\n")
            self.samples += bool(line.strip())
            if self.samples == self._whole:
                yield self._cut()

    def end(self) -> Iterator[Chunk]:
        """Yield the last chunk, if it has a sample: nothing follows. A last line without its end counts now."""
        if self._rest:
            yield from self.feed(b"\n")
        if self.samples:
            yield self._cut()

    def _cut(self) -> Chunk:
        chunk = Chunk(self._path, self._lines, self._first, sum(map(len, self._lines)))
        self._first += len(self._lines)
        self._lines, self.samples = [], 0
        return chunk


def _read_growing(path: Path) -> Iterator[bytes]:
    """Yield what a file has and gets, in pieces, until its end is marked; an empty one says that there is no more for
    now. Raises InvalidInputError if it becomes shorter, OSError if it can't be read."""
    with path.open("rb") as file:
        while True:
            ended = end_mark(path).exists()  # looked for before the last read: what was written before it counts
            while piece := file.read(_READ_BYTES):
                yield piece
            if ended:
                return
            if path.stat().st_size < file.tell():
                problem = f"has become shorter than the {file.tell():,} bytes read; only append"
                raise InvalidInputError(str(path), problem)
            yield b""
            time.sleep(_POLL_SECONDS)


def _follow(config: RunFile, folder: Path, where: str) -> Iterator[News]:
    """Yield what happens to the file of `config`, as it happens, until its end is marked. Raises InvalidInputError
    naming file and line."""
    path, recipe = Path(config.data.path), recipe_of(config, where)
    cutter, encoder = ChunkCutter(path, config.data.chunk_samples), functools.cache(recipe.encoder)

    def sealed(chunk: Chunk) -> News:
        name = chunk_name(config, chunk.content)
        if not (folder / name).is_dir():
            encode = encoder()
            make_cache(folder / name, lambda work, _: write_chunk(recipe, encode, chunk, work))
        return News(cache=name)

    before: News | None = None
    for piece in _read_growing(path):
        yield from map(sealed, cutter.feed(piece))
        if not piece:
            now = News(following=cutter.samples, caught_up=True)
            if now != before:
                yield now
            before = now
    yield from map(sealed, cutter.end())
    yield News(caught_up=True, ended=True)


# ------------------------------------------------------------ the process


def main() -> int:
    """Do the task that `start_process` gave; return the exit status."""
    follows = "--follow" in sys.argv
    if follows:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the trainers of this machine need its cores
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = "true"  # by default the library uses all cores
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})  # a trainer blocks them
    set_title("tokenizer")
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Task)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        config, folder = run_file.parse(task.config), Path(task.folder)
        if config.data.kind != "samples":
            import_tokenizers(config.data.tokenizer)
        if follows:
            for news in _follow(config, folder, task.where):
                _say(news)
        else:
            make_cache(
                folder / cache_name(config),
                lambda work, show: write_cache(config, work, task.where, show),
                lambda done, whole: _say(News(done=done, whole=whole)),
            )
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)
    except InvalidInputError as error:
        _say(News(refused=(error.where, error.problem)))
    except (TrainctlError, OSError, MemoryError) as error:
        _say(News(failed=f"the data can't be {'read' if follows else 'tokenized'}: {first_line(error)}"))
    return 0


def _say(news: News) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_input() -> None:
    """Once the input closes, interrupt the main thread, so that it removes what it has written."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_EXIT_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
