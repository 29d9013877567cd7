"""The compiler's time apart from the steps': by the record and live, on the Node screen and in a report."""

from pathlib import Path

import msgspec
from tests.tui.support import run_directory
from tests.tui.support.recorded import CLOCK, CONNECTED, rank_step, run_view, snapshot

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.whole_run import WholeRunReader
from trainctl.tui.report import read_facts
from trainctl.tui.screens import node
from trainctl.tui.state import rank_rows, reducer, step_phases
from trainctl.tui.state import view_state as md
from trainctl.tui.state.step_phases import Compilation
from trainctl.tui.text.styled_line import plain

FOUR = run_view(4)
FORGE = 2
FIRST = Compilation(1, 1, 41.2)
NOTHING = step_phases.RecordedPhases()


def history(*found: tuple[int, float], size: int = 1, rank: int = FORGE) -> m.History:
    steps, values = tuple(step for step, _ in found), tuple(value for _, value in found)
    return m.History(rid="r", series=(m.Series("compile_seconds", rank, size, steps, *[values] * 4),))


def test_the_longest_of_each_rank_is_kept_with_its_exact_step() -> None:
    whole, near = history((0, 41.2), (5000, 9.0), size=100), history((1, 41.2), (2, 3.0))
    assert step_phases.compiled_by_rank([whole]) == {FORGE: Compilation(1, 99, 41.2)}
    assert step_phases.compiled_by_rank([whole, near, history((7, 8.0), rank=0)]) == {
        FORGE: FIRST,
        0: Compilation(7, 7, 8.0),
    }
    assert step_phases.compiled_by_rank([history()]) == {}


def live(*steps: tuple[int, float]) -> md.ViewState:
    """The fleet of four after steps of forge, with what the compiler took in them; 0 is no compilation."""
    state = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(FOUR), CLOCK.at_monotonic)
    for seq, (step, seconds) in enumerate(steps, 1):
        values = {"compile_seconds": seconds} if seconds else {}
        part = msgspec.structs.replace(rank_step(FOUR, step, FORGE, seq=seq), values=values)
        state = reducer.apply(state, part, CLOCK.at_monotonic)
    return state


def test_what_comes_live_counts_however_long_ago_it_was() -> None:
    later = [(step, 0.0) for step in range(FOUR.step + 2, FOUR.step + 2 + 4 * reducer.RECENT_LAPS)]
    state = live((FOUR.step + 1, 12.5), *later)
    assert step_phases.compiled(state, NOTHING, FORGE) == Compilation(FOUR.step + 1, FOUR.step + 1, 12.5)
    assert step_phases.compiled(state, step_phases.RecordedPhases(FOUR.run, {}, {FORGE: FIRST}), FORGE) == FIRST
    assert step_phases.compiled(state, NOTHING, 0) is None


def test_the_node_screen_shows_it_beside_the_compilers_mode() -> None:
    past = step_phases.past_of(FOUR.run, m.History(rid="r", series=()), [history((1, 41.2))])

    def text(past: step_phases.RecordedPhases, state: md.ViewState) -> str:
        made, _ = node.node_lines(state, rank_rows.rows(state, CLOCK)[FORGE], past, CLOCK, 80, 22)
        return "\n".join(plain(line) for line in made)

    assert "compile default" in text(past, live()) and "compiled 41.2 s at step 1" in text(past, live())
    assert "compiled" not in text(step_phases.RecordedPhases("another", {}, past.compiled), live())
    assert f"compiled 12.5 s at step {FOUR.step + 1:,}" in text(NOTHING, live((FOUR.step + 1, 12.5)))


def test_a_report_finds_the_step_in_a_long_record(tmp_path: Path) -> None:
    paths, took = RunPaths(tmp_path / "run-1"), {1: 7.5, 350: 41.2, 351: 3.0}
    paths.logs.mkdir(parents=True)
    with RunDb(paths, resumable=False) as recorder:
        for step, parts in run_directory.simulated(2, 500).steps:
            for part in parts[:1] if step.step in took else ():
                part.values["compile_seconds"] = took[step.step]
            recorder.commit(step, parts, step.committed_at)
    with WholeRunReader(paths) as reader:
        first, second = reader.ranks()
        assert read_facts._compiled(reader, first) == Compilation(350, 350, 41.2)
        assert read_facts._compiled(reader, second) is None
