"""One figure has one name and one meaning, wherever it is shown, and Help has them all."""

import pytest
from tests.tui.support.driving import dialog_text, running
from tests.tui.support.recorded import CLOCK, run_view, snapshot, source_of
from tests.tui.support.states import ALONE, FLEET

from trainctl.tui.cli import tables
from trainctl.tui.screens import header
from trainctl.tui.text import run_lines, styled_line


def head_of(columns: int, rows: int) -> str:
    return "\n".join(styled_line.plain(pieces) for pieces in header.lines(FLEET, CLOCK, columns, rows=rows))


@pytest.mark.parametrize(
    ("columns", "rows", "labels"),
    [(80, 2, ["avg loss ", "tok/s", "eff "]), (120, 4, ["avg loss ", "recent 10.7k tok/s", "average ", "recent 0.33"])],
)
def test_the_head_says_what_is_a_mean_and_what_is_recent(columns: int, rows: int, labels: list[str]) -> None:
    head = head_of(columns, rows)
    assert all(label in head for label in labels), head


def test_status_says_what_is_the_last_step_s_and_what_is_an_average() -> None:
    assert ALONE.last_step is not None
    lines = tables.status_text(snapshot(run_view(1))).splitlines()
    last, rates = (next(line for line in lines if line.startswith(name)) for name in ("last step ", "rates "))
    assert " loss " in last and "tok" in last
    assert rates.index("average ") < rates.index("last step ") < rates.index("steps/s")
    assert next(line for line in lines if line.startswith("evaluation ")).split()[1] == "loss"


def test_ls_names_the_last_loss() -> None:
    assert "LAST LOSS" in tables.runs_table([])


async def test_help_has_every_figure_and_word() -> None:
    async with running(source_of(4), size=(120, 60)) as (pilot, app):
        await pilot.press("question_mark")
        said = " ".join(dialog_text(app).split())
        for figure in (*run_lines.FIGURES, *run_lines.WORDS):
            assert " ".join(f"{figure.label} {figure.meaning}".split()) in said
