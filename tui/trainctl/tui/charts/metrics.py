"""The metrics that can be drawn: what each is called, in which unit, how its values are written, and where a run's
charts begin."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from trainctl.protocol import messages as m
from trainctl.tui.charts.axis import METRIC_OF
from trainctl.tui.charts.viewport import ALL_RANKS, Chart, Pick
from trainctl.tui.state.series import Window
from trainctl.tui.text import formatting as f
from trainctl.tui.text import styled_line as ln


class Metric(NamedTuple):
    """How a metric is shown. Values are multiplied by `factor` first."""

    title: str
    short: str = ""  # at a line's end
    words: Callable[[float | None], str] = f.loss
    factor: float = 1.0
    points: bool = False
    most_times: float = float("inf")  # the median, above which values run out at the top
    least_span: float = 0.02


def _gigabytes(value: float | None) -> str:
    return f.figure(value, "{:.2f} GB")


_KNOWN: Final[dict[str, Metric]] = {
    "loss": Metric("loss"),
    "eval_loss": Metric("eval loss", "eval", points=True),
    "grad_norm": Metric("gradient norm", "norm"),
    "learning_rate": Metric("learning rate", "lr", words=f.scientific),
    "step_seconds": Metric("step seconds", "step", words=f.seconds, most_times=4.0, least_span=0.2),
    "tokens_per_second": Metric("tokens/s", "tok/s", words=f.rate, least_span=0.2),
    "rank_step_seconds": Metric("rank step seconds", "step", words=f.seconds, most_times=4.0, least_span=0.2),
    "busy_seconds": Metric("busy seconds", "busy", words=f.seconds, most_times=4.0, least_span=0.2),
    "own_tokens_per_second": Metric("own tok/s", "own", words=f.rate, least_span=0.2),
    "wait_seconds": Metric("wait seconds", "wait", words=f.seconds, least_span=0.2),
    "memory_bytes": Metric("memory held GB", "held", words=_gigabytes, factor=1e-9, least_span=0.05),
    "memory_peak_bytes": Metric("memory peak GB", "memory", words=_gigabytes, factor=1e-9, least_span=0.05),
    "drift": Metric("drift", words=f.scientific, points=True),
}
_HIDDEN: Final = frozenset(METRIC_OF.values())
NOT_FINITE: Final = "_not_finite"
"""The end of the name of the metric that tells at which steps another has no value to draw."""
DEFAULT_CHARTS: Final = (
    Chart((Pick("loss"), Pick("eval_loss"))),
    Chart((Pick("busy_seconds", ALL_RANKS), Pick("step_seconds"))),
    Chart((Pick("tokens_per_second"),)),
    Chart((Pick("grad_norm"),)),
    Chart((Pick("learning_rate"),)),
)


def metric_of(name: str) -> Metric:
    """A metric by its name, also one that is only known by that."""
    return _KNOWN.get(name) or Metric(name.replace("_", " "))


def names() -> list[str]:
    """Every metric that makes a line, in the order they are offered in."""
    listed = [name for name in m.METRICS if name not in _HIDDEN and not name.endswith(NOT_FINITE)]
    order = list(_KNOWN)
    return sorted(listed, key=lambda name: order.index(name) if name in order else len(order))


def short(name: str) -> str:
    return metric_of(name).short or metric_of(name).title


def per_rank(name: str) -> bool:
    return m.METRICS.get(name, ("", False))[1]


def rank_names(run: m.RunView | None) -> dict[int, str]:
    """By rank the name of its node, with the rank's number where the node has several."""
    ranks = sorted((view.rank, ln.clean(view.node)) for view in run.ranks) if run is not None else []
    nodes = [node for _, node in ranks]
    return {rank: f"{node}:{rank}" if nodes.count(node) > 1 else node for rank, node in ranks}


def title(chart: Chart, node_of: Callable[[int], str]) -> str:
    """What a chart's rule says: its metrics, each once, and the node where all lines are of one."""
    words = list(dict.fromkeys(metric_of(pick.metric).title for pick in chart.picks))
    ranks = {pick.rank for pick in chart.picks if per_rank(pick.metric)}
    only = next(iter(ranks)) if len(ranks) == 1 else None
    where = "" if not ranks else " by node" if only is None or only == ALL_RANKS else f" of {node_of(only)}"
    return (", ".join(words) + where) if words else "empty: m chooses what it shows"


def in_units(window: Window, factor: float) -> Window:
    """A window with its values multiplied."""
    if factor == 1.0:
        return window
    names = ("minimum", "maximum", "total", "last")
    return replace(window, **{name: getattr(window, name) * factor for name in names})
