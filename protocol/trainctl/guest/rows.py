"""Rows of steps on their way to the agent: what the loop gave as numbers, lines of JSON, and what is confirmed.

Pure: no socket, file or clock.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

TYPE_CHECKING = False  # typing takes longer to load than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any, Literal

    RawStep = tuple[int, float, float, Any, Any, Any, Any, dict[str, Any], dict[str, float] | None]
    """A step from `step()`: number, Unix time, seconds, loss, samples, tokens, learning rate, metrics and phases."""
    Encoded = tuple[int, bytes]
    """A step's number, and the rest as JSON without the opening brace."""
    Event = dict[str, Any]
    """Something that happened in the loop, for the run's events: severity, text and step."""
    Rewind = int
    """The step after which the loop goes on, so that later ones in the record are retracted."""
    Kind = Literal["row", "event", "rewind"]
    Batch = tuple[Kind, int, list[bytes]]
    """The content of one line: rows, an event or a rewind; its last step as the loop counts; and the encoded rows, or
    the event's line."""

MAX_ROWS = 100_000
"""Most rows that wait for the agent's confirmation; the oldest are dropped first."""
MAX_METRICS = 64
"""Most metrics of a run's own that the agent records."""
_ROWS_PER_LINE = 200
_BYTES_PER_LINE = 256 * 1024  # with the rows' outcomes far from the agent's limit of 1 MiB
_PHASES = frozenset({"data", "forward", "backward", "sync", "optimizer", "wait"})
_FIELDS = frozenset({"grad_norm", "global_batch"})
_OF_RANK = frozenset({"samples", "tokens"})
_COUNTS = _OF_RANK | {"global_batch"}
_MAX_COUNT = 2**63 - 1
_MAX_TEMPLATES = 256
_IN_NAMES = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_.:/-")


def settle(value: Any) -> Any:
    """Return a value that a later conversion can trust, without waiting for a device: an array of MLX, which belongs to
    its thread, and one of NumPy as numbers, a tensor of torch without its graph and with its version."""
    how = SETTLE[type(value)] = _way_to_settle(type(value))
    return how(value)


def _way_to_settle(kind: type) -> Callable[[Any], Any]:
    if kind.__module__.partition(".")[0] in ("mlx", "numpy") and hasattr(kind, "item"):
        return lambda array: array.item() if array.size == 1 else array
    if hasattr(kind, "requires_grad") and hasattr(kind, "_version"):
        return _settle_tensor
    return lambda value: value


def _settle_tensor(tensor: Any) -> Any:
    try:
        version = tensor._version
    except RuntimeError:  # made in inference mode
        return tensor
    return (tensor.detach() if tensor.requires_grad else tensor), version  # its graph may hold a batch's activations


SETTLE: dict[type, Callable[[Any], Any]] = {}
"""The ways to settle values of the types that `settle` was given."""


class RowEncoder:
    """Makes JSON of steps, and says once per name what can't be recorded."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        """Reasons why values can't be recorded; the caller empties it."""
        self._names: dict[str, str] = {}  # as the loop has them -> as the record has them; empty: left out
        self._complained: set[str] = set()
        self._templates: dict[tuple[str, ...], str] = {}

    def encode(self, raw: RawStep) -> bytes:
        """Return a step as JSON, without its number and the opening brace."""
        _, at, seconds, loss, samples, tokens, rate, metrics, phases = raw
        own: dict[str, Any] = {"loss": loss, "learning_rate": rate, "samples": samples, "tokens": tokens}
        for name in _FIELDS & metrics.keys():
            own[name] = metrics.pop(name)
        in_phases = ""
        if phases:
            metrics.update({f"{name}_seconds": spent for name, spent in phases.items() if name not in _PHASES})
            in_phases = f',"phases":{_encode({name: spent for name, spent in phases.items() if name in _PHASES})}'
        names: list[str] = []
        numbers: list[Any] = [at, seconds]
        of_rank = [seconds]
        for given in (own, metrics):
            for name, value in given.items():
                if value is not None:
                    number = value if type(value) is float and name not in _COUNTS else self._number(name, value)
                    if number is not None:
                        names.append(name)
                        numbers.append(number)
                        if given is own and name in _OF_RANK:
                            of_rank.append(number)
            names.append("")
        if not math.isfinite(sum(numbers)):
            numbers = [_quoted(number) for number in numbers]
        template = self._templates.get(key := tuple(names))
        if template is None:
            template = self._templates[key] = self._template(names)
        return (template % (*numbers, *of_rank, in_phases)).encode()

    def _template(self, names: list[str]) -> str:
        """Return the JSON of steps with these values: a step's own, an empty name, and metrics."""
        if len(self._templates) >= _MAX_TEMPLATES:
            self._templates.clear()
        own, metrics = names[: names.index("")], names[names.index("") + 1 : -1]
        fields = [f'"{name}":%s' for name in ("committed_at", "step_seconds", *own)]
        values, left_out = [], ""
        for wire in map(self._name, metrics):
            if wire:
                values.append(f'{left_out}"{wire}":%s')
                left_out = ""
            else:
                left_out += "%.0s"  # takes a value and shows none of it
        of_rank = "".join(f',"{name}":%s' for name in ("step_seconds", *(name for name in own if name in _OF_RANK)))
        return f'{",".join(fields)},"values":{{{",".join(values)}{left_out}}},"parts":[{{"rank":0{of_rank}%s}}]}}'

    def _name(self, name: str) -> str:
        """Return a metric's name in the record; empty if it is left out."""
        if name in self._names:
            return self._names[name]
        if name in _FIELDS or name == "eval_loss":
            wire = name
        else:
            wire = "".join(char if char in _IN_NAMES else "_" for char in name.lower().removeprefix("user:"))
            wire = f"user:{wire}"[:64]
            if sum(1 for other in self._names.values() if other.startswith("user:")) >= MAX_METRICS:
                self._complain("\0", f"only {MAX_METRICS} metrics are recorded; {name!r} is the first that isn't")
                wire = ""
        self._names[name] = wire
        return wire

    def _number(self, name: str, value: Any) -> float | int | None:
        """Return a value as a number, or None if it is none."""
        try:
            if type(value) is tuple:
                tensor, version = value
                number = float(tensor)
                if tensor._version != version:  # looked at last, for it may change meanwhile
                    self._complain(name, f"{name!r} was changed in place before it was read: pass a clone() of it")
                    return None
            else:
                number = float(value)
            return number if name not in _COUNTS else min(max(0, int(number)), _MAX_COUNT)
        except Exception as error:  # noqa: BLE001  any library's arrays end up here
            problem = str(error).partition("\n")[0]
            self._complain(name, f"{name!r} isn't recorded: {type(value).__name__} is no number ({problem})")
            return None

    def _complain(self, name: str, text: str) -> None:
        if name not in self._complained:
            self._complained.add(name)
            self.complaints.append(text)


_encoder: Callable[[Any], str] | None = None


def _encode(value: Any) -> str:
    global _encoder
    if _encoder is None:
        import json  # here, for it takes longer to load than the rest of this package, and only the thread needs it

        _encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
    return _encoder(value)


def _quoted(number: float) -> float | str:
    return number if math.isfinite(number) else f'"{_finite(number)}"'


def to_json(value: Any) -> bytes:
    """Return JSON, with numbers that aren't finite as strings, and bytes of file names that aren't UTF-8 as "?"."""
    try:
        text = _encode(value)
    except ValueError:
        text = _encode(_finite(value))
    return text.encode(errors="replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value


def line(kind: str, **fields: Any) -> bytes:
    """Return a line other than of steps."""
    return to_json({"type": kind, **fields}) + b"\n"


def steps_line(rows: Sequence[bytes], outcomes: Sequence[dict[str, Any]]) -> bytes:
    """Return the line of encoded steps and of orders' outcomes."""
    return b'{"type":"steps","steps":[%b],"outcomes":%b}\n' % (b",".join(rows), to_json(outcomes))


class Outbox:
    """Rows, events and rewinds in the order in which they happened, until the agent has them in its record."""

    def __init__(self) -> None:
        self.dropped = 0
        """Rows that neither the agent nor the spool got, because too many waited."""
        self.base = 0
        """Added to the numbers of rows: the newest step of the run's process before, where the loop gives none."""
        self._entries: deque[tuple[Kind, int, Any]] = deque()
        self._first = 0  # entries are counted; this many are gone,
        self._sent = 0  # this many were sent on this connection or are gone,
        self._spooled = 0  # and this many are in the spool or gone
        self._events = 0
        self._has_rows = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_sent(self) -> bool:
        """Return whether nothing waits to be sent on this connection."""
        return self._sent == self._first + len(self._entries)

    @property
    def unspooled_rows(self) -> int:
        """Return how many rows neither the agent nor the spool has."""
        return sum(1 for kind, _, _ in islice(self._entries, self._spooled - self._first, None) if kind == "row")

    def add(self, item: RawStep | Encoded | Event | Rewind, encoder: RowEncoder) -> None:
        """Add what the loop handed over."""
        if isinstance(item, tuple):
            self._has_rows = True
            self._entries.append(("row", item[0], item[1] if len(item) == 2 else encoder.encode(item)))
            for text in encoder.complaints:
                self.add({"severity": "warning", "text": text, "step": item[0]}, encoder)
            encoder.complaints.clear()
        elif isinstance(item, dict):
            self._events += 1
            self._entries.append(("event", self._events, item))
        else:
            if not self._has_rows:
                self.base = 0  # the loop numbers its steps itself
            self._entries.append(("rewind", item, None))
        if len(self._entries) > MAX_ROWS:
            self.dropped += self._entries[0][0] == "row" and self._spooled <= self._first
            self._forget_first()

    def take(self) -> Batch | None:
        """Return what the next line carries; it then counts as sent."""
        batch = next(self._batches(self._sent), None)
        if batch is not None:
            self._sent += max(1, len(batch[2]))
        return batch

    def send_again(self) -> None:
        """Send all that isn't confirmed once more, on a new connection."""
        self._sent = self._first

    def confirm(self, step: int, event: int, *, rewound: bool = False) -> None:
        """Forget what the agent has recorded. `rewound`: it has just retracted later steps, as it was asked."""
        kind = ""
        while rewound and kind != "rewind" and self._entries:
            kind = self._forget_first()
        newest = {"row": step - self.base, "event": event, "rewind": -1}
        while self._entries and self._entries[0][1] <= newest[self._entries[0][0]]:
            self._forget_first()

    def _forget_first(self) -> Kind:
        self._first += 1
        self._sent, self._spooled = max(self._sent, self._first), max(self._spooled, self._first)
        return self._entries.popleft()[0]

    def unspooled(self) -> Iterator[Batch]:
        """Return what the spool lacks, in order."""
        return self._batches(self._spooled)

    def mark(self, *, spooled: bool) -> None:
        """Say whether the spool has all that waits."""
        self._spooled = self._first + len(self._entries) * spooled

    def _batches(self, begin: int) -> Iterator[Batch]:
        rows: list[bytes] = []
        size = last = 0
        for kind, number, content in islice(self._entries, begin - self._first, None):
            if rows and (kind != "row" or len(rows) >= _ROWS_PER_LINE or size > _BYTES_PER_LINE):
                yield "row", last, rows
                rows, size = [], 0
            if kind == "row":
                rows.append(b'{"step":%d,%b' % (self.base + number, content))
                size += len(content)
                last = number
            elif kind == "event":
                step = None if content["step"] is None else self.base + content["step"]
                yield kind, last, [line("event", **{**content, "number": number, "step": step})]
            else:
                yield kind, number, []
        if rows:
            yield "row", last, rows
