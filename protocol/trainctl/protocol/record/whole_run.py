"""Totals of a whole run by its record, in one pass over its steps: totals of ranks, plans, losses and commits."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from trainctl.protocol.messages import PHASES, Event, Phases, Sample
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import NOT_GIVEN

_RANK_TOTALS = f"""
    SELECT rank, node, count(*), sum(samples), sum(tokens), sum(step_seconds),
      {", ".join(f"sum({name}_seconds)" for name in PHASES)}
    FROM rank_steps {{standing}} GROUP BY rank, node ORDER BY rank, count(*) DESC
"""  # noqa: S608  constants of this program
_MIN_SYNC = """
    SELECT ranks, sum(least) FROM (
      SELECT group_concat(rank || ' ' || node, '\n') AS ranks, min(sync_seconds) AS least
      FROM rank_steps {standing} GROUP BY step
    ) GROUP BY ranks
"""
"""By which ranks took part in a step, the sum of the shortest time in the sum of gradients. Rows that stand have one
generation a step; grouped in the order of their key they need no sort."""
_STANDING = "WHERE (step, term, n) NOT IN (SELECT step, term, n FROM steps WHERE retracted)"
_NODES = "SELECT DISTINCT step / ?, node FROM rank_steps {standing} rank = ?"
_PLANS = """
    SELECT plan_version, min(step), max(step) FROM steps WHERE NOT retracted GROUP BY plan_version ORDER BY min(step)
"""
_PAGE = 500


@dataclass(frozen=True)
class RankTotals:
    """The work of a rank on one node, over the steps that stand."""

    rank: int
    node: str
    steps: int
    samples: int
    tokens: float
    seconds: float  # of its steps, with waits
    phases: Phases  # seconds; of the sum, the wait for slower ranks is in `wait`


@dataclass(frozen=True)
class PlanSpan:
    """The steps that stand of one plan version."""

    plan_version: int
    first: int
    last: int


class CurvePoint(NamedTuple):
    """One step that stands."""

    step: int
    loss: float | None  # NaN if it was; None if it wasn't given
    cursor: int | None  # first sample position after the step


class Commit(NamedTuple):
    """One commit of a step; a step that was made again has several."""

    step: int
    committed_at: float  # Unix seconds
    seconds: float  # that the step took
    retracted: bool  # whether it was made again, or taken back


class WholeRunReader(RecordReader):
    """A record's reader with queries that read all steps: some 2 microseconds a step and rank."""

    def rank_totals(self) -> tuple[RankTotals, ...]:
        """Return the totals by rank; a rank that ran on several nodes has one entry each, the longest first."""
        standing = _STANDING if self._has_retracted() else ""  # else it takes half of the time
        least: Counter[str] = Counter()
        for ranks, seconds in self._rows(_MIN_SYNC.format(standing=standing)):
            least.update(dict.fromkeys(ranks.split("\n"), seconds))
        found = []
        for rank, node, steps, samples, tokens, seconds, *phases in self._rows(_RANK_TOTALS.format(standing=standing)):
            own = Phases(*phases)
            waited = own.sync - least[f"{rank} {node}"]
            split = Phases(own.data, own.forward, own.backward, own.sync - waited, own.optimizer, own.wait + waited)
            found.append(RankTotals(rank, node, steps, samples, tokens, seconds, split))
        return tuple(found)

    def _has_retracted(self) -> bool:
        return bool(self._rows("SELECT 1 FROM steps WHERE retracted LIMIT 1"))

    def plan_spans(self) -> tuple[PlanSpan, ...]:
        """Return the spans of plans by first step."""
        return tuple(PlanSpan(*row) for row in self._rows(_PLANS))

    def curve(self) -> tuple[CurvePoint, ...]:
        """Return the curve's points by step."""
        rows = self._rows("SELECT step, loss, cursor FROM steps WHERE NOT retracted ORDER BY step")
        return tuple(CurvePoint(step, _loss(loss), cursor) for step, loss, cursor in rows)

    def commits(self) -> tuple[Commit, ...]:
        """Return the commits by time, with the retracted ones."""
        rows = self._rows("SELECT step, committed_at, step_seconds, retracted FROM steps ORDER BY committed_at, step")
        return tuple(Commit(step, at, float(seconds), bool(retracted)) for step, at, seconds, retracted in rows)

    def nodes_of(self, rank: int, bucket_steps: int) -> dict[int, set[str]]:
        """The nodes that a rank ran on in each bucket of steps that stand, by the bucket's first step."""
        standing = f"{_STANDING} AND" if self._has_retracted() else "WHERE"
        rows = self._rows(_NODES.format(standing=standing), (bucket_steps, rank))
        found: dict[int, set[str]] = {}
        for bucket, node in rows:
            found.setdefault(bucket * bucket_steps, set()).add(node)
        return found

    def all_events(self, after: int = 0) -> tuple[Event, ...]:
        """Return the events with a higher id, oldest first."""
        found: list[Event] = []
        more = True
        while more:
            some, more = self.events(found[-1].id if found else after, _PAGE)
            found += some
        return tuple(found)

    def all_samples(self) -> tuple[Sample, ...]:
        """Return the model's answers, oldest first."""
        found: list[Sample] = []
        after, more = 0, True
        while more:
            some, after, more = self.samples(after)
            found += some
        return tuple(found)


def _loss(value: float | str | None) -> float | None:
    """Return the loss of a column, in which NULL is a NaN."""
    if value == NOT_GIVEN:
        return None
    return float("nan") if value is None else float(value)
