"""The sections of a report on how a run was set up: its ranks, recipe, lineage, cost and energy. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from trainctl.protocol.messages import BUSY_PHASES, METRICS
from trainctl.tui.report.document import Block, ReportTable, ReportText
from trainctl.tui.report.run_facts import RankFacts, RunFacts
from trainctl.tui.text import formatting, run_lines
from trainctl.tui.text.run_lines import JOULES_PER_WATT_HOUR

MOST_ROWS: Final = 400
"""Rows of a table that grows with the run; of more, the first and the last half are given."""
_MOST_CHARACTERS: Final = 1_200
"""The most characters of an answer or a field."""


def ranks(facts: RunFacts) -> Iterator[Block]:
    """Yield each rank on each node, what it resolved, and means of its metrics of efficiency."""
    head = ("rank", "number", "backend", "device", "micro-batch", "steps", "samples", "tokens", "own rate")
    rows = [
        (
            rank.name,
            str(rank.rank),
            rank.backend,
            rank.device,
            formatting.count(rank.micro_batch),
            f"{rank.steps:,}",
            formatting.count(rank.samples or None),
            formatting.count(rank.tokens or None),
            f"{formatting.rate(_own_rate(rank))} tokens/s",
        )
        for rank in facts.ranks
    ]
    if rows:
        yield table(head, rows, right=(4, 5, 6, 7, 8))
    yield from _computing(facts.ranks)
    yield from _versions(facts.ranks)
    means = sorted({name for rank in facts.ranks for name in rank.means})
    if means:
        each = [
            (rank.name, *(formatting.figure(rank.means.get(name), "{:.3g}") for name in means)) for rank in facts.ranks
        ]
        titles = tuple(f"{METRICS[name].title} ({METRICS[name].unit})" for name in means)
        right = tuple(range(1, len(means) + 1))
        yield table(("rank", *titles), each, right=right, title="Means over the run")


def _own_rate(rank: RankFacts) -> float | None:
    busy = sum(rank.phases[name] for name in BUSY_PHASES)
    return rank.tokens / busy if busy > 0 and rank.tokens else None


def _computing(ranks: Sequence[RankFacts]) -> Iterator[Block]:
    """Yield what each rank resolved."""
    found = {rank.name: run_lines.compute_settings(rank.compute) for rank in ranks if rank.compute is not None}
    for rank in ranks:
        if rank.compiled is not None:
            found.setdefault(rank.name, {})["compiled"] = rank.compiled.text
    yield from _by_rank(found, "What each rank computes with")


def _versions(ranks: Sequence[RankFacts]) -> Iterator[Block]:
    found = {rank.name: run_lines.library_versions(rank.compute) for rank in ranks if rank.compute is not None}
    yield from _by_rank({name: one for name, one in found.items() if one}, "Versions that each rank computes with")


def _by_rank(found: dict[str, dict[str, str]], title: str) -> Iterator[Block]:
    names = list(dict.fromkeys(name for one in found.values() for name in one))
    rows = [(name, *(one.get(key, "") for key in names)) for name, one in found.items()]
    if rows:
        yield table(("rank", *names), rows, title=title)


def recipe(facts: RunFacts) -> Iterator[Block]:
    """Fields of the run file, what the run chose, versions and data."""
    if facts.changed:
        rows = [(name, cut(facts.recipe[name])) for name in facts.changed]
        yield table(("field", "value"), rows, title="Fields of the run file without a default, or with another value")
    if facts.resolved:
        title = "What the run chose, or was changed to"
        yield ReportTable(("", "at the end"), tuple(facts.resolved.items()), title=title)
    others = [(name, cut(value)) for name, value in facts.recipe.items() if name not in facts.changed]
    if others:
        yield table(("field", "value"), others, title="All other fields", folded=True)
    versions = [
        (
            environment.node,
            environment.program,
            environment.library,
            environment.python,
            environment.device,
            environment.system,
        )
        for environment in facts.environments
    ]
    if versions:
        head = ("node", "trainctl", "library", "Python", "device", "system")
        yield table(head, versions, title="Versions, by the checkpoints on this machine")
    if facts.data.digest:
        samples = f"{facts.data.samples:,}" if facts.data.samples is not None else formatting.NA
        yield ReportTable(("data", ""), (("SHA-256 of the data", facts.data.digest), ("samples in an epoch", samples)))


def lineage(facts: RunFacts) -> Iterator[Block]:
    """Yield where the run comes from, and what continued from it."""
    if facts.lineage:
        yield table(("lineage",), [(one,) for one in facts.lineage])
    elif facts.last is not None:
        yield ReportText("The run started at step 0, and was not resumed on another setup.")


def money(facts: RunFacts) -> Iterator[Block]:
    """Cost and energy."""
    rows = [("cost", cost_words(facts)), ("energy", energy_words(facts))]
    found = facts.cost
    if found is not None:
        rows.insert(1, ("cost per 1,000 samples", formatting.money(found.per_1000, found.currency)))
        rows += [("nodes without a price", ", ".join(found.unpriced))] if found.unpriced else []
    if facts.energy.joules_per_1000 is not None:
        rows.append(("energy per 1,000 samples", f"{facts.energy.joules_per_1000 / JOULES_PER_WATT_HOUR:.3g} Wh"))
    if facts.energy.joules is not None and facts.energy.unread_seconds:
        rows.append(("time without a reading of power", formatting.duration(facts.energy.unread_seconds)))
    if facts.last is not None:
        yield ReportTable(("", ""), tuple(rows))


def cost_words(facts: RunFacts) -> str:
    """Return what the run has cost, or why that isn't known."""
    found = facts.cost
    if found is None:
        return "not known: no node has a price"
    return f"{'more than ' if found.unpriced else ''}{formatting.money(found.spent, found.currency)}"


def energy_words(facts: RunFacts) -> str:
    """Return what its machines have drawn, or why that isn't known."""
    joules = facts.energy.joules
    return f"{joules / JOULES_PER_WATT_HOUR:,.3g} Wh" if joules is not None else "not known: no power was read"


def table(
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    *,
    title: str = "",
    right: tuple[int, ...] = (),
    folded: bool = False,
) -> ReportTable:
    """Return a table with at most MOST_ROWS rows."""
    half, left_out = MOST_ROWS // 2, max(len(rows) - MOST_ROWS, 0)
    kept = [*rows[:half], *rows[-half:]] if left_out else rows
    return ReportTable(head, tuple(kept), title, right, left_out, folded)


def cut(text: str) -> str:
    """Return a text, shortened if it is very long."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
