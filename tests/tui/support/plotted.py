"""Runs whose charts are drawn in tests."""

from tests.tui.support.recorded import source_of

from trainctl.tui.charts import viewport as vw
from trainctl.tui.charts.viewport import ChartView, Pick
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md


def state_of(nodes: int = 4) -> md.ViewState:
    state = md.ViewState()
    for message in source_of(nodes).messages:
        state = reducer.apply(state, message, 0.0)
    return state


VIEW = ChartView((vw.Chart((Pick("loss"), Pick("eval_loss"))), vw.Chart((Pick("busy_seconds", vw.ALL_RANKS),))))
