"""Steps of a run from files that its program writes: JSON lines, CSV, or TensorBoard's event files.

A file is followed while it grows. A step is given once a later one begins, or the program has ended: until then, more
of its values may come.
"""

import contextlib
import csv
import json
import math
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.guest.scalars import field_of
from trainctl.protocol.errors import InvalidInputError, installing

_STEPS = ("step", "global_step", "_step", "steps", "iteration", "iter", "it")
_TIMES = ("_timestamp", "timestamp", "time", "wall_time")
_RATES = ("lr", "learning_rate", "train/lr", "train/learning_rate")
_LENGTH = struct.Struct("<Q4x")
"""A record of an event file: its length, a checksum of that, its bytes, and a checksum of them."""
_CHECKSUM_BYTES = 4
_PIECE_BYTES = 1 << 20


@dataclass
class FileStep:
    """A step as a file has it. `at`: Unix seconds."""

    number: int
    at: float
    seconds: float = 0.0
    loss: float | None = None
    learning_rate: float | None = None
    values: dict[str, float] = field(default_factory=dict)


class FileSteps:
    """Joins a file's rows to steps that count up from 1. Pure."""

    def __init__(self) -> None:
        self.older = 0
        """Rows that were left out because their step had passed."""
        self._newest: FileStep | None = None
        self._shift: int | None = None

    def add(self, values: Mapping[str, Any], step: int | None, at: float) -> FileStep | None:
        """Take a row. Returns the step before if it is complete now. `step`: the file's own number, if it has one."""
        before = self._newest
        if step is not None and self._shift is None:
            self._shift = 1 if step < 1 else 0
        number = (before.number if before else 0) + 1 if step is None else step + (self._shift or 0)
        if number < max(1, before.number if before else 1):
            self.older += 1
            return None
        if before is None or number > before.number:
            seconds = max(0.0, at - before.at) / (number - before.number) if before else 0.0
            self._newest = FileStep(number, at, seconds)
        _fill(self._newest or FileStep(number, at), values)
        return before if before is not self._newest else None

    def last(self) -> FileStep | None:
        """Return the newest step, which no row follows."""
        newest, self._newest = self._newest, None
        return newest


def _fill(step: FileStep, values: Mapping[str, Any]) -> None:
    for name, given in values.items():
        if isinstance(given, Mapping):
            _fill(step, {f"{name}/{inner}": value for inner, value in given.items()})
            continue
        value = _number(given)
        if value is None or name in _STEPS or name in _TIMES:
            continue
        if name in _RATES:
            step.learning_rate = value
        elif (own := field_of(name)) == "loss":
            step.loss = value
        else:
            step.values[own] = value


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return float(value)
    return None


def _row(values: Mapping[str, Any], now: float) -> tuple[Mapping[str, Any], int | None, float]:
    numbers = [_number(values[name]) for name in _STEPS if name in values]
    times = [_number(values[name]) for name in _TIMES if name in values]
    step = next((int(number) for number in numbers if number is not None and math.isfinite(number)), None)
    # What counts from the program's start, or in other units, is no Unix time.
    at = next((number for number in times if number is not None and 1e9 < number < 4e9), now)
    return values, step, at


class MetricFile:
    """A file, or a folder of event files, that may not be there yet."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises InvalidInputError for event files that can't be read here."""
        self._path, self._clock = path, clock
        self._offsets: dict[Path, int] = {}
        self._heading: list[str] = []
        self._steps = FileSteps()
        self._event: Any = None
        if self._is_of_events(path) or path.is_dir():
            self._event = _event_type()

    @property
    def older(self) -> int:
        """Return how many rows were left out because their step had passed."""
        return self._steps.older

    def read(self, *, to_the_end: bool = False) -> list[FileStep]:
        """Return the steps that have been completed since. `to_the_end`: the newest one too: no more will come. Raises
        OSError."""
        found = [step for row in self._rows() if (step := self._steps.add(*row)) is not None]
        last = self._steps.last() if to_the_end else None
        return [*found, last] if last else found

    def _rows(self) -> Iterator[tuple[Mapping[str, Any], int | None, float]]:
        if self._path.is_dir():
            self._event = self._event or _event_type()
            for path in sorted(self._path.rglob("*tfevents*")):
                yield from self._events(path)
        elif self._is_of_events(self._path):
            yield from self._events(self._path)
        elif self._path.exists():
            for line in self._lines():
                yield from self._of_csv(line) if self._path.suffix == ".csv" else self._of_json(line)

    @staticmethod
    def _is_of_events(path: Path) -> bool:
        return "tfevents" in path.name

    def _new(self, path: Path, whole: Callable[[bytes], int]) -> bytes:
        """Return what was added to a file, as far as `whole` says it is complete. One that was begun again is read from
        its start."""
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            if file.seek(0, 2) < offset:
                offset, self._heading = 0, []
            file.seek(offset)
            data = b""
            while piece := file.read(_PIECE_BYTES):
                data += piece
        data = data[: whole(data)]
        self._offsets[path] = offset + len(data)
        return data

    def _lines(self) -> list[str]:
        data = self._new(self._path, lambda data: data.rfind(b"\n") + 1)
        return data.decode("utf-8-sig", "replace").splitlines()

    def _of_json(self, line: str) -> Iterator[tuple[Mapping[str, Any], int | None, float]]:
        with contextlib.suppress(ValueError):  # what isn't JSON is left out: some programs write other lines between
            values = json.loads(line)
            if isinstance(values, dict):
                yield _row(values, self._clock())

    def _of_csv(self, line: str) -> Iterator[tuple[Mapping[str, Any], int | None, float]]:
        cells = next(csv.reader([line]), [])
        if not self._heading:
            self._heading = [cell.strip() for cell in cells]
        elif cells:
            yield _row(dict(zip(self._heading, cells, strict=False)), self._clock())

    def _events(self, path: Path) -> Iterator[tuple[Mapping[str, Any], int | None, float]]:
        data, at = self._new(path, _whole_records), 0
        while at < len(data):
            size = _LENGTH.unpack_from(data, at)[0]
            event = self._event.FromString(data[at + _LENGTH.size : at + _LENGTH.size + size])
            at += _LENGTH.size + size + _CHECKSUM_BYTES
            values = {value.tag: _scalar(value) for value in event.summary.value}
            if values:
                yield values, event.step, event.wall_time


def _whole_records(data: bytes) -> int:
    at = 0
    while at + _LENGTH.size <= len(data):
        end = at + _LENGTH.size + int(_LENGTH.unpack_from(data, at)[0]) + _CHECKSUM_BYTES
        if end > len(data):
            break
        at = end
    return at


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    tensor = value.tensor if value.HasField("tensor") else None
    if tensor is None or tensor.tensor_shape.dim:
        return None
    if tensor.float_val:
        return float(tensor.float_val[0])
    return float(struct.unpack("<f", tensor.tensor_content)[0]) if len(tensor.tensor_content) == 4 else None


def _event_type() -> Any:
    """Return the type of TensorBoard's records, of whichever library is installed; neither needs TensorFlow."""
    with contextlib.suppress(ImportError):
        from tensorboardX.proto.event_pb2 import Event

        return Event
    with contextlib.suppress(ImportError):
        from tensorboard.compat.proto.event_pb2 import Event as OwnEvent

        return OwnEvent
    raise InvalidInputError("--metrics", f"TensorBoard's event files need tensorboardX: {installing('tensorboard')}")
