"""A run whose loss is divided by pairs: head, charts, Runs and the command line say pairs/s and nats per pair."""

import msgspec
from tests.tui.support.driving import body, driven
from tests.tui.support.recorded import committed, run_view, snapshot, source_of
from textual.pilot import Pilot

from trainctl.protocol import messages as m
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.charts import metrics
from trainctl.tui.cli import tables

TOKENS = run_view(3)
PAIRS = msgspec.structs.replace(TOKENS, weight_unit="pairs", loss_unit="nats per pair")


def last_of(view: m.RunView) -> m.StepCommitted:
    return msgspec.structs.replace(committed(view, view.step), weight=24.0, weight_total=2400.0, seconds_total=60.0)


async def test_head_and_charts() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert " 60 pairs/s" in body(app) and "average 40 pairs/s" in body(app)
        assert "tok/s  eff" not in body(app)
        await pilot.press("3")
        await pilot.pause()
        assert "─ pairs/s ─" in body(app) and "─ tokens/s ─" not in body(app)

    source = source_of(3, weight_unit=PAIRS.weight_unit, loss_unit=PAIRS.loss_unit)
    shown = msgspec.structs.replace(snapshot(PAIRS), last_step=last_of(PAIRS))
    source.messages = [shown if isinstance(item, m.Snapshot) else item for item in source.messages]
    await driven(source, play, (120, 40))


def test_titles_of_charts() -> None:
    def titles(run: m.RunView) -> list[str]:
        return [metrics.title(chart, str, run) for chart in metrics.charts_of(metrics.DEFAULT_CHARTS, run)]

    assert titles(PAIRS) == [
        "loss (nats per pair), eval loss (nats per pair)", "busy seconds, step seconds by node", "pairs/s",
        "gradient norm", "learning rate",
    ]  # fmt: skip
    assert titles(TOKENS)[0] == "loss, eval loss" and titles(TOKENS)[2] == "tokens/s"
    assert metrics.charts_of(metrics.charts_of(metrics.DEFAULT_CHARTS, PAIRS), TOKENS) == metrics.DEFAULT_CHARTS


def test_the_command_line() -> None:
    last = last_of(PAIRS)
    text = tables.status_text(msgspec.structs.replace(snapshot(PAIRS), last_step=last))
    assert " per pair" in text and "sample" not in text
    assert "0.40 s a step  60 pairs/s" in text and "average 40 pairs/s" in text
    assert tables.step_line(last, PAIRS).endswith("60 pairs/s") and tables.step_line(last).endswith("7,620 tok/s")
