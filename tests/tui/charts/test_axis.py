"""The x axis of a branch that is laid over its parent: it continues from the fork, in steps, tokens and time."""

from collections.abc import Callable

import msgspec
import pytest
from tests.tui.support.plotted import VIEW, state_of
from tests.tui.support.recorded import run_view

from trainctl.protocol import messages as m
from trainctl.tui.charts import history
from trainctl.tui.charts.axis import Axis, Kind
from trainctl.tui.charts.plots import RunData, Sources

FORK, LAST = 50, 80
LATER = 10_000.0
"""Seconds between the parent's and the branch's same step."""


def series(metric: str, steps: range, value: Callable[[int], float]) -> m.Series:
    columns = {name: tuple(value(step) for step in steps) for name in ("minimum", "maximum", "mean", "last")}
    return m.Series(metric, None, 1, tuple(steps), **columns)


def answered(run: m.RunView, first: int, tokens: float, later: float) -> RunData:
    """Two seconds and `tokens` tokens a step; a run counts its own tokens."""
    steps = range(first, run.step + 1)
    axes = {
        "tokens_total": series("tokens_total", steps, lambda step: tokens * (step - first + 1)),
        "committed_at": series("committed_at", steps, lambda step: 1.7e9 + later + 2.0 * step),
    }
    ask = history.ask_of(run.run, history.needed(VIEW.charts), (1, run.step), run.step, 200)
    return RunData(run, history.Answer(ask, {}, axes))


@pytest.fixture
def sources() -> Sources:
    """A run of 60 steps, its branch from step 50 with half of the tokens a step, and a branch of that from step 70."""
    parent = run_view(4, "stopped", 60, 60)
    branch = msgspec.structs.replace(parent, run="branch-1", step=LAST, branch=m.BranchPoint(parent.run, FORK))
    second = msgspec.structs.replace(parent, run="branch-2", step=LAST, branch=m.BranchPoint("branch-1", 70))
    known = [answered(parent, 1, 100, 0), answered(branch, FORK + 1, 50, LATER), answered(second, 71, 50, 2 * LATER)]
    return Sources(state_of(1), {data.run.run: data for data in known})


def ends(axis: Axis, *steps: int) -> list[float]:
    return [float(axis.to_x(step)) for step in steps]


@pytest.mark.parametrize(
    ("kind", "x"), [("tokens", (100, 5000, 5050, 6500)), ("time", (0, 98, 100, 158)), ("step", (1, 50, 51, 80))]
)
def test_branches_go_on_where_their_parents_stood(sources: Sources, kind: Kind, x: tuple[float, ...]) -> None:
    for run in ("branch-1", "branch-2"):
        axis = sources.axis(run, kind, elapsed=True)
        assert ends(axis, 1, FORK, FORK + 1, LAST) == pytest.approx(x)
        assert float(axis.to_step(x[2])) == pytest.approx(FORK + 1)


@pytest.mark.parametrize(("kind", "x"), [("tokens", (50, 1500)), ("time", (0, 58))])
def test_without_its_parent_a_branch_begins_at_its_own_start(
    sources: Sources, kind: Kind, x: tuple[float, ...]
) -> None:
    alone = Sources(sources.state, {"branch-1": sources.data["branch-1"]})
    assert ends(alone.axis("branch-1", kind, elapsed=True), FORK + 1, LAST) == pytest.approx(x)


def test_a_run_that_calls_itself_its_parent_is_drawn(sources: Sources) -> None:
    data = sources.data["branch-1"]
    looped = RunData(msgspec.structs.replace(data.run, branch=m.BranchPoint("branch-1", FORK)), data.coarse, data.fine)
    axis = Sources(sources.state, {"branch-1": looped}).axis("branch-1", "tokens", elapsed=True)
    assert ends(axis, FORK + 1) == [50]
