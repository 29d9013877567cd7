"""Sealing the chunks of a file that still grows: followed and tokenized by a process of its own while training runs.

`python -m trainctl.trainer.data.sealing` is that process. Each line of its output is a `Sealing`. It ends when its
input closes, so it doesn't outlive the trainer that started it. If several trainers of a node follow one file, one
tokenizes a chunk and the others take it from the cache.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trainctl.protocol.config.run_file import end_mark
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.chunk_tokens import Encode
from trainctl.trainer.data.rows import Chunk
from trainctl.trainer.data.token_cache import chunk_name, recipe_of, write_chunk
from trainctl.trainer.data.tokenizing import Answer, answers_of, make_cache, say, serve, start_process

POLL_SECONDS = 0.2
"""Seconds between two looks at a file that has not grown."""
_READ_BYTES = 1 << 20


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


class Sealing(Answer):
    """News of the file: a sealed chunk, how far it has been read, or why no more can be."""

    cache: str = ""  # of a sealed chunk, its token cache: a folder below that of all caches
    following: int = 0  # samples after the last whole chunk
    caught_up: bool = False  # all that was in the file has been read
    ended: bool = False  # and its end is marked


class SealingProcess:
    """The process, and a thread that passes its news on to `take`, and to `fail` the reason why it ended before
    the file did."""

    def __init__(
        self,
        config: RunFile,
        folder: Path,
        where: str,
        take: Callable[[Sealing], None],
        fail: Callable[[TrainctlError], None],
    ) -> None:
        self._process = start_process("trainctl.trainer.data.sealing", config, folder, where)
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
        assert self._process.stdout is not None
        with self._process.stdout:
            for news in answers_of(self._process, Sealing):
                self._take(news)
                if news.ended:
                    return
        if not self._closed:
            raise TrainctlError("the process that follows the data has ended; look in the kernel log for a kill")


def seal(config: RunFile, folder: Path, where: str) -> Iterator[Sealing]:
    """Yield what happens to the file of `config`, as it happens, until its end is marked. Raises InvalidInputError
    naming file and line."""
    path = Path(config.data.path)
    cutter, tokenizer = ChunkCutter(path, config.data.chunk_samples), _Tokenizer(config, where)
    before: Sealing | None = None
    for piece in read_growing(path):
        for chunk in cutter.feed(piece):
            yield Sealing(cache=tokenizer.seal(chunk, folder))
        if not piece:
            now = Sealing(following=cutter.samples, caught_up=True)
            if now != before:
                yield now
            before = now
    for chunk in cutter.end():
        yield Sealing(cache=tokenizer.seal(chunk, folder))
    yield Sealing(caught_up=True, ended=True)


class _Tokenizer:
    """Loaded for the first chunk that isn't in the cache."""

    def __init__(self, config: RunFile, where: str) -> None:
        self._config, self._recipe = config, recipe_of(config, where)
        self._encode: Encode | None = None

    def seal(self, chunk: Chunk, folder: Path) -> str:
        """Return the name of its cache, which is there then."""
        name = chunk_name(self._config, chunk.content)
        if not (folder / name).is_dir():
            self._encode = encode = self._encode or self._recipe.encoder()
            make_cache(folder / name, lambda work, _: write_chunk(self._recipe, encode, chunk, work))
        return name


def _follow(config: RunFile, folder: Path, where: str) -> None:
    for news in seal(config, folder, where):
        say(news)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the trainers of this machine need its cores
    sys.exit(serve(_follow, "the data can't be read"))
