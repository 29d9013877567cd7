"""A run's rates, its cost and its separate work as pieces of one line each: for heads, Runs and `trainctl status`."""

from trainctl.protocol import messages as m
from trainctl.protocol.batch import cost
from trainctl.protocol.config.objectives import PAIRS, SAMPLES
from trainctl.tui.text import formatting as f
from trainctl.tui.text.figure_names import AVERAGE_RATE, LAST_STEP, Figure
from trainctl.tui.text.styled_line import Line, Piece, clean, line

# ---------------------------------------------------------------- rates


def rate_pieces(rates: m.RunRates, of: Figure = LAST_STEP) -> list[Line]:
    """The most important first: the average, then what is `of` the last step or of recent ones."""
    average, unit = f.compact(rates.average_per_second), clean(rates.unit)
    samples = samples_of(rates.unit)
    return [
        line(Piece(f"{AVERAGE_RATE.label} ", "label"), Piece(average, "strong"), Piece(f" {unit}", "label")),
        line(Piece(f"{of.label} ", "label"), _few(rates.steps_per_second), Piece(" steps/s", "label")),
        line(_few(rates.samples_per_second), Piece(f" {samples}/s", "label")),
        line(f.seconds(rates.seconds_per_sample), Piece(f" per {samples.removesuffix('s')}", "label")),
        line(f.duration(rates.seconds_per_epoch), Piece(" per epoch", "label")),
        line(f.figure(rates.epochs_left, "{:.2f}"), Piece(" epochs left", "label")),
    ]


def time_left(rates: m.RunRates) -> Line:
    """`left 1h 42m (1h 36m to 1h 55m)`; nothing of a run that has ended, or whose end isn't known."""
    if rates.seconds_left is None:
        return ()
    span = f.span(rates.seconds_left_best, rates.seconds_left_worst)
    return line(Piece("left ", "label"), f.duration(rates.seconds_left), Piece(f" ({span})" if span else "", "dim"))


def samples_of(unit: str) -> str:
    """Return the name of the samples of a run with this unit of its rate."""
    return PAIRS if unit == f"{PAIRS}/s" else SAMPLES


def _few(value: float | None) -> str:
    """Two decimals below ten."""
    return f.figure(value, "{:.2f}") if value is None or value < 9.995 else f.compact(value)


# ---------------------------------------------------------------- cost

_MOST_NAMES = 3
"""Nodes without a price that are named."""


def cost_figures(
    run: m.RunView, last: m.StepCommitted | None, now: float, seconds_left: float | None
) -> cost.CostFigures | None:
    """Return the cost figures at `now`, in Unix seconds; None for a run without a price."""
    if run.cost is None:
        return None
    samples = run.trained(last.cursor if last is not None else run.cursor)
    return cost.figures(run.cost, now, seconds_left, samples)


def cost_pieces(found: cost.CostFigures, samples: str, *, active: bool, energy: str) -> list[Line]:
    """The most important first. `samples`: what they are called; `active`: whether the run has an end to come;
    `energy`: what was used, in words, empty if that is not to be said."""
    each = Piece(f" per 1,000 {clean(samples)}", "label")
    return [
        cost_spent(found),
        *([line(cost_amount(found, found.to_end), Piece(" to the end", "label"))] if active else []),
        line(cost_amount(found, found.per_1000), each),
        *missing_prices(found),
        *([line(Piece("energy ", "label"), energy)] if energy else []),
    ]


def missing_prices(found: cost.CostFigures) -> list[Line]:
    """`no price: mbp`, where a node that took part has none."""
    names = [clean(node) for node in found.unpriced]
    more = [f"{len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
    told = ", ".join([*names[:_MOST_NAMES], *more])
    return [line(Piece(f"no price: {told}", "warning"))] if names else []


def cost_spent(found: cost.CostFigures) -> Line:
    """`cost 12.40 USD`."""
    return line(Piece("cost ", "label"), Piece(cost_amount(found, found.spent), "strong"))


def cost_amount(found: cost.CostFigures, value: float | None) -> str:
    """`12.40 USD`, with a > where a node has no price, for what it costs is missing."""
    return f"{'>' if found.unpriced and value is not None else ''}{f.money(value, found.currency)}"


# ---------------------------------------------------------------- separate work

_ROLES = {"starting": "accent", "working": "good", "silent": "warning", "failed": "bad"}


def work_task(work: m.WorkSummary) -> str:
    """Return the work's kind and file: `score test.jsonl`."""
    kind = "score" if work.view.kind == "log-probabilities" else "answer"
    return f"{kind} {clean(work.file)}".rstrip()


def work_title(work: m.WorkSummary) -> str:
    """Return the work's kind and file with the checkpoint that is used."""
    return f"{work_task(work)} with {clean(work.view.run)} step {work.view.checkpoint:,}"


def work_progress(work: m.WorkSummary) -> list[Line]:
    """The most important first."""
    view = work.view
    rows = f"{view.answered:,}/{view.rows:,}"
    made = [
        line(rows, Piece(" rows", "label"), f" {f.percent(view.answered / view.rows)}"),
        _outlook(work),
        line(f"{f.compact(work.rows_per_second)}", Piece(" rows/s", "label")),
        line(Piece("slices ", "label"), f"{work.slices_answered:,} of {work.slices:,} dealt"),
    ]
    return made if work.is_active else made[:2]


def _outlook(work: m.WorkSummary) -> Line:
    view = work.view
    if view.state == "receiving":
        return line(Piece(f"receiving rows: {view.received_bytes:,} bytes", "accent"))
    if work.is_active:
        return line(Piece("ETA ", "label"), f.duration(work.seconds_left))
    reason = f": {clean(view.reason)}" if view.reason else ""
    return line(Piece(f"{view.state.upper()}{reason}", "bad" if view.state == "failed" else "label"))


def work_nodes(work: m.WorkSummary) -> list[Line]:
    """Each node, with its speed or the reason why it doesn't work."""
    return [
        line(
            Piece(f"{clean(node.node)} ", "label"),
            f"{f.compact(node.rows_per_second)} rows/s"
            if node.state == "working"
            else Piece(f"{node.state}{f': {clean(node.why)}' if node.why else ''}", _ROLES[node.state]),
        )
        for node in work.view.nodes
    ]
