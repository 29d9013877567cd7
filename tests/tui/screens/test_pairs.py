"""The Samples screen of a run on pairs: held-out pairs with their margins, the worst first, one in full."""

import math
from typing import Any

import msgspec
from tests.tui.support.driving import until
from tests.tui.support.pictures import Pictures, at_columns
from tests.tui.support.recorded import Recorded, app_of, source_of

from trainctl.protocol import messages as m
from trainctl.tui.screens import pairs_view as view
from trainctl.tui.screens.pairs_view import ChosenPair, PairTable
from trainctl.tui.text.glyphs import ASCII, UNICODE
from trainctl.tui.text.styled_line import plain

PROMPTS = ("def area(radius):", "def is_even(number):", "Why is the sky blue?", "import json\n\ndef load(path):")


def evaluations(count: int = 4) -> tuple[m.HeldOutPairs, ...]:
    def pair(index: int, at: int) -> m.EvaluatedPair:
        chosen = 0.1 * at + 0.02 * index
        rejected = -0.05 * at + (0.5 if index == 2 else 0.0)
        return m.EvaluatedPair(
            index, chosen, rejected, PROMPTS[index % 4], f"return value {index}\n", f"return eulav {index}\x1b[2J\n"
        )

    return tuple(
        m.HeldOutPairs(50 * (at + 1), 1000.0 + at, tuple(pair(index, at) for index in range(14))) for at in range(count)
    )


def source_with(pairs: tuple[m.HeldOutPairs, ...]) -> Recorded:
    source = source_of(4, weight_unit="pairs", loss_unit="per pair", eval_step=200)
    source.known_pairs = pairs
    return source


def shown(table: PairTable, columns: int = 80, rows: int = 20, glyphs: Any = UNICODE) -> list[str]:
    lines = [plain(line) for line in view.body(table, columns, rows, glyphs)]
    assert len(lines) == rows and {len(line) for line in lines} == {columns}
    return lines


def test_the_worst_is_first_with_its_rewards_over_the_evaluations() -> None:
    table = PairTable.of(reversed(evaluations()), ChosenPair())
    lines = shown(table)
    assert lines[0].split()[1:] == ["@150", "@200"]
    assert "#2 Why is" in lines[1] and lines[1].rstrip().endswith("-0.010 +0.34/+0.35")
    assert "-0.160 +0.24/+0.40" in lines[1]
    assert any("pair #2 @200  margin -0.010" in line for line in lines)
    assert any("return eulav 2" in line for line in lines[12:])


def test_keys_move_over_pairs_and_evaluations_and_the_newest_is_followed() -> None:
    found = evaluations()
    table = PairTable.of(found, PairTable.of(found, ChosenPair()).to_row(3))
    assert table.row == 3
    back = PairTable.of(found, table.to_place(table.place - 2))
    assert (back.place, back.rows[back.row].index) == (1, table.rows[3].index)
    assert back.to_place(10**6).step is None, "what comes next is shown"
    assert table.to_row(10**6).index == table.rows[-1].index


def test_hostile_text_and_broken_rewards_stay_in_their_cells() -> None:
    odd = m.EvaluatedPair(40, math.nan, 0.0, "\t\x1b[2Jx" + "w" * 500, "a\nb", "")
    found = (*evaluations(), m.HeldOutPairs(250, 2000.0, (odd,)))
    for glyphs in (UNICODE, ASCII):
        for columns, rows in ((60, 10), (80, 20), (200, 50)):
            lines = shown(PairTable.of(found, ChosenPair()), columns, rows, glyphs)
            assert not any("\x1b" in line or "\t" in line for line in lines)
    assert any("every_steps" in line for line in shown(PairTable.of((), ChosenPair())))


@at_columns(80, 120)
async def test_pairs_screen(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(source_with(evaluations())), columns, "6")


async def test_another_evaluation_is_fetched_and_m_shows_the_answers() -> None:
    source = source_with(evaluations(2))
    app = app_of(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.live.run is not None)
        await pilot.press("6")
        await until(pilot, lambda: "2 evaluations" in text_of(app))
        source.known_pairs = evaluations(3)
        assert app.live.run is not None
        source.more.put_nowait(msgspec.structs.replace(app.live.run, eval_step=250, seq=10**6))
        await until(pilot, lambda: "3 evaluations" in text_of(app))
        await pilot.press("m")
        await until(pilot, lambda: "no samples yet" in text_of(app))


def text_of(app: Any) -> str:
    screen = app.screen
    return "\n".join(plain(line) for line in screen.lines(120, 38)) if hasattr(screen, "lines") else ""
