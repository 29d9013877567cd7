"""`trainctl report`: every fact of a run is on its page, which is safe, readable, bounded in size, and fits a phone."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.tui.support import browser, page_checks, reported_runs, run_directory
from tests.tui.support.cli_calls import assert_one_line, call, call_json

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.checkpoints import ParentCheckpoint
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.bench import bench_rows
from trainctl.tui.bench.bench_rows import BenchRow
from trainctl.tui.report import html_page, sections
from trainctl.tui.report.read_facts import read_facts

MOST_BYTES = 2_000_000
MANY = 1_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reported_runs.make(tmp_path_factory.mktemp("reported"))


@pytest.fixture(scope="module")
def page(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "report.html"
    done = call("report", directory, "--html", file)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert f"{file}: " in done.stderr
    return file.read_text("utf-8")


FACTS = (
    "finished (simulated: nothing was trained)", "120 of 120", "rebalanced:", "b is lost: was ended by a simulated",
    "without training", "until step", "first-shares", "b costs 3.1 %", "tokens/s, ", "early answer", "model.path",
    "batch.global", "All other fields", "engine that sums the gradients", "it started from parent-1 at step 5",
    "other-1 branches off", "more than 1.25 EUR", "nodes without a price", "3 Wh", "torch 2.9.1", reported_runs.DIGEST,
    "forward", "Where the time went", "Diagnosis", "a different",
)  # fmt: skip


def test_each_fact_is_on_the_page_and_in_markdown(directory: Path, page: str) -> None:
    text = page_checks.check(page).text
    markdown = call("report", directory).stdout
    for fact in FACTS[:-1]:
        assert fact in text, fact
        assert fact in markdown, fact
    assert FACTS[-1] not in text  # the check can fail
    assert markdown.count("\n## ") == page.count("<h2>") >= 13


def test_the_page_is_well_formed_and_readable_in_both_schemes_and_widths(page: str) -> None:
    found = page_checks.check(page)
    sizes = [drawing[0][1]["class"] for drawing in found.drawings]
    assert len(sizes) >= 8 and sizes.count("wide") == sizes.count("narrow")
    assert "@media (max-width:40rem){svg.wide{display:none}svg.narrow{display:block}" in found.style
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in found.tags


def test_every_intervention_is_marked_on_the_curve(directory: Path, page: str) -> None:
    """Marks that are close have one title, which has all that fit."""
    facts = call_json("report", directory)
    titles = re.findall(r"<title>(step [^<]*)</title>", page)
    marked = {(int(step.replace(",", "")), kind) for title in titles
              for step, kind in re.findall(r"^step ([\d,]+), ([\w ]+) by", title, re.MULTILINE)}  # fmt: skip
    kinds = {"state": "run state"}
    assert {(one["step"], kinds.get(one["kind"], one["kind"])) for one in facts["interventions"]} == marked
    assert {kind for _, kind in marked} >= {"split", "membership", "note", "checkpoint", "run state"}


def test_text_from_elsewhere_is_only_text(directory: Path, page: str) -> None:
    assert "alert(1)" in page and "<script" not in page and "\x1b" not in page
    markdown = call("report", directory).stdout
    assert "\x1b" not in markdown
    for line in (line for line in markdown.splitlines() if "alert(1)" in line and not line.startswith(">  ")):
        assert "\\<script>" in line and "\\](https" in line
        assert line.count("|") - line.count("\\|") in (0, 7)


def test_no_form_has_a_variable_of_the_environment(directory: Path, page: str) -> None:
    assert reported_runs.SECRET in RunPaths(directory).run_file.read_text("utf-8")
    assert (
        reported_runs.SECRET not in page + call("report", directory).stdout + call("report", directory, "--json").stdout
    )


def test_json_has_the_facts_of_the_record(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    facts = call_json("report", directory, "--md", file)
    assert facts["files"] == [str(file)] and file.read_text("utf-8").startswith("# Report of run ")
    with RecordReader(directory) as reader:
        parts = [part for step in range(1, reported_runs.STEPS + 1) for part in reader.rank_steps(step)]
        last = reader.last_step()
    assert last is not None and facts["last"]["loss"] == last.loss
    for rank in facts["ranks"]:
        own = [part for part in parts if part.rank == rank["rank"]]
        assert (rank["steps"], rank["samples"]) == (len(own), sum(part.samples for part in own))
        assert sum(rank["phases"].values()) == pytest.approx(sum(sum(msgspec.structs.astuple(p.phases)) for p in own))
    (fault,) = facts["incidents"]
    assert fault["lost"] == ["b"] and fault["waited_seconds"] > 0 and fault["rate_change"] < 0
    assert reported_runs.FAILS_AT < fault["back_step"] < reported_runs.STEPS
    assert facts["shares"][0]["samples"].keys() == {"a", "b", "c"}
    assert any(one["samples"].keys() == {"a", "c"} for one in facts["shares"])
    assert sum(part["seconds"] for part in facts["time"]) == pytest.approx(
        facts["read_to"] - facts["view"]["started_at"], rel=0.02
    )


@pytest.mark.parametrize("faults", [False, True])
def test_a_recorded_run_with_missing_steps(tmp_path: Path, faults: bool) -> None:
    """Without run file and checkpoints; a hole in its curve."""
    found = run_directory.make(tmp_path / "runs" / "demo-1", faults=faults)
    page_checks.check(_page(found, tmp_path))


@pytest.mark.parametrize("columns", [12, 200])
def test_means_of_a_rank_that_moved_are_each_nodes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Buckets of steps in which it ran on both nodes are of neither."""
    values = {True: ("early", 2.0), False: ("late", 6.0)}
    found = RunPaths(tmp_path / "moved-1")
    found.directory.mkdir()
    source = run_directory.make(tmp_path / "runs" / "demo-1", faults=True)
    with RecordReader(source) as reader, RunDb(found, resumable=False) as recorder:
        for step in reader.steps()[0]:
            node, tflops = values[step.step <= 85]
            parts = [part for part in reader.rank_steps(step.step) if part.rank == 0]
            moved = [msgspec.structs.replace(part, node=node, values={"tflops": tflops}) for part in parts]
            recorder.commit(step, moved, step.committed_at)
    monkeypatch.setattr("trainctl.tui.report.read_facts.RANK_COLUMNS", columns)
    means = {rank.node: rank.means["tflops"] for rank in read_facts(found).ranks}
    assert means == pytest.approx(dict(values.values()))


def _page(directory: Path, folder: Path) -> str:
    assert call("report", directory, "--html", folder / "page.html").returncode == 0
    return (folder / "page.html").read_text("utf-8")


def test_a_run_that_has_no_step_yet_and_one_that_is_active(tmp_path: Path, directory: Path) -> None:
    empty = RunPaths(tmp_path / "empty")
    empty.directory.mkdir()
    with RunDb(empty, resumable=False) as recorder:
        recorder.event(1.0, e.NoteWritten("soon"), "info", "anna")
    page_checks.check(_page(empty.directory, tmp_path))
    assert "none was committed" in call("report", empty.directory).stdout

    def continues(paths: RunPaths) -> None:
        with RunDb(paths, resumable=False) as recorder:
            view = msgspec.json.decode(recorder.meta("view") or "", type=m.RunView)
            running = msgspec.structs.replace(view, state="running")
            recorder.set_meta("view", msgspec.json.encode(running).decode(), own=True)

    active = reported_runs.copied(directory, "active-1", continues)
    assert "| state | running" in call("report", active).stdout


def test_the_size_of_a_page_is_bounded(tmp_path: Path) -> None:
    """Thousands of changes, checkpoints and faults, each with a long text: the curves are in buckets anyway."""
    found = run_directory.make(tmp_path / "runs" / "demo-1")
    with RunDb(RunPaths(found), resumable=False) as recorder:
        for number in range(MANY):
            step = 1 + number * run_directory.STEPS // MANY
            at = run_directory.BEGAN_AT + step
            shares = {f"node-{name}": number % 7 + name for name in range(8)}
            recorder.event(at, e.SharesChanged(shares, shares, cause="x" * 300), "info", "auto:rebalance", step=step)
            recorder.event(at, e.CheckpointWritten(step, 1, 0.1), "good", "a", step=step)
            recorder.event(at, e.RankChanged((f"node-{number % 8}",), "failed", "y" * 300), "error", "auto", step=step)
    page = _page(found, tmp_path)
    assert len(page.encode()) < MOST_BYTES
    page_checks.check(page)
    assert f"{3 * MANY:,}" not in page and "rows between the first and the last ones are left out" in page


def test_it_carries_the_table_of_a_bench(directory: Path, tmp_path: Path) -> None:
    file, rows = tmp_path / "bench.json", [
        BenchRow(settings={"batch.micro": "1"}, tokens_per_second=1000.0, against_first=1.0),
        BenchRow(settings={"batch.micro": "4"}, problem="out of memory"),
    ]  # fmt: skip
    file.write_text(json.dumps({"ok": True, **bench_rows.fields(rows, "studio", "EUR", "samples")}))
    text = call("report", directory, "--bench", file).stdout
    assert "Short real runs on studio" in text and "| batch.micro | TOKENS/S | SAMPLES/S |" in text
    assert "out of memory" in text.split("## Settings compared")[1]
    assert len(call_json("report", directory, "--bench", file)["bench"]["rows"]) == 2
    page = tmp_path / "page.html"
    assert call("report", directory, "--bench", file, "--html", page).returncode == 0
    assert "Settings compared" in page.read_text()
    file.write_text("{}")
    assert_one_line(call("report", directory, "--bench", file), 2, "--bench", "isn't what trainctl bench --json prints")
    assert_one_line(call("report", directory, "--bench", tmp_path / "none"), 2, "--bench", "No such file")


def test_a_run_is_found_by_its_id_and_what_is_wrong_is_one_line(directory: Path, tmp_path: Path) -> None:
    assert_one_line(call("report", "nothing-1", TRAINCTL_STATE=str(tmp_path)), 2, "nothing-1", "no such run")
    assert_one_line(call("report", tmp_path), 2, "record.db")
    for option in ("--html", "--md"):
        done = call("report", directory, option, tmp_path / "none" / "x")
        assert (done.returncode, done.stderr) == (
            2, f"trainctl: {option}: {tmp_path / 'none' / 'x'}: No such file or directory\n"
        )  # fmt: skip
    assert [*tmp_path.iterdir()] == []
    runs = tmp_path / "node" / "runs"
    runs.mkdir(parents=True)
    (runs / directory.name).symlink_to(directory)
    done = call("report", directory.name, "--json", TRAINCTL_STATE=str(tmp_path))
    assert json.loads(done.stdout)["ok"] is True


def test_where_a_record_lacks_what_the_run_branched_off_its_checkpoints_say_it(directory: Path) -> None:
    def without_branch(paths: RunPaths) -> None:
        with RecordReader(paths) as reader:
            view = msgspec.json.decode(reader.meta("view") or "", type=m.RunView)
        with RunDb(paths, resumable=False) as recorder:
            known = msgspec.structs.replace(view, branch=None)
            recorder.set_meta("view", msgspec.json.encode(known).decode(), own=True)

    def with_checkpoint(paths: RunPaths) -> None:
        without_branch(paths)
        reported_runs.checkpoint(paths, reported_runs.STEPS + 1, ParentCheckpoint("parent-2", 7))

    bare = read_facts(RunPaths(reported_runs.copied(directory, "bare-1", without_branch))).lineage
    assert not any(line.startswith("it started from") for line in bare)
    found = read_facts(RunPaths(reported_runs.copied(directory, "branch-1", with_checkpoint))).lineage
    assert found == ("it started from parent-2 at step 7", *bare)


WIDTHS = (400, 1280)


@pytest.mark.needs("chromium")
@pytest.mark.parametrize(("scheme", "colors"), [("light", html_page.LIGHT), ("dark", html_page.DARK)])
def test_a_report_of_a_run_that_has_everything_fits_both_widths(scheme: str, colors: Any, tmp_path: Path) -> None:
    page = html_page.page_html(sections.page(read_facts(RunPaths(reported_runs.make(tmp_path)))))
    red, green, blue = (int(colors["page"][at : at + 2], 16) for at in (1, 3, 5))
    for width, found in zip(WIDTHS, browser.lay_out(page, WIDTHS, scheme, tmp_path), strict=True):
        assert (found["wrong"], found["width"], found["page"]) == ([], width, f"rgb({red}, {green}, {blue})")
        assert len(found["drawings"]) >= 5 and min(found["drawings"]) >= 200 and found["text"] > 5_000
