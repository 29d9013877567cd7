"""Sealing the chunks of a file that still grows: followed and tokenized by a process of its own while training runs.

`python -m trainctl.trainer.data.sealing` is that process. Its first line of input is a `_Task`; each line of its
output is a `Sealing`. It ends when its input closes, so it doesn't outlive the trainer that started it. If several
trainers of a node follow one file, one tokenizes a chunk and the others take it from the cache.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_file import end_mark
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.machine.process_title import set_title
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.chunk_tokens import Encode
from trainctl.trainer.data.chunks import Chunk
from trainctl.trainer.data.row_tokens import import_tokenizers
from trainctl.trainer.data.token_cache import chunk_name, recipe_of, write_chunk
from trainctl.trainer.data.tokenizing import end_with_input, ended_by_interrupt, make_cache

_SIGNALS = {signal.SIGTERM, signal.SIGINT}


POLL_SECONDS = 0.2
"""Seconds between two looks at a file that has not grown."""
_READ_BYTES = 1 << 20


class LineChunk(NamedTuple):
    """Lines with as many samples as a chunk has, or those before the end of the file."""

    lines: tuple[bytes, ...]
    first: int  # number of its first line, from 1


class ChunkCutter:
    """Is given the bytes of a file in pieces of any size. Lines that aren't blank are samples; a chunk ends with the
    line of its last sample."""

    def __init__(self, samples: int) -> None:
        self._whole, self._rest = samples, b""
        self._lines: list[bytes] = []
        self._first = 1
        self.samples = 0  # of the chunk that isn't whole yet

    def feed(self, piece: bytes) -> Iterator[LineChunk]:
        """The chunks that `piece` completes. A line counts when it has its end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._lines.append(line + b"\n")
            self.samples += bool(line.strip())
            if self.samples == self._whole:
                yield self._cut()

    def end(self) -> Iterator[LineChunk]:
        """Nothing follows: the last chunk, if it has a sample. A last line without its end counts now."""
        if self._rest:
            yield from self.feed(b"\n")
        if self.samples:
            yield self._cut()

    def _cut(self) -> LineChunk:
        made = LineChunk(tuple(self._lines), self._first)
        self._first += len(self._lines)
        self._lines, self.samples = [], 0
        return made


def read_growing(path: Path) -> Iterator[bytes]:
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
                raise InvalidInputError(
                    str(path), f"has become shorter than the {file.tell():,} bytes read; only append"
                )
            yield b""
            time.sleep(POLL_SECONDS)


class _Task(msgspec.Struct):
    config: dict[str, Any]
    folder: str
    where: str


class Sealing(msgspec.Struct, omit_defaults=True):
    """News of the file: a sealed chunk, how far it has been read, or why no more can be."""

    cache: str = ""  # of a sealed chunk, its token cache: a folder below that of all caches
    following: int = 0  # samples after the last whole chunk
    caught_up: bool = False  # all that was in the file has been read
    ended: bool = False  # and its end is marked
    refused: tuple[str, str] | None = None
    failed: str = ""


class SealingProcess:
    """The process, and a thread that passes on what it says: `take` gets all of it, and then `fail` why it ended before
    the file did."""

    def __init__(
        self, config: RunFile, folder: Path, where: str, take: Callable[[Sealing], None],
        fail: Callable[[TrainctlError], None],
    ) -> None:  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainctl.trainer.data.sealing"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._task = _Task(run_file.to_dict(config), str(folder), where)
        self._take, self._fail, self._closed = take, fail, False
        self._thread = threading.Thread(target=self._run, name="sealing", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the process and the thread."""
        self._closed = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._listen()
        except TrainctlError as error:
            self._fail(error)
        except (OSError, ValueError) as error:
            self._fail(TrainctlError(f"the token cache can't be read: {first_line(error)}; delete it to make it again"))

    def _listen(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(msgspec.json.encode(self._task) + b"\n")
            self._process.stdin.flush()
        with self._process.stdout as output:
            for line in output:
                said = msgspec.json.decode(line, type=Sealing)
                if said.refused is not None:
                    raise InvalidInputError(*said.refused)
                if said.failed:
                    raise TrainctlError(said.failed)
                self._take(said)
                if said.ended:
                    return
        if not self._closed:
            raise TrainctlError("the process that follows the data has ended; look in the kernel log for a kill")


def seal(config: RunFile, folder: Path, where: str) -> Iterator[Sealing]:
    """What happens to the file of `config`, as it happens, until its end is marked. Raises InvalidInputError naming
    file and line."""
    cutter, path, tokenizer = ChunkCutter(config.data.chunk_samples), Path(config.data.path), _Tokenizer(config, where)
    before: Sealing | None = None
    for piece in read_growing(path):
        for chunk in cutter.feed(piece):
            yield Sealing(cache=tokenizer.seal(chunk, path, folder))
        if not piece:
            now = Sealing(following=cutter.samples, caught_up=True)
            if now != before:
                yield now
            before = now
    for chunk in cutter.end():
        yield Sealing(cache=tokenizer.seal(chunk, path, folder))
    yield Sealing(caught_up=True, ended=True)


class _Tokenizer:
    """Loaded for the first chunk that isn't in the cache."""

    def __init__(self, config: RunFile, where: str) -> None:
        self._config, self._recipe = config, recipe_of(config, where)
        self._encode: Encode | None = None

    def seal(self, chunk: LineChunk, path: Path, folder: Path) -> str:
        """The name of its cache, which is there then."""
        name = chunk_name(self._config, chunk.lines)
        if not (folder / name).is_dir():
            self._encode = self._encode or self._recipe.encoder()
            recipe, encode = self._recipe, self._encode
            part = Chunk(path, list(chunk.lines), chunk.first, sum(map(len, chunk.lines)))
            make_cache(folder / name, lambda work, _: write_chunk(recipe, encode, part, work))
        return name


def main() -> int:
    """Follow one file; the exit status."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # a trainer blocks them
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    set_title("tokenizer")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the trainers of this machine need its cores
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Task)
    threading.Thread(target=end_with_input, daemon=True).start()
    try:
        with ended_by_interrupt():
            config = run_file.parse(task.config)
            if config.data.kind == "rows":
                import_tokenizers(config.data.tokenizer)
            for news in seal(config, Path(task.folder), task.where):
                _say(news)
    except InvalidInputError as error:
        _say(Sealing(refused=(error.where, error.problem)))
    except (TrainctlError, OSError, MemoryError) as error:
        _say(Sealing(failed=f"the data can't be read: {first_line(error)}"))
    return 0


def _say(news: Sealing) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
