"""Which rows the fleet table has, and in which order: a node of several devices is one row that opens into its ranks.

The filter keeps ranks; a node stands for those of its ranks that it keeps.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from trainctl.protocol import messages as m
from trainctl.tui.state import series as s
from trainctl.tui.state import table_fields
from trainctl.tui.state.filter_language import Filter
from trainctl.tui.state.rank_rows import Row
from trainctl.tui.state.table_fields import Table
from trainctl.tui.state.table_schemas import FLEET

_WORST_FIRST = (
    "failed", "lost", "hung", "late", "rejoining", "draining", "drained", "starting", "ready", "paused", "run", "done"
)  # fmt: skip


@dataclass(frozen=True)
class Arrangement:
    """How a person wants the table: filtered, sorted, which nodes opened, with which further metrics."""

    filter: Filter[Row] | None = None
    order: table_fields.SortOrder = table_fields.SortOrder()  # noqa: RUF009  frozen itself
    opened: frozenset[str] = frozenset()
    metrics: tuple[str, ...] = ()
    table: Table[Row] = FLEET  # what can be filtered and sorted by


def arranged(rows: Sequence[Row], wanted: Arrangement) -> list[Row]:
    """The rows to be shown."""
    kept = wanted.filter.kept(rows) if wanted.filter is not None else list(rows)
    ranks, of_node = Counter(row.view.node for row in rows), defaultdict(list)  # of a node, filtered or not; those kept
    for row in kept:
        of_node[row.view.node].append(row)
    tops = [_node(own, node in wanted.opened) if ranks[node] > 1 else own[0] for node, own in of_node.items()]
    made = []
    for top in table_fields.in_order(tops, wanted.order, wanted.table):
        made.append(top)
        if top.open:
            own = [replace(row, child=True) for row in of_node[top.view.node]]
            made += table_fields.in_order(own, wanted.order, wanted.table)
    return made


def count(run: m.RunView | None, opened: frozenset[str]) -> int:
    """How many rows there are without a filter."""
    nodes = Counter(view.node for view in run.ranks) if run is not None else {}
    return len(nodes) + sum(ranks for node, ranks in nodes.items() if node in opened and ranks > 1)


def _node(members: Sequence[Row], is_open: bool) -> Row:
    """One row for the ranks of a node: sums of shares, rates and memory, the slowest one's step, the worst state."""
    working = [row for row in members if row.step is not None]
    slowest = max(working, key=lambda row: row.step.phases.busy if row.step else 0.0, default=members[0])
    worst = min(members, key=lambda row: _WORST_FIRST.index(row.view.state))
    rates = [row.own_rate for row in members if not row.out]
    shares = [row.view.share for row in members if row.view.share is not None]
    view = msgspec.structs.replace(
        members[0].view, state=worst.view.state, since_at=worst.view.since_at,
        share=sum(shares) if len(shares) == len(members) else None,
        why=f"rank {worst.view.rank}: {worst.view.why}" if worst.view.why else "",
    )  # fmt: skip
    ages = [row.age for row in members if row.age is not None]
    return replace(
        slowest, view=view, place=members[0].place, step=_together(slowest, working), age=max(ages, default=None),
        old=any(row.old for row in members), own_rates=_sum([row.own_rates for row in working]),
        own_rate=sum(r for r in rates if r is not None) if rates and None not in rates else None,
        slow_phase=next((row.slow_phase for row in members if row.slow_phase), ""),
        selected=not is_open and any(row.selected for row in members),
        members=tuple(row.view.rank for row in members), open=is_open,
        micro=next(iter({row.passes for row in members})) if len({row.passes for row in members}) == 1 else None,
    )  # fmt: skip


def _together(slowest: Row, working: Sequence[Row]) -> m.RankStep | None:
    """The slowest rank's step with what all have together, of the metrics that each of them has."""
    if slowest.step is None:
        return None
    every = [row.step.values for row in working if row.step is not None]
    names = [name for name in slowest.step.values if all(name in values for values in every)]
    values = {name: m.metric_of(name).folded([values[name] for values in every]) for name in names}
    return msgspec.structs.replace(slowest.step, values=values)


def _sum(windows: Sequence[s.Window]) -> s.Window:
    """The sum of rates over the steps that all have; empty where they aren't of the same steps."""
    if not windows or any(not np.array_equal(window.first, windows[0].first) for window in windows):
        return s.empty()
    return replace(windows[0], last=np.sum([window.last for window in windows], axis=0))


def chosen(shown: Sequence[Row], by: int) -> int | None:
    """The rank that lies `by` rows from the selected one, None where the table is empty; a closed node is chosen by
    its first rank."""
    ranks = [row.view.rank for row in shown if not row.open]
    at = next((row.view.rank for row in shown if row.selected and not row.open), None)
    if not ranks:
        return None
    place = ranks.index(at) + by if at in ranks else 0 if by > 0 else len(ranks) - 1
    return ranks[min(max(place, 0), len(ranks) - 1)]
