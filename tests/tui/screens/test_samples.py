"""The Samples screen: prompts at the left, answers side by side over the steps, one in full."""

import math
from typing import Any

import msgspec
from tests.tui.support.driving import until
from tests.tui.support.pictures import Pictures, at_columns
from tests.tui.support.recorded import BOOT, NOW, Recorded, app_of, source_of

from trainctl.protocol import messages as m
from trainctl.tui.screens import samples_view as view
from trainctl.tui.screens.samples_view import AnswerTable, Chosen
from trainctl.tui.text.glyphs import ASCII, UNICODE
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


def samples(run: str = "") -> tuple[m.Sample, ...]:
    run = run or run_of(source_of(4))
    return tuple(
        m.Sample(
            run=run, step=6000 * (at + 1), at=NOW - 3600 * (3 - at), number=number, prompt=prompt, answer=texts[at],
            tokens=len(texts[at].split()), ended=at == 2, seconds=0.4, loss=4.1 - at, max_tokens=128,
            eval_loss=2.31 if at == 2 else None, temperature=0.0, top_p=1.0, seed=0, node="studio", by="auto",
        )
        for at in range(3)
        for number, (prompt, texts) in enumerate(ASKED.items())
    )  # fmt: skip


def run_of(source: Recorded) -> str:
    return next(item.run.run for item in source.messages if isinstance(item, m.Snapshot) and item.run is not None)


def shown(answers: AnswerTable, columns: int = 80, rows: int = 20, glyphs: Any = UNICODE) -> list[str]:
    lines = [plain(line) for line in view.body(answers, columns, rows, glyphs)]
    assert len(lines) == rows and {len(line) for line in lines} == {columns}
    return lines


def test_the_newest_answers_to_the_first_prompt_stand_side_by_side_with_their_losses() -> None:
    lines = shown(AnswerTable.of(samples(), Chosen()))
    assert lines[0].split() == ["PROMPT", "@12,000", "loss", "3.100", "@18,000", "loss", "2.100"]
    assert "Once upon a…" in lines[1]
    assert "there was a the old man" in lines[1] and "there was an old man who" in lines[1]
    assert any("@18,000  loss 2.100  eval 2.310" in line for line in lines)
    assert any("One day a fish spoke to him." in line for line in lines[12:])


def test_keys_move_over_prompts_and_steps_and_the_newest_is_followed() -> None:
    answers = AnswerTable.of(samples(), Chosen())
    back = AnswerTable.of(samples(), answers.to_step(answers.step_index - 1))
    assert back.sample is not None and back.sample.step == 12_000
    other = AnswerTable.of(samples(), back.to_prompt(1))
    assert other.sample is not None
    assert (other.sample.prompt, other.sample.step) == ("Why is the sky blue?", 12_000)
    newest = other.to_step(10**6)
    assert newest.sample is None, "what comes next is shown"
    assert AnswerTable.of(samples(), other.to_prompt(-5)).prompt_index == 0


def test_answers_given_twice_are_shown_once_and_hostile_text_stays_text() -> None:
    once = samples()
    answer = "\x1b[2J\tx\u202ey" + "w" * 5000
    hostile = [msgspec.structs.replace(once[-3], answer=answer, loss=math.nan, at=NOW)]
    answers = AnswerTable.of((*once, *once, *hostile), Chosen())
    assert len(answers.row) == 4
    for glyphs in (UNICODE, ASCII):
        for columns, rows in ((60, 10), (80, 20), (200, 50)):
            lines = shown(answers, columns, rows, glyphs)
            assert not any("\x1b" in line or "\t" in line for line in lines)


@at_columns(80, 120)
async def test_samples_screen(pictures: Pictures, columns: int) -> None:
    source = source_of(4)
    source.known_samples = samples()
    await pictures.compare(app_of(source), columns, "6")


async def test_without_samples_the_screen_says_how_to_get_some(pictures: Pictures) -> None:
    await pictures.compare(app_of(source_of(4)), 80, "6")


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


def text_of(app: Any) -> str:
    screen = app.screen
    return "\n".join(plain(line) for line in screen.lines(120, 38)) if hasattr(screen, "lines") else ""
