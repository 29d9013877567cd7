"""The lines of a file that still grows, cut into chunks: where one ends depends on the file's content alone."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trainctl.protocol.config.run_file import end_mark
from trainctl.protocol.errors import InvalidInputError

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
    """What a file has and gets, in pieces, until its end is marked; an empty one says that there is no more for now.
    Raises InvalidInputError if it becomes shorter, OSError if it can't be read."""
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
