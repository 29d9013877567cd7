"""Where a mirror reads a run: in its directory, or through an agent; both only ask."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    Event,
    EventsRequest,
    HistoryRequest,
    RunView,
    Sample,
    SamplesRequest,
    SnapshotRequest,
    StepCommitted,
    StepsRequest,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.export.mirror.metrics import RANK_METRICS, Part, of_part
from trainctl.tui.export.rows import MAX_COLUMNS, questions, values

PAGE = 500
_MAX_METRICS = 16
"""The most metrics that one request may ask for."""


@dataclass(frozen=True)
class Evaluated:
    """A loss on the held-out samples, and when it was found, in Unix seconds; None where that isn't told."""

    loss: float
    at: float | None
    values: Mapping[str, float]  # metrics beside the loss, by name


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
        """Return the run file, as resolved; empty where there is none."""
        try:
            return tomllib.loads(self._paths.run_file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

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
        """Return what an agent reports of a run; its file stays on its nodes."""
        view = self._view
        return {
            "run": {"name": view.name, "steps": view.steps},
            "batch": {"global": view.global_batch},
            "group": {"engine": view.engine},
            "nodes": {rank.node: {"backend": rank.backend, "device": rank.device} for rank in view.ranks},
        }

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
        names = ("eval_loss", *sorted(dict(self._view.eval_values)))[:_MAX_METRICS]
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
