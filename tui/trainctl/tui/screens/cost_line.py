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
    return cost.figures(run.cost, now, seconds_left, last.cursor if last is not None else run.cursor)


def pieces(found: cost.CostFigures, samples: str, *, active: bool, energy: str) -> list[Line]:
    """The most important first. `samples`: what they are called; `active`: whether the run has an end to come;
    `energy`: what was used, in words, empty if that is not to be said."""
    to_end = line(f.money(found.to_end, found.currency), Piece(" to the end", "label"))
    return [
        short(found),
        *([to_end] if active else []),
        line(f.money(found.per_1000, found.currency), Piece(f" per 1,000 {clean(samples)}", "label")),
        *([line(Piece("energy ", "label"), energy)] if energy else []),
    ]


def short(found: cost.CostFigures, *, brief: bool = False) -> Line:
    """`cost 12.40 USD`, `cost over 12.40 USD (no price: mbp)`, of which the latter is `cost >12.40 USD` in brief."""
    if brief:
        return line(Piece("cost ", "label"), Piece(amount(found), "strong"))
    if not found.unpriced:
        return line(Piece("cost ", "label"), Piece(f.money(found.spent, found.currency), "strong"))
    names = [clean(node) for node in found.unpriced]
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    missing = ", ".join([*names[:_MOST_NAMES], *more])
    return line(
        Piece("cost ", "label"), Piece(f"over {f.money(found.spent, found.currency)}", "strong"),
        Piece(f" (no price: {missing})", "warning"),
    )  # fmt: skip


def amount(found: cost.CostFigures) -> str:
    """`12.40 USD`, with a > where a node has no price."""
    return f"{'>' if found.unpriced else ''}{f.money(found.spent, found.currency)}"
