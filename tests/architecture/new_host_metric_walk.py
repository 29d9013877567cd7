"""Walks every place that a machine's metric shows in, with that of patches/new_host_metric.patch, in a patched copy."""

import tempfile
from pathlib import Path

import msgspec
from tests.node_agent.support.records import check_rollups, part, reading, step
from tests.tui.support.recorded import CLOCK, host, run_view, snapshot
from tools.protocol_docs import docs

from trainctl.node_agent.exporter import catalogue
from trainctl.node_agent.readings.host import CpuMeter, read_host
from trainctl.node_agent.readings.step_readings import StepReadings
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.charts import metrics, picker
from trainctl.tui.export import rows
from trainctl.tui.export.mirror.metrics import of_part
from trainctl.tui.screens import fleet_table
from trainctl.tui.state import filter_language, rank_rows, reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.state.table_schemas import FLEET
from trainctl.tui.text.glyphs import UNICODE
from trainctl.tui.text.styled_line import plain

NAME = "memory_available_bytes"


def with_value(message: m.HostReading, value: float) -> m.HostReading:
    return msgspec.structs.replace(message, values={NAME: value})


def recorded() -> None:
    """From readings to steps, and in the record with its rollups, in exports and in mirrors."""
    readings = StepReadings()
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "run-1")
        paths.directory.mkdir()
        with RunDb(paths) as recorder:
            for number in range(1, 26):
                taken = with_value(msgspec.structs.replace(reading(10.0 * number), node="node-0"), 2.0**number)
                readings.take(taken, number)
                recorder.host(taken)
                recorder.commit(step(number), [readings.joined(part(number), None)], 0.0)
        check_rollups(paths)
        with RecordReader(paths) as reader:
            assert reader.series(NAME, 0).last[-1] == 2.0**25
            (seen,) = reader.rank_steps(25)
        column = list(rows.COLUMNS["hosts"]).index(NAME)
        exported = [row[column] for page in rows.of_record(paths.directory, "hosts") for row in page]
        assert exported == [2.0**number for number in range(1, 26)]
        assert of_part(seen).values[NAME] == 2.0**25


def shown() -> None:
    """In charts, in the fleet table and in filters."""
    view = run_view(4)
    state = reducer.apply(md.ViewState(), snapshot(view), CLOCK.at_monotonic)
    for number, node in enumerate(("mbp", "forge")):
        state = reducer.apply(state, with_value(host(node, 20_000 + number), 3e9), CLOCK.at_monotonic)
    assert NAME in metrics.names()
    assert metrics.per_rank(NAME)
    assert any(NAME in str(entry) for entry in picker.choices_of(view, ()))
    head, *table = [plain(line) for line in fleet_table.lines(state, CLOCK, 200, UNICODE, total=False)]
    assert "AVAIL" in head
    assert [row.split()[0] for row in table if "3.00 GB" in row] == ["mbp", "forge"]
    wanted = filter_language.parse(f"{NAME}>2GB", FLEET)
    assert len(wanted.kept(rank_rows.rows(state, CLOCK))) == 2


def told() -> None:
    """To Prometheus, and in the page of the protocol."""
    assert f"trainctl_host_{NAME}" in catalogue.SPECS
    assert f"| `{NAME}` |" in docs.page()


recorded()
shown()
told()
assert NAME in read_host("a", 0.0, Path(), CpuMeter()).values
print("walked")
