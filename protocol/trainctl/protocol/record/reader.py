"""A read-only view of a run's record: its steps, events and evaluations, and any metric at any zoom.

Every method is one or a few short queries, so no transaction outlives it; all raise InvalidInputError if the record
cannot be read. Steps that were retracted are left out everywhere.
"""

import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from trainctl.protocol.errors import InvalidInputError, ProtocolError
from trainctl.protocol.messages import (
    METRICS,
    PHASES,
    RANK_COLUMNS,
    Event,
    Generation,
    HeldOutPairs,
    HostReading,
    KeptPairs,
    Phases,
    RankStep,
    RunView,
    Sample,
    Series,
    StepCommitted,
    StepPlan,
    is_by_name,
    perplexity,
)
from trainctl.protocol.messages.events import AnyEvent, Notice
from trainctl.protocol.record.downsampling import (
    NAMED_ROLLUPS,
    RAW_STEPS_PER_COLUMN,
    RAW_VALUES_PER_COLUMN,
    Rollup,
    Span,
    bucketed,
    choose,
    pieces,
    series_query,
    spans,
    standing,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rollups import (
    EVALUATION_METRIC,
    LIVE_RANK_STEPS,
    NAMED_VALUES,
    OF_EVALUATIONS,
    RUN_RANK,
    WITHOUT_ROLLUPS,
    Evaluation,
    is_finite,
    unpack,
    values_of,
)
from trainctl.protocol.record.schema import (
    NOT_GIVEN,
    ROLLUP_LEVELS,
    UNREADABLE,
    VALUES_FROM,
    open_for_reading,
    refusing_damage,
)
from trainctl.protocol.wire import codec
from trainctl.protocol.wire.codec import decode_json

LEAD_VIEW_KEY, VIEW_KEY = "lead-view", "view"
"""Keys of the run as its lead last showed it, which all nodes keep, and as this node's agent knew it."""
VIEW_KEYS = (LEAD_VIEW_KEY, VIEW_KEY)
_Values = dict[tuple[int, int], dict[str, float]]
"""Metrics by name, for each step and rank."""
K = TypeVar("K")
_EVENT_DATA = msgspec.msgpack.Decoder(AnyEvent)
_STEP_COLUMNS = (
    "term, n, step, committed_at, loss, weight, samples, learning_rate, grad_norm, cursor, global_batch, plan_version,"
    " step_seconds, tokens_total, tokens, weight_total, seconds_total, skipped"
)
_NUMBERS = ("weight", "learning_rate", "step_seconds", "tokens_total", "weight_total", "seconds_total")
"""Columns of a step that hold NOT_A_NUMBER for a NaN."""
_RANK_COLUMNS = (
    "r.term, r.n, r.step, r.rank, r.node, r.tokens, r.samples, r.micro_batch, r.replays, r.step_seconds,"
    f" {', '.join(f'r.{name}_seconds' for name in PHASES)}, r.weight,"
    f" {', '.join(f'r.{name}' for name in RANK_COLUMNS)}"
)
_RANKS = f"""
    WITH RECURSIVE found(rank) AS (
      SELECT min(rank) FROM rollups WHERE metric = 'rank_step_seconds' AND rank >= 0
      UNION ALL
      SELECT (SELECT min(rank) FROM rollups WHERE metric = 'rank_step_seconds' AND rank > found.rank)
      FROM found WHERE found.rank IS NOT NULL
    )
    SELECT rank FROM found WHERE rank IS NOT NULL
    UNION SELECT r.rank FROM {LIVE_RANK_STEPS} WHERE r.step >= ? ORDER BY rank
"""  # noqa: S608  a seek per rank, where DISTINCT would read every row, and those that are in no bucket yet


class Totals(NamedTuple):
    """Sums over the committed steps of a run."""

    steps: int
    weight: float
    tokens: float
    step_seconds: float
    tokens_by_node: dict[str, float]  # names in ascending order


class _OfRun(msgspec.Struct, frozen=True):
    """The part of a kept RunView, of whatever version, that says whose record it is."""

    run: str


def _refusing_damage(cls: type[K]) -> type[K]:
    """Have all public methods raise DamagedError where a value isn't what was written."""

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(self: Any, *args: Any, **options: Any) -> Any:
            with refusing_damage(self.path, *UNREADABLE):
                return method(self, *args, **options)

        return read

    for name, member in [*vars(cls).items()]:
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(cls, name, guarded(member))
    return cls


@_refusing_damage
class RecordReader:
    """The record in a run directory; threads may share it, and take turns. Raises InvalidInputError if there is no
    record, or it is of a newer schema."""

    def __init__(self, directory: RunPaths | Path) -> None:
        paths = directory if isinstance(directory, RunPaths) else RunPaths(directory)
        self.path = paths.record
        self._folder = paths.directory.absolute().name
        self._turn = threading.Lock()
        self._connection = open_for_reading(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with self._turn:
            self._connection.close()

    @functools.cached_property
    def run(self) -> str:
        """The run's id, as its agent kept it: a copied directory may have any name. That name where nothing was."""
        text = self.meta(VIEW_KEY)
        try:
            return (msgspec.json.decode(text, type=_OfRun).run if text else "") or self._folder
        except msgspec.MsgspecError:
            return self._folder

    def view(self) -> RunView | None:
        """The run as its lead kept it last, in each node's copy, in the folder where the record is now; as this node's
        agent did if no lead has, or only of an older term. None where nothing was kept. Raises msgspec.MsgspecError for
        a view of another version."""
        kept = [decode_json(text, RunView) for key in VIEW_KEYS if (text := self.meta(key)) is not None]
        if not kept:
            return None
        newest = max(kept, key=lambda view: view.generation.term)  # the first of two that are equal
        return msgspec.structs.replace(newest, directory=str(self.path.parent))

    def metas(self) -> dict[str, str]:
        """All that the writer keeps by a key."""
        return dict(self._rows("SELECT key, value FROM meta"))

    def meta(self, key: str) -> str | None:
        """Return what the writer keeps under `key`, None if nothing."""
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    def last_step(self) -> StepCommitted | None:
        """The newest committed step, or None before the first."""
        rows = self._rows(
            f"SELECT {_STEP_COLUMNS} FROM steps WHERE NOT retracted ORDER BY step DESC, term DESC, n DESC LIMIT 1"  # noqa: S608
        )
        return self._step(rows[0], self._values(rows[0][2], rows[0][2], RUN_RANK)) if rows else None

    def totals(self) -> Totals:
        """Return the totals of all committed steps."""
        rows = self._rows("SELECT count(*), sum(weight), sum(tokens), sum(step_seconds) FROM steps WHERE NOT retracted")
        nodes = self._rows(
            f"SELECT r.node, sum(r.tokens) FROM {LIVE_RANK_STEPS} GROUP BY r.node ORDER BY r.node"  # noqa: S608
        )
        count, *sums = rows[0]
        weight, tokens, seconds = (total or 0.0 for total in sums)
        return Totals(count, weight, tokens, seconds, dict(nodes))

    def is_retracted(self, step: int, generation: Generation) -> bool:
        """Return whether there is a row of the step, of this generation, that does not stand."""
        key = (step, generation.term, generation.n)
        return bool(self._rows("SELECT 1 FROM steps WHERE step = ? AND term = ? AND n = ? AND retracted", key))

    def steps(self, after: int = 0, limit: int = 500) -> tuple[tuple[StepCommitted, ...], bool]:
        """Return up to `limit` steps above `after`, ascending, and whether there are more."""
        rows = self._rows(
            f"SELECT {_STEP_COLUMNS} FROM steps WHERE step > ? AND NOT retracted ORDER BY step LIMIT ?",  # noqa: S608
            (after, limit + 1),
        )
        page = rows[:limit]
        values = self._values(page[0][2], page[-1][2], RUN_RANK) if page else {}
        return tuple(self._step(row, values) for row in page), len(rows) > limit

    def step_by(self, step: int, generation: Generation) -> int:
        """The newest step up to `step` that was committed in `generation` or one before it; 0 if there is none."""
        rows = self._rows(
            "SELECT max(step) FROM steps WHERE step <= ? AND (term, n) <= (?, ?) AND NOT retracted",
            (step, generation.term, generation.n),
        )
        return rows[0][0] or 0

    def event_by(self, event: int, term: int) -> int:
        """The id of the newest event up to `event` that is of `term` or one before it; 0 if there is none."""
        rows = self._rows("SELECT max(id) FROM events WHERE id <= ? AND coalesce(term, 0) <= ?", (event, term))
        return rows[0][0] or 0

    def rank_steps(self, step: int) -> tuple[RankStep, ...]:
        """Return each rank's part of a committed step, by rank; empty if the step is not in the record."""
        return self.parts_between(step, step)

    def parts_between(self, first: int, last: int) -> tuple[RankStep, ...]:
        """The ranks' parts of the committed steps first..last, by step and rank."""
        sql = f"SELECT {_RANK_COLUMNS} FROM {LIVE_RANK_STEPS} WHERE r.step BETWEEN ? AND ? ORDER BY r.step, r.rank"  # noqa: S608
        values = self._values(first, last)
        return tuple(self._rank_step(row, values) for row in self._rows(sql, (first, last)))

    def ranks(self) -> tuple[int, ...]:
        """Every rank that had a part in a step, ascending."""
        return tuple(rank for (rank,) in self._rows(_RANKS, (self._ends()[1] // ROLLUP_LEVELS[0] * ROLLUP_LEVELS[0],)))

    def series_ranks(self, metric: str) -> tuple[int | None, ...]:
        """The ranks that `metric` has a series of, None for the run; one that the run brought may be both's."""
        if metric not in METRICS:
            return (None, *self.ranks())
        return (None,) if METRICS[metric].scope == "run" else self.ranks()

    def own_metrics(self) -> tuple[str, ...]:
        """The metrics that the run brought and the table of metrics doesn't know, by name."""
        names = self._rows("SELECT name FROM metric_names ORDER BY name")
        return tuple(name for (name,) in names if name not in METRICS)

    def _values(self, first: int, last: int, rank: int | None = None) -> _Values:
        """Metrics by name of the steps first..last, by step and rank: of one rank, or of all."""
        found: _Values = {}
        names = dict(self._rows("SELECT id, name FROM metric_names"))
        of_ranks = "SELECT rank FROM rank_steps WHERE step BETWEEN :first AND :last"
        rows = self._rows(
            "SELECT step, rank, present, body FROM metric_values"  # noqa: S608  constants of this file
            f" WHERE step BETWEEN :first AND :last AND rank IN ({of_ranks if rank is None else ':rank'})",
            {"first": first, "last": last, "rank": rank},
        )
        for step, of, *packed in rows:
            values = unpack(*packed).items()
            found[step, of] = {names[number]: value for number, value in values if number in names}
        return found

    def events(self, after_id: int = 0, limit: int = 200, newest: bool = False) -> tuple[tuple[Event, ...], bool]:
        """Return up to `limit` events above `after_id`, oldest first, and whether there are more of them.

        They are the first ones, or with `newest` the last ones.
        """
        order = "DESC" if newest else "ASC"
        rows = self._rows(
            f"SELECT * FROM events WHERE id > ? ORDER BY id {order} LIMIT ?",  # noqa: S608
            (max(0, after_id), limit + 1),
        )
        kept = rows[:limit]
        return tuple(self._event(row) for row in (reversed(kept) if newest else kept)), len(rows) > limit

    def plans(self, *, step: int | None = None, command: str | None = None) -> tuple[tuple[float, StepPlan], ...]:
        """Return the plans of a step, or those that carry a command whose ID begins so, with the times at which they
        were journaled (Unix seconds), oldest first; only the newest are kept, and none that is damaged."""
        rows = self._rows(
            "SELECT journaled_at, body FROM plans WHERE step = ? OR instr(body, CAST(? AS BLOB)) ORDER BY term, n, seq",
            (step, command),
        )
        plans = []
        for at, body in rows:
            with contextlib.suppress(ProtocolError):
                plans.append((at, codec.decode_stored(body, StepPlan)))
        return tuple(plans)

    def newest_events(self, limit: int, until: float | None = None, kind: str | None = None) -> tuple[Event, ...]:
        """The newest `limit` events up to `until` (Unix seconds), all or those of a kind, oldest first."""
        rows = self._rows(
            "SELECT * FROM events WHERE at <= ? AND kind = ifnull(?, kind) ORDER BY id DESC LIMIT ?",
            (math.inf if until is None else until, kind, limit),
        )
        return tuple(self._event(row) for row in reversed(rows))

    def commands_by(self, author: str, limit: int = 3) -> tuple[Event, ...]:
        """The newest `limit` events of commands by an author, oldest first."""
        rows = self._rows(
            "SELECT * FROM events WHERE by = ? AND verb IS NOT NULL ORDER BY id DESC LIMIT ?", (author, limit)
        )
        return tuple(self._event(row) for row in reversed(rows))

    def host_reading(self, at: float) -> HostReading | None:
        """The newest reading of this record's machine up to a time (Unix seconds), if one was kept."""
        rows = self._rows("SELECT body FROM host WHERE at <= ? ORDER BY at DESC LIMIT 1", (at,))
        return _stored(rows[0][0], HostReading) if rows else None

    def last_host_reading(self, node: str) -> HostReading | None:
        """The newest of a node's machine, None without one."""
        rows = self._rows("SELECT body FROM host WHERE node = ? ORDER BY rowid DESC LIMIT 1", (node,))
        return next((_stored(body, HostReading) for (body,) in rows), None)

    def host_readings(self, after: int = 0, limit: int = 500) -> tuple[tuple[HostReading, ...], int]:
        """Return the readings of this program's version among `limit` after a row, as they came, and the last row of
        them; 0 where there is none after it."""
        rows = self._rows("SELECT rowid, body FROM host WHERE rowid > ? ORDER BY rowid LIMIT ?", (after, limit))
        readings = tuple(found for _, body in rows if (found := _stored(body, HostReading)) is not None)
        return readings, rows[-1][0] if rows else 0

    def newest_host_readings(self, limit: int, until: float | None = None) -> tuple[HostReading, ...]:
        """Return the readings of this program's version among the newest `limit` of all nodes, oldest first; `until`:
        none after this time (Unix seconds)."""
        rows = self._rows(
            "SELECT body FROM host WHERE at <= ? ORDER BY rowid DESC LIMIT ?",
            (math.inf if until is None else until, limit),
        )
        found = (_stored(body, HostReading) for (body,) in reversed(rows))
        return tuple(reading for reading in found if reading is not None)

    def samples(self, after: int = 0, limit: int = 100, newest: bool = False) -> tuple[tuple[Sample, ...], int, bool]:
        """Return up to `limit` answers of the model after a row, oldest first, the last row of them, and whether there
        are more. They are the first ones, or with `newest` the last ones."""
        order = "DESC" if newest else "ASC"
        found = self._rows(
            f"SELECT rowid, body FROM samples WHERE rowid > ? ORDER BY rowid {order} LIMIT ?",  # noqa: S608
            (after, limit + 1),
        )
        kept = found[:limit][::-1] if newest else found[:limit]
        read = (_stored(body, Sample) for _, body in kept)
        return tuple(one for one in read if one is not None), kept[-1][0] if kept else after, len(found) > limit

    def held_out_pairs(self, limit: int, after_step: int = 0) -> tuple[HeldOutPairs, ...]:
        """Return the newest pairs of each of the newest `limit` steps from a step on that evaluated pairs,
        ascending."""
        rows = self._rows(
            "SELECT body, max(at) FROM held_out_pairs WHERE step >= ? GROUP BY step ORDER BY step DESC LIMIT ?",
            (after_step, limit),
        )
        read = (_stored(body, KeptPairs) for body, _ in reversed(rows))
        return tuple(one.pairs for one in read if one is not None)

    def evaluations(self, *, undone: bool = False) -> tuple[Evaluation, ...]:
        """The newest evaluation of each step, ascending; with `undone` also of steps that were retracted since."""
        stands = "" if undone else f"WHERE {standing('evaluations')}"
        rows = self._rows(
            f"SELECT step, max(at), loss, weight, seconds FROM evaluations {stands} GROUP BY step ORDER BY step"  # noqa: S608
        )
        of = self._evaluation_values()
        return tuple(
            Evaluation(step, at, _number(loss), float(weight), float(seconds), of.get((step, at), {}))
            for step, at, loss, weight, seconds in rows
        )

    def _evaluation_values(self) -> dict[tuple[int, float], dict[str, float]]:
        """Metrics beside the loss by step and time."""
        found: dict[tuple[int, float], dict[str, float]] = {}
        for metric, step, at, value in self._rows("SELECT metric, step, at, value FROM evaluation_values"):
            found.setdefault((step, at), {})[metric] = _number(value)
        return found

    def series(
        self,
        metric: str,
        rank: int | None = None,
        first_step: int = 0,
        last_step: int | None = None,
        columns: int = 120,
    ) -> Series:
        """A metric between two steps (None: the newest) in at most `columns` buckets, whatever the span. Buckets
        without a finite value are absent. Raises InvalidInputError naming the metric, rank or columns at fault."""
        self._check_series(metric, rank, columns)
        if metric == "perplexity":
            return _perplexities(self.series(EVALUATION_METRIC, rank, first_step, last_step, columns))
        oldest, newest = self._ends()
        first = max(first_step, 0 if metric in OF_EVALUATIONS else oldest)
        last = newest if last_step is None else min(last_step, newest)
        if last < first:
            return Series(metric, rank, 1, (), (), (), (), ())
        by_name, of = is_by_name(metric), RUN_RANK if rank is None else rank
        raw_most = RAW_STEPS_PER_COLUMN if not by_name else RAW_VALUES_PER_COLUMN * (first >= self.values_from())
        zoom = choose(first, last, columns, rollups=metric not in WITHOUT_ROLLUPS, raw_most=raw_most)
        rows: Sequence[tuple[Any, ...]]
        if by_name:
            begin = first if first > oldest else first // ROLLUP_LEVELS[-1] * ROLLUP_LEVELS[-1]
            found = (row for span in spans(begin, last, zoom.level, newest) for row in self._named(metric, of, span))
            rows = bucketed(found, zoom.bucket_steps)
        else:
            cut = pieces(first, last, zoom.level, oldest=oldest, newest=newest)._asdict()
            values = {**cut, "level": zoom.level, "size": zoom.bucket_steps, "metric": metric, "rank": of}
            rows = self._rows(series_query(metric), values)
        buckets, minimum, maximum, mean, newest_value = zip(*rows, strict=True) if rows else ((), (), (), (), ())
        starts = tuple(bucket * zoom.bucket_steps for bucket in buckets)
        return Series(metric, rank, zoom.bucket_steps, starts, *map(_floats, (minimum, maximum, mean, newest_value)))

    def values_from(self) -> int:
        """The first step whose metrics by name are kept, and not only their rollups; 0 while none are gone."""
        return int(self.meta(VALUES_FROM) or 0)

    def _named(self, metric: str, rank: int, span: Span) -> Sequence[Rollup]:
        """Return the buckets of a metric by name, ascending; a step is a bucket of one value. Where the values are
        gone, the finest buckets stand for a few steps, whole as they are."""
        if level := span.level or (ROLLUP_LEVELS[0] if span.last < self.values_from() else 0):
            return self._rows(NAMED_ROLLUPS, (metric, rank, level, span.first // level, span.last // level))
        ids = self._rows("SELECT id FROM metric_names WHERE name = ?", (metric,))
        rows: Any = self._rows(NAMED_VALUES, (rank, span.first, span.last)) if ids else []
        values = values_of(ids[0][0], rows) if ids else ()
        return [(step, 1, value, value, value, value) for step, value in values if is_finite(value)]

    def _ends(self) -> tuple[int, int]:
        """The first and last committed step; (1, 0) if there is none."""
        ends = [
            self._rows(f"SELECT step FROM steps WHERE NOT retracted ORDER BY step {order} LIMIT 1")  # noqa: S608
            for order in ("ASC", "DESC")
        ]
        return (ends[0][0][0], ends[1][0][0]) if all(ends) else (1, 0)

    def _check_series(self, metric: str, rank: int | None, columns: int) -> None:
        self.check_metric(metric)
        if metric in METRICS and (METRICS[metric].scope == "run") != (rank is None):
            kept = "per rank; specify a rank" if rank is None else "for the whole run; omit the rank"
            raise InvalidInputError("rank", f"{metric} is recorded {kept}")
        if columns < 1:
            raise InvalidInputError("columns", f"must be at least 1, not {columns}")

    def check_metric(self, metric: str) -> None:
        """Raise InvalidInputError naming a metric that neither the table nor the run has."""
        if metric not in METRICS and metric not in (own := self.own_metrics()):
            known = ", ".join((*METRICS, *own))
            raise InvalidInputError("metric", f"unknown metric {metric!r}; the metrics are {known}")

    def _rows(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        with self._turn, refusing_damage(self.path):
            return self._connection.execute(sql, values).fetchall()

    def _step(self, row: tuple[Any, ...], values: _Values) -> StepCommitted:
        names = (name.strip() for name in _STEP_COLUMNS.split(",")[2:])
        fields = dict(zip(names, row[2:], strict=True))
        for name in ("loss", "grad_norm"):
            fields[name] = None if fields[name] == NOT_GIVEN else _number(fields[name])
        for name in _NUMBERS:
            fields[name] = None if fields[name] is None else float(fields[name])
        fields["tokens"] = None if fields["tokens"] is None else round(fields["tokens"])
        own = values.get((row[2], RUN_RANK), {})
        return StepCommitted(run=self.run, generation=Generation(row[0], row[1]), values=own, **fields)

    def _rank_step(self, row: tuple[Any, ...], values: _Values) -> RankStep:
        term, n, step, rank, node, tokens, samples, micro_batch, replays, *numbers, weight = row[:17]
        seconds, *phases = map(float, numbers)
        own = {name: float(value) for name, value in zip(RANK_COLUMNS, row[17:], strict=True) if value is not None}
        return RankStep(
            run=self.run,
            generation=Generation(term, n),
            step=step,
            rank=rank,
            node=node,
            tokens=float(tokens),
            samples=samples,
            micro_batch=micro_batch,
            replays=replays,
            step_seconds=seconds,
            phases=Phases(*phases),
            weight=None if weight is None else float(weight),
            values=own | values.get((step, rank), {}),
        )

    def _event(self, row: tuple[Any, ...]) -> Event:
        number, at, _, severity, by, text, step, term, n, command, verb, _, _, outcome, body, undoes = row
        return Event(
            id=number,
            at=at,
            severity=severity,
            by=by,
            data=_event_data(body, text),
            run=self.run,
            step=step,
            generation=None if term is None else Generation(term, n),
            command=command,
            verb=verb,
            outcome=outcome,
            undoes=undoes,
        )


def _perplexities(losses: Series) -> Series:
    """Return the perplexities of the held-out losses; buckets with one that is too large are left out."""
    rows = zip(losses.steps, losses.minimum, losses.maximum, losses.mean, losses.last, strict=True)
    kept = [(step, *map(math.exp, values)) for step, *values in rows if perplexity(max(values)) is not None]
    steps, *found = zip(*kept, strict=True) if kept else ((), (), (), (), ())
    return Series("perplexity", losses.rank, losses.bucket_steps, steps, *found)


def _event_data(body: bytes | None, text: str) -> AnyEvent:
    """Return an event's data; only its text where the kind is a later program's, or one before 0.2.0 wrote no data."""
    if body is None:
        return Notice(text)
    try:
        data: AnyEvent = _EVENT_DATA.decode(body)
    except (msgspec.MsgspecError, ValueError):
        return Notice(text)
    return data


def _stored(body: bytes, kind: type[K]) -> K | None:
    """Return a stored message; None for one of another version of this program."""
    try:
        found: K = codec.decode_stored(body, kind)
    except ProtocolError:
        return None
    return found


def _number(value: float | None) -> float:
    """SQLite keeps a NaN as NULL."""
    return math.nan if value is None else value


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
