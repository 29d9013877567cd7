"""Rows of steps on their way to the agent: what the loop gave as numbers, lines of JSON, and what is confirmed.

Pure: no socket, file or clock.
"""

import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

MAX_ROWS: Final = 100_000
"""Most rows that wait for the agent's confirmation; the oldest are dropped first."""
MAX_METRICS: Final = 64
"""Most metrics of a run's own that the agent records."""
_ROWS_PER_LINE: Final = 200
_BYTES_PER_LINE: Final = 256 * 1024  # with the rows' outcomes far from the agent's limit of 1 MiB
_PHASES: Final = frozenset({"data", "forward", "backward", "sync", "optimizer", "wait"})
_FIELDS: Final = frozenset({"grad_norm", "global_batch"})
_COUNTS: Final = frozenset({"samples", "tokens", "global_batch"})

RawStep = tuple[int, float, float, Any, Any, Any, Any, dict[str, Any], "dict[str, float] | None"]
"""A step from `step()`: number, Unix time, seconds, loss, samples, tokens, learning rate, metrics and phases."""


@dataclass(frozen=True)
class Event:
    """Something that happened in the loop, for the run's events."""

    text: str
    severity: Literal["info", "good", "warning", "error"] = "info"
    step: int | None = None


@dataclass(frozen=True)
class Rewind:
    """The loop goes on after an earlier step: later ones in the record are retracted."""

    after_step: int


def settle(value: Any) -> Any:
    """Return a value that a later conversion can trust, without waiting for a device: an array of MLX, which belongs to
    its thread, and one of NumPy as numbers, a tensor of torch without its graph and with its version."""
    kind = type(value)
    how = _SETTLE.get(kind)
    if how is None:
        how = _SETTLE[kind] = _way_to_settle(kind)
    return how(value)


def _way_to_settle(kind: type) -> Callable[[Any], Any]:
    if kind.__module__.partition(".")[0] in ("mlx", "numpy") and hasattr(kind, "item"):
        return lambda array: array.item() if array.size == 1 else array
    if hasattr(kind, "requires_grad") and hasattr(kind, "_version"):
        return _settle_tensor
    return lambda value: value


def _settle_tensor(tensor: Any) -> Any:
    if tensor.requires_grad:  # its graph may hold a batch's activations
        tensor = tensor.detach()
    return tensor if tensor.is_inference() else (tensor, tensor._version)


_SETTLE: Final[dict[type, Callable[[Any], Any]]] = {}


class RowEncoder:
    """Makes lines of steps, and says once per name what can't be recorded."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        """Reasons why values can't be recorded; the caller empties it."""
        self._names: dict[str, str] = {}  # as the loop has them -> as the record has them; empty: left out
        self._complained: set[str] = set()

    def encode(self, raw: RawStep) -> bytes:
        """Return a step as JSON, without its number and the opening brace."""
        _, at, seconds, loss, samples, tokens, rate, metrics, phases = raw
        row: dict[str, Any] = {"committed_at": at, "step_seconds": seconds}
        part: dict[str, Any] = {"rank": 0, "step_seconds": seconds}
        for name, count in (("samples", samples), ("tokens", tokens)):
            if count is not None and (value := self._number(name, count)) is not None:
                row[name] = part[name] = value
        if loss is not None and (value := self._number("loss", loss)) is not None:
            row["loss"] = value
        if rate is not None and (value := self._number("lr", rate)) is not None:
            row["learning_rate"] = value
        values = row["values"] = {}
        for name, given in metrics.items():
            known = self._names.get(name)
            wire = self._name(name) if known is None else known
            value = given if type(given) is float else self._number(name, given)
            if value is not None and wire:
                (row if wire in _FIELDS else values)[wire] = value
        if phases:
            part["phases"] = {name: spent for name, spent in phases.items() if name in _PHASES}
            for name in phases.keys() - _PHASES:
                if wire := self._name(f"{name}_seconds"):
                    values[wire] = phases[name]
        row["parts"] = (part,)
        try:
            return _encode(row)[1:].encode()
        except ValueError:
            return _encode(_finite(row))[1:].encode()

    def _name(self, name: str) -> str:
        """Return a metric's name in the record; empty if it is left out."""
        if name in self._names:
            return self._names[name]
        wire = name if name in _FIELDS or name == "eval_loss" else _own_name(name)
        own = sum(1 for known in self._names.values() if known.startswith("user:"))
        if wire.startswith("user:") and own >= MAX_METRICS:
            self._complain("\0", f"only {MAX_METRICS} metrics of a run's own are recorded; {name!r} isn't, nor others")
            wire = ""
        self._names[name] = wire
        return wire

    def _number(self, name: str, value: Any) -> float | int | None:
        """Return a value as a number, or None if it is none."""
        try:
            if type(value) is tuple:
                tensor, version = value
                number = float(tensor)
                if tensor._version != version:  # also if it changed while it was read
                    self._complain(name, f"{name!r} was changed in place before it was read: pass a clone() of it")
                    return None
            else:
                number = float(value)
            return number if name not in _COUNTS else max(0, int(number))
        except Exception as error:  # noqa: BLE001  any library's arrays end up here
            problem = str(error).partition("\n")[0]
            self._complain(name, f"{name!r} isn't recorded: {type(value).__name__} is no number ({problem})")
            return None

    def _complain(self, name: str, text: str) -> None:
        if name not in self._complained:
            self._complained.add(name)
            self.complaints.append(text)


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def _own_name(name: str) -> str:
    own = re.sub(r"[^a-z0-9_.:/-]", "_", name.lower().removeprefix("user:"))
    return f"user:{own}"[:64]


def _finite(value: Any) -> Any:
    """Return what JSON can say: infinities and NaN as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def line(kind: str, **fields: Any) -> bytes:
    """Return a line other than of steps."""
    return _encode(_finite({"type": kind, **fields})).encode() + b"\n"


def steps_line(rows: Sequence[bytes], outcomes: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the line of encoded steps and of orders' outcomes."""
    ended = _encode(_finite(list(outcomes))).encode()
    return b'{"type":"steps","steps":[' + b",".join(rows) + b'],"outcomes":' + ended + b"}\n"


@dataclass
class _Entry:
    kind: Literal["row", "event", "rewind"]
    number: int  # of the step or event; of a rewind the step after which the loop goes on
    row: bytes = b""  # as RowEncoder has it
    event: Event | None = None
    spooled: bool = False


@dataclass(frozen=True)
class Batch:
    """The content of one line: rows, or one event, or a rewind."""

    kind: Literal["row", "event", "rewind"]
    number: int  # of the last row, as the loop counts, or of the event; of a rewind the step after which it goes on
    texts: tuple[bytes, ...]


class Outbox:
    """Rows, events and rewinds in the order in which they happened, until the agent has them in its record."""

    def __init__(self) -> None:
        self.dropped = 0
        """Rows that neither the agent nor the spool got, because too many waited."""
        self.base = 0
        """Added to the numbers of rows: the newest step of the run's process before, where the loop gives none."""
        self._waiting: deque[_Entry] = deque()
        self._sent: deque[_Entry] = deque()  # on this connection, not confirmed yet
        self._events = 0
        self._has_rows = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    @property
    def is_sent(self) -> bool:
        """Return whether nothing waits to be sent on this connection."""
        return not self._waiting

    @property
    def unspooled(self) -> int:
        """Rows that neither the agent nor the spool has."""
        return sum(1 for entry in (*self._sent, *self._waiting) if entry.kind == "row" and not entry.spooled)

    def add_row(self, number: int, text: bytes) -> None:
        self._has_rows = True
        self._waiting.append(_Entry("row", number, text))
        if len(self) > MAX_ROWS:
            oldest = (self._sent or self._waiting).popleft()
            self.dropped += oldest.kind == "row" and not oldest.spooled

    def add_event(self, event: Event) -> None:
        self._events += 1
        self._waiting.append(_Entry("event", self._events, event=event))

    def add_rewind(self, rewind: Rewind) -> None:
        if not self._has_rows:
            self.base = 0  # the loop numbers its steps itself
        self._waiting.append(_Entry("rewind", rewind.after_step))

    def take(self) -> Batch | None:
        """Return what the next line carries; it then counts as sent."""
        if not self._waiting:
            return None
        taken: list[_Entry] = []
        size = 0
        while self._waiting and (not taken or (taken[0].kind == "row" == self._waiting[0].kind)):
            size += len(self._waiting[0].row)
            if taken and (len(taken) >= _ROWS_PER_LINE or size > _BYTES_PER_LINE):
                break
            taken.append(self._waiting.popleft())
        self._sent.extend(taken)
        return self._batch(taken)

    def send_again(self) -> None:
        """Send all that isn't confirmed once more, on a new connection."""
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()

    def confirm(self, step: int, event: int, *, rewound: bool = False) -> None:
        """Forget what the agent has recorded. `rewound`: it has just retracted later steps, as it was asked."""
        if rewound:
            while self._sent and self._sent.popleft().kind != "rewind":
                pass
        newest = {"row": step - self.base, "event": event, "rewind": -1}
        for entries in (self._sent, self._waiting):  # a restarted agent may have what this connection didn't send
            while entries and entries[0].number <= newest[entries[0].kind]:
                entries.popleft()
            if entries:
                return

    def spool(self) -> list[Batch]:
        """Return what the spool lacks, in order; `mark` says that it is written."""
        batches: list[Batch] = []
        run: list[_Entry] = []
        for entry in (*self._sent, *self._waiting):
            if entry.spooled:
                continue
            if run and not (run[0].kind == "row" == entry.kind and len(run) < _ROWS_PER_LINE):
                batches.append(self._batch(run))
                run = []
            run.append(entry)
        return [*batches, self._batch(run)] if run else batches

    def mark(self, *, spooled: bool) -> None:
        """Say whether the spool has all that waits."""
        for entry in (*self._sent, *self._waiting):
            entry.spooled = spooled

    def _batch(self, entries: Sequence[_Entry]) -> Batch:
        kind, number = entries[0].kind, entries[-1].number
        if kind == "rewind":
            return Batch(kind, number, ())
        if (event := entries[0].event) is not None:
            step = None if event.step is None else self.base + event.step
            text = line("event", number=number, severity=event.severity, text=event.text[:4000], step=step)
            return Batch(kind, number, (text,))
        texts = tuple(b'{"step":%d,%b' % (self.base + entry.number, entry.row) for entry in entries)
        return Batch(kind, number, texts)
