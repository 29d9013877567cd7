"""The source that a mirror reads a run from: its record, or an agent for a run whose new steps are followed."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    Event,
    EventsRequest,
    History,
    HistoryRequest,
    RunView,
    Sample,
    SamplesRequest,
    SnapshotRequest,
    StepCommitted,
    StepsRequest,
    is_by_name,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import ROLLUP_LEVELS
from trainctl.tui.export.mirror.metrics import RANK_METRICS, Part, of_part

PAGE = 500


@dataclass(frozen=True)
class Evaluated:
    """A loss on the held-out samples, and when it was found, in Unix seconds; None where that isn't told."""

    loss: float
    at: float | None
    values: Mapping[str, float]  # metrics beside the loss, by name


MAX_COLUMNS: Final = 2000
METRICS_AT_ONCE: Final = 16
"""The most columns and metrics that a history request may name."""
VALUES: Final = 20_000
"""Most in one reply, some 40 bytes each, so that it stays below the frame limit."""


@dataclass(frozen=True)
class Question:
    """A history request in whose reply each of the steps, ascending, has a bucket of its own."""

    names: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def columns(self) -> int:
        return min(self.steps[-1] - self.steps[0] + 1, MAX_COLUMNS)


Value = tuple[int, int | None, str, float]
"""The step, the rank (None: the run's own), the metric and the value."""


def questions(names: Sequence[str], steps: Sequence[int], ranks: int, values_from: int = 0) -> Iterator[Question]:
    """Yield what to ask for `names` of so many ranks at steps that exist, ascending, however far apart their numbers
    are. From `values_from` on metrics by name are kept singly."""
    for start in range(0, len(names), METRICS_AT_ONCE):
        some = tuple(names[start : start + METRICS_AT_ONCE])
        most = max(1, VALUES // (len(some) * (ranks + 1)))
        for part in (
            tuple(step for step in steps if step < values_from),
            tuple(step for step in steps if step >= values_from),
        ):
            for asked in _parts(part, most):
                yield Question(some, asked)


def values(history: History, steps: Sequence[int]) -> Iterator[Value]:
    """Yield what the reply to a question says about its steps. Metrics by name that are no longer kept singly are left
    out."""
    for series in history.series:
        least = history.values_from if is_by_name(series.metric) else 0
        own = {step // series.bucket_steps * series.bucket_steps: step for step in steps if step >= least}
        for start, value in zip(series.steps, series.last, strict=True):
            if start in own:
                yield own[start], series.rank, series.metric, value


def _parts(steps: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    if len(steps) > most or not _are_told_apart(steps):
        half = len(steps) // 2
        yield from _parts(steps[:half], most)
        yield from _parts(steps[half:], most)
    elif steps:
        yield steps


def _are_told_apart(steps: Sequence[int]) -> bool:
    """Return whether no bucket has two of them, where an agent makes as many as it may: at most twice as large as they
    need be to be so few, and as large as the finest rollups."""
    if len(steps) < 2 or steps[-1] - steps[0] < MAX_COLUMNS:
        return True
    largest = max(ROLLUP_LEVELS[0], 2 * -(-(steps[-1] - steps[0] + 1) // (MAX_COLUMNS - 1)))
    return min(later - earlier for earlier, later in pairwise(steps)) >= largest


def config_of(view: RunView) -> dict[str, Any]:
    """Return the settings of a run that a view shows; its run file stays on its nodes."""
    return {
        "run": {"name": view.name, "steps": view.steps},
        "batch": {"global": view.global_batch},
        "group": {"engine": view.engine},
        "nodes": {rank.node: {"backend": rank.backend, "device": rank.device} for rank in view.ranks},
    }


class DirectorySource:
    """A run directory. Raises InvalidInputError for one without a record."""

    def __init__(self, directory: Path) -> None:
        self._paths = RunPaths(directory)
        self._reader = RecordReader(self._paths)
        self.run = self._reader.run

    def view(self) -> RunView | None:
        """Return the run as its agent kept it; None for a record that has none."""
        try:
            return self._reader.view()
        except msgspec.MsgspecError as error:
            raise InvalidInputError(
                str(self._reader.path), f"it was written by a different version of trainctl: {error}"
            ) from None

    def config(self) -> Mapping[str, Any]:
        """Return the run file, as resolved; from the record where there is none, as in an agent's copy."""
        try:
            return tomllib.loads(self._paths.run_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            view = self.view()
            return config_of(view) if view is not None else {}

    def nodes(self) -> dict[int, str]:
        view, last = self.view(), self._reader.last_step()
        known = {rank.rank: rank.node for rank in view.ranks} if view is not None else {}
        return {part.rank: part.node for part in self._reader.rank_steps(last.step)} | known if last else known

    def steps(self, after: int, limit: int = PAGE) -> tuple[tuple[StepCommitted, ...], bool]:
        return self._reader.steps(after, limit)

    def parts(self, steps: Sequence[int]) -> list[Part]:
        """Return the ranks' parts of steps that exist, ascending."""
        return [of_part(part) for part in self._reader.parts_between(steps[0], steps[-1])]

    def evaluations(self, first: int, last: int) -> dict[int, Evaluated]:
        found = self._reader.evaluations()
        return {one.step: Evaluated(one.loss, one.at, one.values) for one in found if first <= one.step <= last}

    def events(self, after_id: int, limit: int = PAGE) -> tuple[Event, ...]:
        return self._reader.events(after_id, limit)[0]

    def samples(self, after_row: int) -> tuple[tuple[Sample, ...], int]:
        """Return a page of the model's answers, and the row of its last one."""
        found, last, _ = self._reader.samples(after_row)
        return found, last

    def close(self) -> None:
        self._reader.close()


class AgentSource:
    """A run through an agent that knows it; `run` None: the active one, else the newest. Raises as the client does."""

    def __init__(self, client: BlockingClient, run: str | None) -> None:
        self._client = client
        view = client.ask(SnapshotRequest, 0, run).run
        if view is None:
            raise InvalidInputError("run", "the agent has no run yet: start one with trainctl run RUN.toml")
        self.run, self._view = view.run, view

    def view(self) -> RunView | None:
        self._view = self._client.ask(SnapshotRequest, 0, self.run).run or self._view
        return self._view

    def config(self) -> Mapping[str, Any]:
        return config_of(self._view)

    def nodes(self) -> dict[int, str]:
        return {rank.rank: rank.node for rank in self._view.ranks}

    def steps(self, after: int, limit: int = PAGE) -> tuple[tuple[StepCommitted, ...], bool]:
        found = self._client.ask(StepsRequest, self.run, after, min(limit, PAGE))
        return found.steps, found.more

    def parts(self, steps: Sequence[int]) -> list[Part]:
        told = self._client.ask(HistoryRequest, self.run, ())
        said = {**RANK_METRICS, **{name: name for name in told.own_metrics}}
        found: dict[tuple[int, int], dict[str, float]] = {}
        for question in questions(tuple(said), steps, len(self._view.ranks), told.values_from):
            asked = question.steps
            history = self._client.ask(HistoryRequest, self.run, question.names, asked[0], asked[-1], question.columns)
            for step, rank, name, value in values(history, asked):
                if rank is not None:
                    found.setdefault((step, rank), {})[said[name]] = value
        return [Part(step, rank, of_rank) for (step, rank), of_rank in sorted(found.items())]

    def evaluations(self, first: int, last: int) -> dict[int, Evaluated]:
        """Return the evaluations. Where buckets are larger than a step, what is in each is asked for by itself."""
        columns = min(last - first + 1, MAX_COLUMNS)
        names = ("eval_loss", *sorted(dict(self._view.eval_values)))[:METRICS_AT_ONCE]
        losses, *others = self._client.ask(HistoryRequest, self.run, names, first, last, columns).series
        if losses.bucket_steps > 1:
            parts = (self.evaluations(max(first, at), min(last, at + losses.bucket_steps - 1)) for at in losses.steps)
            return {step: one for part in parts for step, one in part.items()}
        values: dict[int, dict[str, float]] = {}
        for series in others:
            for step, value in zip(series.steps, series.last, strict=True):
                values.setdefault(step, {})[series.metric] = value
        steps = zip(losses.steps, losses.last, strict=True)
        return {step: Evaluated(loss, None, values.get(step, {})) for step, loss in steps}

    def events(self, after_id: int, limit: int = PAGE) -> tuple[Event, ...]:
        return self._client.ask(EventsRequest, self.run, after_id, min(limit, PAGE)).events

    def samples(self, after_row: int) -> tuple[tuple[Sample, ...], int]:
        found = self._client.ask(SamplesRequest, self.run, after_row)
        return found.samples, found.last_row


RunSource = DirectorySource | AgentSource
