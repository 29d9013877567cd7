"""`trainctl export`: a run's table as CSV, JSON lines or Parquet, to standard output or a file, whole or not there."""

import codecs
import contextlib
import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.files.durable_files import replaced
from trainctl.protocol.machine.standard_streams import STANDARD_OUTPUT, silence
from trainctl.protocol.wire.codec import encode_json
from trainctl.tui.export.rows import COLUMNS, Row, What

Format = Literal["csv", "jsonl", "parquet"]


class Writer(Protocol):
    """Takes a table's rows, a page at a time."""

    def write(self, rows: list[Row]) -> None: ...
    def close(self) -> None: ...


def open_writer(kind: Format, what: What, stream: IO[bytes]) -> Writer:
    """Return the writer of a format. Raises InvalidInputError if what it needs isn't installed."""
    kinds: dict[str, type[Any]] = {"csv": _Csv, "jsonl": _JsonLines, "parquet": _Parquet}
    writer: Writer = kinds[kind](COLUMNS[what], stream)
    return writer


def _flat(rows: list[Row]) -> list[Row]:
    """Objects as JSON text."""
    return [tuple(encode_json(value) if isinstance(value, dict) else value for value in row) for row in rows]


class _Csv:
    """A header and a line a row; what isn't known is empty, and numbers may be `nan`, `inf` or `-inf`."""

    def __init__(self, columns: dict[str, type], stream: IO[bytes]) -> None:
        self._head = tuple(columns)
        self._csv = csv.writer(codecs.getwriter("utf-8")(stream, "replace"), lineterminator="\n")

    def write(self, rows: list[Row]) -> None:
        """The header first, once there is something to write: a run that isn't there leaves nothing."""
        flat = [tuple(map(_cell, row)) for row in _flat(rows)]
        self._csv.writerows([self._head, *flat] if self._head else flat)
        self._head = ()

    def close(self) -> None:
        self.write([])


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters other than tabs and line ends."""
_FORMULA = re.compile(r"[=@\t]|[+-](?!\d+(\.\d+)?$)")


def _cell(value: Any) -> Any:
    """Return a cell that a spreadsheet takes for text where it is text: with a quotation mark before what would begin a
    formula, and without control characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    plain = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value)
    return f"'{plain}" if _FORMULA.match(plain) else plain


class _JsonLines:
    """An object a row; what isn't known is null, and numbers that JSON lacks are `"NaN"` or `"Infinity"`."""

    def __init__(self, columns: dict[str, type], stream: IO[bytes]) -> None:
        self._names, self._stream = tuple(columns), stream

    def write(self, rows: list[Row]) -> None:
        lines = (encode_json(dict(zip(self._names, row, strict=True))) for row in rows)
        self._stream.write("".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        return None


class _Parquet:
    """A row group a page."""

    def __init__(self, columns: dict[str, type], stream: IO[bytes]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            problem = f"parquet needs pyarrow; {installing('parquet')}"
            raise InvalidInputError("--format", problem) from None
        kinds = {
            int: pyarrow.int64(),
            bool: pyarrow.bool_(),
            float: pyarrow.float64(),
            str: pyarrow.string(),
            dict: pyarrow.string(),
        }
        self._arrow = pyarrow
        self._schema = pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
        self._writer = pyarrow.parquet.ParquetWriter(stream, self._schema)

    def write(self, rows: list[Row]) -> None:
        if rows:
            names = self._schema.names
            columns = [
                [_whole(value, field.type) for value in column]
                for field, column in zip(self._schema, zip(*_flat(rows), strict=True), strict=True)
            ]
            table = self._arrow.table(dict(zip(names, columns, strict=True)), schema=self._schema)
            self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()


def _whole(value: Any, kind: Any) -> Any:
    """History sends every number as a float."""
    return int(value) if isinstance(value, float) and str(kind) == "int64" else value


@contextlib.contextmanager
def destination(path: Path | None, option: str = "--output") -> Iterator[IO[bytes]]:
    """Standard output, or a file that takes its name once all is written. Raises InvalidInputError with the
    `option` that names the file, if it can't be written."""
    if path is None:
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except OSError as error:
            error.filename = error.filename or STANDARD_OUTPUT
            silence(sys.stdout)
            raise
        return
    try:
        with replaced(path) as file:
            yield file
    except OSError as error:
        raise InvalidInputError(option, f"{path}: {error.strerror}") from None
