"""What a run costs, as pieces of one line with the energy beside it: for heads, Runs and `trainctl status`."""

from trainctl.protocol import messages as m
from trainctl.protocol.batch import cost
from trainctl.tui.text import formatting as f
from trainctl.tui.text.styled_line import Line, Piece, clean, line

_MOST_NAMES = 3
"""Nodes without a price that are named."""


def figures(
    run: m.RunView, last: m.StepCommitted | None, now: float, seconds_left: float | None
) -> cost.CostFigures | None:
    """At `now`, Unix seconds; None of a run without a price."""
    if run.cost is None:
        return None
    samples = run.trained(last.cursor if last is not None else run.cursor)
    return cost.figures(run.cost, now, seconds_left, samples)


def pieces(found: cost.CostFigures, samples: str, *, active: bool, energy: str) -> list[Line]:
    """The most important first. `samples`: what they are called; `active`: whether the run has an end to come;
    `energy`: what was used, in words, empty if that is not to be said."""
    each = Piece(f" per 1,000 {clean(samples)}", "label")
    return [
        short(found),
        *([line(amount(found, found.to_end), Piece(" to the end", "label"))] if active else []),
        line(amount(found, found.per_1000), each),
        *missing(found),
        *([line(Piece("energy ", "label"), energy)] if energy else []),
    ]


def missing(found: cost.CostFigures) -> list[Line]:
    """`no price: mbp`, where a node that took part has none."""
    names = [clean(node) for node in found.unpriced]
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    told = ", ".join([*names[:_MOST_NAMES], *more])
    return [line(Piece(f"no price: {told}", "warning"))] if names else []


def short(found: cost.CostFigures) -> Line:
    """`cost 12.40 USD`."""
    return line(Piece("cost ", "label"), Piece(amount(found, found.spent), "strong"))


def amount(found: cost.CostFigures, value: float | None) -> str:
    """`12.40 USD`, with a > where a node has no price, for what it costs is missing."""
    return f"{'>' if found.unpriced and value is not None else ''}{f.money(value, found.currency)}"
