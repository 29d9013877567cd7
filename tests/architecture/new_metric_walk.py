"""Walks every place that a metric shows in, with that of patches/new_metric.patch: `python -m` in a patched copy."""

import tempfile
from pathlib import Path

import msgspec
from tests.node_agent.support.records import check_rollups, part, step
from tests.tui.support.recorded import CLOCK, rank_step, run_view, snapshot
from tools.protocol_docs import docs

from trainctl.node_agent.exporter import catalogue
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer.precision.loss_scale import LossScale
from trainctl.trainer.step import executor
from trainctl.tui.charts import metrics, picker
from trainctl.tui.export import rows
from trainctl.tui.export.mirror.metrics import of_part
from trainctl.tui.screens import fleet_table
from trainctl.tui.state import filter_language, rank_rows, reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.state.table_schemas import FLEET
from trainctl.tui.text.glyphs import UNICODE
from trainctl.tui.text.styled_line import plain

NAME = "loss_scale"


def with_value(message: m.RankStep, value: float) -> m.RankStep:
    return msgspec.structs.replace(message, values={**message.values, NAME: value})


def recorded() -> None:
    """In the record with its rollups, in exports and in mirrors."""
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "run-1")
        paths.directory.mkdir()
        with RunDb(paths) as recorder:
            for number in range(1, 26):
                recorder.commit(step(number), [with_value(part(number), 2.0**number)], 0.0)
        check_rollups(paths)
        with RecordReader(paths) as reader:
            assert reader.series(NAME, 0).last[-1] == 2.0**25
            (seen,) = reader.rank_steps(25)
        column = list(rows.COLUMNS["ranks"]).index(NAME)
        exported = [row[column] for page in rows.of_record(paths.directory, "ranks") for row in page]
        assert exported == [2.0**number for number in range(1, 26)]
        assert of_part(seen).values[NAME] == 2.0**25


def shown() -> None:
    """In charts, in the fleet table and in filters."""
    view = run_view(4)
    state = reducer.apply(md.ViewState(), snapshot(view), CLOCK.at_monotonic)
    for rank in view.ranks:
        newest = msgspec.structs.replace(rank_step(view, view.step, rank.rank), seq=20_000 + rank.rank)
        state = reducer.apply(state, with_value(newest, 512.0), CLOCK.at_monotonic)
    assert NAME in metrics.names()
    assert metrics.per_rank(NAME)
    assert any(NAME in str(entry) for entry in picker.choices_of(view, ()))
    head, *table = [plain(line) for line in fleet_table.lines(state, CLOCK, 200, UNICODE, total=False)]
    assert "SCALE" in head
    assert [row.split()[0] for row in table if "512" in row] == ["studio", "mbp", "forge"], "mini is lost"
    wanted = filter_language.parse(f"{NAME}>500", FLEET)
    assert len(wanted.kept(rank_rows.rows(state, CLOCK))) == 3


def told() -> None:
    """To Prometheus, and in the page of the protocol."""
    assert f"trainctl_rank_{NAME}" in catalogue.SPECS
    assert f"| `{NAME}` |" in docs.page()


recorded()
shown()
told()
assert executor.measured(LossScale(1024.0)) == {NAME: 1024.0}
print("walked")
