"""A new metric or verb touches few files, and works wherever metrics and verbs do."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from tests.conftest import ROOT
from tests.node_agent.support.records import check_rollups, part, reading, step
from tests.tui.support.recorded import CLOCK, host, rank_step, run_view, snapshot
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import docs

from trainctl.node_agent.exporter import catalogue
from trainctl.node_agent.readings.step_readings import StepReadings
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.config.objectives import OBJECTIVES
from trainctl.protocol.messages import verbs
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.charts import metrics
from trainctl.tui.commands.verbs import DESCRIPTIONS
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


ROOMS = ("protocol", "trainer", "node_agent", "tui")
PATCH = Path(__file__).parent / "patches" / "new_verb.patch"
HANDLERS = "node_agent/trainctl/node_agent/planning/edits.py"
MOST_FILES = 4
"""Product files that a new verb may touch."""


def patched(into: Path, *options: str) -> Path:
    """Copy the product, its tools, its pages and what these are made of, and apply the patch."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*ROOMS, "tools", "docs", "tests/golden", "tests/tui/screens/__snapshots__"):
        shutil.copytree(ROOT / name, into / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", into)
    words = ["git", "apply", "-C1", *options, str(PATCH)]
    done = subprocess.run(words, cwd=into, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, f"{PATCH.name} no longer fits the code; make it again with git diff\n{done.stderr}"
    return into


def run_in(tree: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `python WORDS` in the copy, whose product comes before that of the checkout."""
    paths = [*(str(tree / room) for room in ROOMS), str(tree), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )


def test_a_new_verb_touches_few_files() -> None:
    files = re.findall(r"^\+\+\+ b/(\S+)", PATCH.read_text("utf-8"), flags=re.MULTILINE)
    assert len(files) <= MOST_FILES
    assert all(name.split("/")[0] in ROOMS for name in files), "the rest is generated or found by itself"


@pytest.mark.tier("soak")
@pytest.mark.needs("git")  # it applies the patch
def test_a_new_verb_works_wherever_verbs_do_and_its_pages_are_made_by_their_command(tmp_path: Path) -> None:
    tree = patched(tmp_path)
    done = run_in(tree, "-m", "tests.architecture.new_verb_walk")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["walked"]), done.stdout + done.stderr
    stale = run_in(tree, "-m", "tools.pages", "--check")
    pages = [f"docs/{name}" for name in ("protocol.md", "protocol.schema.json", "keys.md")]
    assert [line.split()[0] for line in stale.stderr.splitlines()] == pages, stale.stderr
    assert run_in(tree, "-m", "tools.pages").returncode == 0
    assert all("follow-schedule" in (tree / page).read_text("utf-8") for page in pages)


@pytest.mark.tier("soak")
@pytest.mark.needs("git")  # it applies the patch
def test_a_verb_without_a_handler_fails_the_type_check(tmp_path: Path) -> None:
    tree = patched(tmp_path, f"--exclude={HANDLERS}")
    done = run_in(tree, "-m", "mypy", "protocol/trainctl/protocol/messages", "node_agent/trainctl/node_agent/planning")
    assert 'Argument 1 to "assert_never" has incompatible type "FollowSchedule"' in done.stdout, done.stdout


@pytest.mark.parametrize("name", verbs.VERBS)
def test_declaration_and_description_agree(name: str) -> None:
    verb, described = verbs.VERBS[name], DESCRIPTIONS[name]
    assert (verb.inverse is not None) == callable(described.undo), "what undoes it, or in words why nothing does"
    assert bool(verb.knobs) == (verb.scope == "edit"), "an edit changes settings of the plan, and nothing else does"
    assert verb.affects == "nothing" or verb.scope == "edit" or verb.args is verbs.Rollback
    assert verb.takes_node or not (verb.needs_node or verb.to_node)
    if verb.inverse is not None:
        assert not verb.knobs or verbs.VERBS[verb.inverse].knobs & verb.knobs
