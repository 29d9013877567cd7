"""Source files in chunks that are tokenized one by one: whole lines, batches of Parquet rows, or parts of a text.

Parts of a text overlap. Each is tokenized with the start of the next, and the two are joined where they agree.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.common.errors import first_line

MOST_LINE_BYTES = 1 << 26
LINES_BYTES, TEXT_BYTES = 1 << 19, 1 << 20
"""Bytes of a chunk of lines, and of text. Larger ones spread less evenly over processes, and take more memory."""
OVERLAP_BYTES = 1 << 13
"""Bytes of the next part that a part of a text is tokenized with."""
AGREEING_TOKENS = 16
"""Tokens in a row that two parts must have in common where they are joined."""
_PARQUET_ROWS = 256


class Chunk(NamedTuple):
    """Part of a source."""

    source: Path
    content: Any  # bytes of text, a list of lines, or a pyarrow RecordBatch
    first: int  # its first line or row, from 1; of text its first byte, from 0
    size: int  # bytes of the source
    following: bytes = b""  # text: the start of the next part
    is_end: bool = True  # text: the file ends with it


class TextTokens(NamedTuple):
    """What a part of a text and what follows it tokenize to."""

    tokens: NDArray[np.uint32]
    starts: NDArray[np.int64]  # the first character of each token, from the part's start
    length: int  # characters of the part itself
    is_end: bool


def row_chunks(path: Path, *, grows: bool = False) -> Iterator[Chunk]:
    """Rows of a JSON-lines or Parquet file; if it `grows`, without a last line that has no end. Raises
    InvalidInputError for one that isn't Parquet."""
    return _parquet_chunks(path) if path.suffix.lower() == ".parquet" else _line_chunks(path, grows=grows)


def text_chunks(path: Path, size: int = TEXT_BYTES, overlap: int = OVERLAP_BYTES) -> Iterator[Chunk]:
    """Parts of a UTF-8 text that begin and end between characters."""
    with path.open("rb") as file:
        held, first = b"", 0
        while True:
            held += file.read(size + overlap + 1 - len(held))
            if len(held) <= size + overlap:
                yield Chunk(path, held, first, len(held))
                return
            cut, end = _between(held, size), _between(held, size + overlap)
            yield Chunk(path, held[:cut], first, cut, held[cut:end], is_end=False)
            held, first = held[cut:], first + cut


def joined(
    parts: Iterable[TextTokens], begin: NDArray[np.uint32], end: NDArray[np.uint32]
) -> Iterator[NDArray[np.uint32]]:
    """The tokens of texts whose parts come in order, without what two parts have in common; `begin` precedes each text
    that doesn't start with it, and `end` follows each."""
    before: TextTokens | None = None
    used = 0  # tokens of the part that are left out at its start
    for part in parts:
        if before is not None:
            border = int(np.searchsorted(before.starts, before.length))
            tail = _marks(before.starts[border:] - before.length, before.tokens[border:])
            reach = int(np.searchsorted(part.starts, int(tail[-1][0]) + 1)) if tail else 0
            keep, skip = seam(tail, _marks(part.starts[:reach], part.tokens[:reach]))
            yield before.tokens[used : border + keep]
            used = skip
        elif not np.array_equal(part.tokens[: len(begin)], begin):
            yield begin
        before = part
        if part.is_end:
            yield part.tokens[used:]
            yield end
            before, used = None, 0


def seam(tail: Sequence[tuple[int, int]], head: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """How many tokens of a part's `tail` to keep, and how many of the next part's `head` to leave out. Both are
    (first character, ID), in order. They are joined in the middle of the first AGREEING_TOKENS that agree; without
    such, at the border."""
    mine = theirs = run = 0
    while mine < len(tail) and theirs < len(head):
        if tail[mine] == head[theirs]:
            run += 1
            if run == AGREEING_TOKENS:
                return mine + 1 - run // 2, theirs + 1 - run // 2
            mine, theirs = mine + 1, theirs + 1
            continue
        run = 0
        place = min(tail[mine][0], head[theirs][0])
        mine, theirs = mine + (tail[mine][0] == place), theirs + (head[theirs][0] == place)
    return 0, 0


def _marks(starts: NDArray[np.int64], tokens: NDArray[np.uint32]) -> list[tuple[int, int]]:
    return list(zip(starts.tolist(), tokens.tolist(), strict=True))


def _between(text: bytes, place: int) -> int:
    """A place near `place` where no character and no line end is divided; what isn't UTF-8 is found later."""
    for _ in range(3):
        place -= place < len(text) and text[place] & 0xC0 == 0x80
    return place - (text[place - 1 : place + 1] == b"\r\n")


def _line_chunks(path: Path, *, grows: bool) -> Iterator[Chunk]:
    first = 1
    with path.open("rb") as file:
        while lines := _read_lines(file, path, first):
            if grows and not lines[-1].endswith(b"\n"):
                del lines[-1]
            yield Chunk(path, lines, first, sum(map(len, lines)))
            first += len(lines)


def _read_lines(file: IO[bytes], path: Path, first: int) -> list[bytes]:
    """Return some lines, of which `first` is the number of the first; at the end none. Raises InvalidInputError naming
    one that is longer than any row."""
    lines: list[bytes] = []
    size = 0
    while size < LINES_BYTES and (line := file.readline(MOST_LINE_BYTES + 1)):
        if len(line) > MOST_LINE_BYTES:
            problem = f"longer than {MOST_LINE_BYTES // 2**20} MB, the most for one row; one JSON object a line is read"
            raise InvalidInputError(f"{path}: line {first + len(lines)}", problem)
        lines.append(line)
        size += len(line)
    return lines


def _parquet_chunks(path: Path) -> Iterator[Chunk]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise InvalidInputError(str(path), f"Parquet needs pyarrow; {installing('parquet')}") from None
    first = 1
    try:
        file: Any = pyarrow.parquet.ParquetFile(path)
        row_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            yield Chunk(path, batch, first, int(row_bytes * batch.num_rows))
            first += batch.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise InvalidInputError(str(path), f"not a readable Parquet file: {first_line(error)}") from None
