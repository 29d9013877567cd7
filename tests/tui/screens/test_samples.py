"""The Samples screen: prompts with answers side by side over the steps, or held-out pairs with their margins, the worst
first; one in full below."""

import math
from typing import Any

import msgspec
import pytest
from tests.tui.support.driving import until
from tests.tui.support.pictures import Pictures, at_columns
from tests.tui.support.recorded import BOOT, NOW, Recorded, app_of, source_of

from trainctl.protocol import messages as m
from trainctl.tui.screens import pairs_view
from trainctl.tui.screens.pairs_view import ChosenPair, PairTable
from trainctl.tui.screens.samples import AnswerTable, Chosen, answers_body
from trainctl.tui.text.styled_line import plain

ASKED = {
    "Once upon a time": (
        "the the the the",
        "there was a the old man and the sea of the",
        "there was an old man who lived by the sea. Every morning he took his boat out, and every evening he came"
        " home with\nan empty net.\n\nOne day a fish spoke to him.",
    ),
    "Why is the sky blue?": (
        "sky sky sky",
        "The sky is the sky is the sky",
        "Because air scatters blue light more than red.",
    ),
    "Translate to German: 'good morning'": ("good good", "Guten guten", "Guten Morgen"),
}
PROMPTS = ("def area(radius):", "def is_even(number):", "Why is the sky blue?", "import json\n\ndef load(path):")


def samples() -> tuple[m.Sample, ...]:
    run = next(item.run.run for item in source_of(4).messages if isinstance(item, m.Snapshot) and item.run is not None)
    return tuple(
        m.Sample(
            run=run,
            step=6000 * (at + 1),
            at=NOW - 3600 * (3 - at),
            number=number,
            prompt=prompt,
            answer=texts[at],
            tokens=len(texts[at].split()),
            ended=at == 2,
            seconds=0.4,
            loss=4.1 - at,
            max_tokens=128,
            eval_loss=2.31 if at == 2 else None,
            temperature=0.0,
            top_p=1.0,
            seed=0,
            node="studio",
            by="auto",
        )
        for at in range(3)
        for number, (prompt, texts) in enumerate(ASKED.items())
    )


def evaluations(count: int = 4) -> tuple[m.HeldOutPairs, ...]:
    def pair(index: int, at: int) -> m.EvaluatedPair:
        rejected = -0.05 * at + (0.5 if index == 2 else 0.0)
        answers = f"return value {index}\n", f"return eulav {index}\x1b[2J\n"
        return m.EvaluatedPair(index, 0.1 * at + 0.02 * index, rejected, PROMPTS[index % 4], *answers)

    return tuple(
        m.HeldOutPairs(50 * (at + 1), 1000.0 + at, tuple(pair(index, at) for index in range(14))) for at in range(count)
    )


def source_with_pairs(pairs: tuple[m.HeldOutPairs, ...]) -> Recorded:
    source = source_of(4, weight_unit="pairs", loss_unit="per pair", eval_step=200)
    source.known_pairs = pairs
    return source


@at_columns(80, 120)
async def test_samples_screen(pictures: Pictures, columns: int) -> None:
    source = source_of(4)
    source.known_samples = samples()
    await pictures.compare(app_of(source), columns, "6")


async def test_without_samples_the_screen_says_how_to_get_some(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_of(4)), 80, "6")


@at_columns(80, 120)
async def test_pairs_screen(pictures: Pictures, columns: int) -> None:
    await pictures.compare(app_of(source_with_pairs(evaluations())), columns, "6")


def test_keys_move_over_prompts_and_steps_and_the_newest_is_followed() -> None:
    answers = AnswerTable.of(samples(), Chosen())
    back = AnswerTable.of(samples(), answers.to_step(answers.step_index - 1))
    assert back.sample is not None and back.sample.step == 12_000
    other = AnswerTable.of(samples(), back.to_prompt(1))
    assert other.sample is not None
    assert (other.sample.prompt, other.sample.step) == ("Why is the sky blue?", 12_000)
    assert other.to_step(10**6).sample is None, "what comes next is shown"
    assert AnswerTable.of(samples(), other.to_prompt(-5)).prompt_index == 0


def test_keys_move_over_pairs_and_evaluations_and_the_newest_is_followed() -> None:
    pairs = evaluations()
    table = PairTable.of(pairs, PairTable.of(pairs, ChosenPair()).to_prompt(3))
    assert table.prompt_index == 3
    back = PairTable.of(pairs, table.to_step(table.step_index - 2))
    assert (back.step_index, back.rows[back.prompt_index].index) == (1, table.rows[3].index)
    assert back.to_step(10**6).step is None, "what comes next is shown"
    assert table.to_prompt(10**6).index == table.rows[-1].index


@pytest.mark.parametrize(("columns", "rows"), [(60, 10), (200, 50)])
def test_hostile_text_stays_text_in_its_cells(columns: int, rows: int) -> None:
    once = samples()
    answer = "\x1b[2J\tx\u202ey" + "w" * 5000
    hostile = msgspec.structs.replace(once[-3], answer=answer, loss=math.nan, at=NOW)
    answers = AnswerTable.of((*once, *once, hostile), Chosen())
    assert len(answers.row) == 4, "what was received twice is shown once"
    odd = m.EvaluatedPair(40, math.nan, 0.0, "\t\x1b[2Jx" + "w" * 500, "a\nb", "")
    pairs = PairTable.of((*evaluations(), m.HeldOutPairs(250, 2000.0, (odd,))), ChosenPair())
    for lines in (answers_body(answers, columns, rows), pairs_view.body(pairs, columns, rows)):
        shown = [plain(line) for line in lines]
        assert len(shown) == rows and {len(line) for line in shown} == {columns}
        assert not any("\x1b" in line or "\t" in line for line in shown)


async def test_a_live_answer_appears_and_i_asks_for_one() -> None:
    source = source_of(4)
    first, *_, last = samples()
    source.known_samples = (first,)
    app = app_of(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.live.run is not None)
        await pilot.press("6")
        await until(pilot, lambda: "1 prompt" in text_of(app))
        source.more.put_nowait(msgspec.structs.replace(last, boot=BOOT, seq=10**6))
        await until(pilot, lambda: "2 prompts" in text_of(app))
        await pilot.press("down")
        await until(pilot, lambda: "Guten Morgen" in text_of(app))
        await pilot.press("i", *"Hello", "enter")
        await until(pilot, lambda: bool(source.commands))
    assert source.commands[0][:2] == ("sample", {"prompt": "Hello"})


async def test_another_evaluation_is_fetched_and_m_shows_the_answers() -> None:
    source = source_with_pairs(evaluations(2))
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
    lines = getattr(app.screen, "lines", None)
    return "\n".join(plain(line) for line in lines(120, 38)) if lines else ""
