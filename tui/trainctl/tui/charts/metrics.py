"""The metrics that can be drawn: what each is called, in which unit, how its values are written, and where a run's
charts begin."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from trainctl.protocol.messages import EVALUATED, METRICS, MetricStyle, RunView, metric_of
from trainctl.protocol.messages.event_prose import rank_label
from trainctl.tui.charts.viewport import ALL_RANKS, Chart, Pick
from trainctl.tui.state.series import Window
from trainctl.tui.text.formatting import figure, loss, rate, scientific, seconds
from trainctl.tui.text.styled_line import clean


@dataclass(frozen=True)
class Style:
    """The look of a metric's values, which are multiplied by `factor` first."""

    words: Callable[[float | None], str] = loss
    factor: float = 1.0
    min_span: float = 0.02
    points: bool = False
    max_times: float = float("inf")  # the median, above which values run out at the top
    sparse: bool = False  # it comes by time, so that not every step has a value


def _percent(value: float | None) -> str:
    return figure(value, "{:.0f}%")


_STYLES: Final[dict[MetricStyle, Style]] = {
    "number": Style(min_span=0.2),
    "loss": Style(),
    "scientific": Style(scientific),
    "seconds": Style(seconds, min_span=0.2),
    "rate": Style(rate, min_span=0.2),
    "bytes": Style(lambda value: figure(value, "{:.2f} GB"), 1e-9, 0.05),
    "megabytes": Style(lambda value: figure(value, "{:,.1f} MB"), 1e-6, 0.2),
    "megabytes_per_second": Style(lambda value: figure(value, "{:,.1f} MB/s"), 1e-6, 0.2),
    "ratio": Style(_percent, 100.0, 5.0),
    "percent": Style(_percent, min_span=5.0),
    "watts": Style(lambda value: figure(value, "{:.0f} W"), min_span=5.0),
    "celsius": Style(lambda value: figure(value, "{:.0f}°C"), min_span=5.0),
    "megahertz": Style(lambda value: figure(value, "{:.2f} GHz"), 1e-3, 0.05),
}
_POINTS: Final = frozenset({"eval_loss", "perplexity", "drift"}) | EVALUATED
"""Metrics with a value at few steps."""
_SPIKED: Final = frozenset({"step_seconds", "rank_step_seconds", "busy_seconds"})
"""Metrics of which a value above four times the median runs out at the top."""
NOT_FINITE: Final = "_not_finite"
"""The end of the name of the metric that tells at which steps another has no value to draw."""
DEFAULT_CHARTS: Final = (
    Chart((Pick("loss"), Pick("eval_loss"))),
    Chart((Pick("busy_seconds", ALL_RANKS), Pick("step_seconds"))),
    Chart((Pick("tokens_per_second"),)),
    Chart((Pick("grad_norm"),)),
    Chart((Pick("learning_rate"),)),
)


def style_of(name: str) -> Style:
    """Return how a metric is drawn, also one that is only known by its name."""
    metric = metric_of(name)
    style = _STYLES[metric.style]
    max_times = 4.0 if name in _SPIKED else style.max_times
    return replace(style, points=name in _POINTS, max_times=max_times, sparse=metric.scope == "host")


def names(own: Iterable[str] = ()) -> list[str]:
    """Return every metric that makes a line, in the order they are offered in; `own` are those that the run brings."""
    return [*(name for name, metric in METRICS.items() if metric.drawn), *sorted(own)]


def short(name: str) -> str:
    return metric_of(name).short or metric_of(name).title


def per_rank(name: str) -> bool:
    return metric_of(name).scope != "run"


def rank_names(run: RunView | None) -> dict[int, str]:
    """Return by rank the name of its node, with the rank's number where the node has several."""
    views = sorted(run.ranks, key=lambda view: view.rank) if run is not None else []
    return {view.rank: clean(rank_label(view.node, view.rank, (other.node for other in views))) for view in views}


def charts_of(charts: tuple[Chart, ...], run: RunView | None) -> tuple[Chart, ...]:
    """Return the charts with the run's rate in place of another's."""
    if run is None:
        return charts
    others = {"tokens_per_second", "weight_per_second"} - {run.rate_metric}

    def own(pick: Pick) -> Pick:
        return replace(pick, metric=run.rate_metric) if pick.metric in others else pick

    return tuple(replace(chart, picks=tuple(map(own, chart.picks))) for chart in charts)


def _title_of(name: str, run: RunView | None) -> str:
    metric = metric_of(name)
    unit = clean(run.unit_of(metric)) if run is not None else metric.unit
    return (
        metric.title
        if unit in ("", metric.unit)
        else unit
        if metric.title == metric.unit
        else f"{metric.title} ({unit})"
    )


def title(chart: Chart, node_of: Callable[[int], str], run: RunView | None) -> str:
    """Return what a chart's rule says: its metrics, each once, and the node where all lines are of one."""
    words = list(dict.fromkeys(_title_of(pick.metric, run) for pick in chart.picks))
    ranks = {pick.rank for pick in chart.picks if per_rank(pick.metric)}
    only = next(iter(ranks)) if len(ranks) == 1 else None
    where = "" if not ranks else " by node" if only is None or only == ALL_RANKS else f" of {node_of(only)}"
    return (", ".join(words) + where) if words else "empty: press m to choose metrics"


def in_units(window: Window, factor: float) -> Window:
    """Return a window with its values multiplied."""
    if factor == 1.0:
        return window
    names = ("minimum", "maximum", "total", "last")
    return replace(window, **{name: getattr(window, name) * factor for name in names})
