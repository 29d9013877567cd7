"""A metric shows wherever metrics do by its row of the table alone: shown with one of ranks and one of machines."""

from pathlib import Path
from typing import TypeVar

import msgspec
from tests.node_agent.support.records import check_rollups, part, reading, step
from tests.tui.support.recorded import CLOCK, host, rank_step, run_view, snapshot
from tools.protocol_docs import docs

from trainctl.node_agent.exporter import catalogue
from trainctl.node_agent.readings.step_readings import StepReadings
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.config.objectives import OBJECTIVES
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.charts import metrics
from trainctl.tui.dialogs import chart_picker
from trainctl.tui.export import rows
from trainctl.tui.export.mirror.metrics import RANK_METRICS, of_part
from trainctl.tui.screens import fleet_table
from trainctl.tui.state import filter_language, rank_rows, reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.state.table_schemas import FLEET
from trainctl.tui.text.styled_line import plain

Part = TypeVar("Part", m.RankStep, m.HostReading)
OF_RANK, OF_MACHINE = "own_loss", "round_trip_seconds"


def with_value(message: Part, name: str, value: float) -> Part:
    return msgspec.structs.replace(message, values={**message.values, name: value})


def test_it_is_in_the_record_with_its_rollups_in_exports_and_in_mirrors(tmp_path: Path) -> None:
    paths, readings = RunPaths(tmp_path / "run-1"), StepReadings()
    paths.directory.mkdir()
    with RunDb(paths) as recorder:
        for number in range(1, 26):
            machine = msgspec.structs.replace(reading(10.0 * number), node="node-0")
            machine = with_value(machine, OF_MACHINE, 2.0**number)
            readings.take(machine, number)
            recorder.host(machine)
            own = with_value(part(number), OF_RANK, 3.0 * number)
            recorder.commit(step(number), [readings.joined(own, None)], 0.0)
    check_rollups(paths)
    for name, kind, values in (
        (OF_RANK, "ranks", [3.0 * number for number in range(1, 26)]),
        (OF_MACHINE, "hosts", [2.0**number for number in range(1, 26)]),
    ):
        with RecordReader(paths) as reader:
            assert reader.series(name, 0).last[-1] == values[-1]
            (newest,) = reader.rank_steps(25)
        column = list(rows.COLUMNS[kind]).index(name)
        assert [row[column] for page in rows.of_record(paths.directory, kind) for row in page] == values
        assert of_part(newest).values[RANK_METRICS[name]] == values[-1]


def test_it_is_in_charts_the_fleet_table_and_filters() -> None:
    view = run_view(4)
    state = reducer.apply(md.ViewState(), snapshot(view), CLOCK.at_monotonic)
    for rank in view.ranks:
        newest = msgspec.structs.replace(rank_step(view, view.step, rank.rank), seq=20_000 + rank.rank)
        state = reducer.apply(state, with_value(newest, OF_RANK, 512.0), CLOCK.at_monotonic)
    for number, node in enumerate(("mbp", "forge")):
        machine = with_value(host(node, 20_100 + number), OF_MACHINE, 0.321)
        state = reducer.apply(state, machine, CLOCK.at_monotonic)
    head, *table = [plain(line) for line in fleet_table.lines(state, CLOCK, 200, total=False)]
    for name, shown, nodes, condition in (
        (OF_RANK, "512", ["studio", "mbp", "forge"], ">500"),  # mini is lost
        (OF_MACHINE, "0.32 s", ["mbp", "forge"], ">0.32"),
    ):
        assert name in metrics.names() and metrics.per_rank(name)
        assert any(name in str(entry) for entry in chart_picker.choices_of(view, ()))
        assert m.METRICS[name].heading in head.split()
        assert [row.split()[0] for row in table if shown in row] == nodes, table
        wanted = filter_language.parse(f"{name}{condition}", FLEET)
        assert len(wanted.kept(rank_rows.rows(state, CLOCK))) == len(nodes)


def test_each_of_the_table_is_known_to_prometheus_and_on_the_page_of_the_protocol() -> None:
    page = docs.page(docs.CLIENTS)
    assert [name for name in m.METRICS if f"`{name}`" not in page] == []
    assert {f"trainctl_rank_{OF_RANK}", f"trainctl_host_{OF_MACHINE}"} <= catalogue.SPECS.keys()


def test_that_of_an_objective_is_one_of_the_run() -> None:
    names = [metric.name for objective in OBJECTIVES.values() for metric in objective.metrics]
    assert "rewards/margins" in names
    for name in names:
        assert name in metrics.names() and not metrics.per_rank(name), name
        assert f"trainctl_{catalogue.exported_name(name)}" in catalogue.SPECS, name
