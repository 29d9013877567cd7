"""The model's answers to prompts, side by side over the steps; of a run on pairs, what it makes of those held out."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.config.objectives import PAIRS
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import HeldOutPairs, PairsRequest, Sample, SamplesRequest
from trainctl.tui.commands.context import Values
from trainctl.tui.screens import pairs_view
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.screens.pairs_view import ChosenPair, PairTable
from trainctl.tui.text.formatting import loss, seconds
from trainctl.tui.text.styled_line import Line, Piece, clean, filled, fit, line, one_line, rule, shorten, wrap_lines

_COLUMN_CELLS = 27
"""Cells of an answer's column at least, with the gap before it."""
_NO_SAMPLES = (
    ("no samples yet", "strong"),
    ("", "text"),
    ("i has the model answer a prompt now.", "text"),
    ("For answers at regular steps, add prompts to the run file:", "text"),
    ("", "text"),
    ("[samples]", "dim"),
    ('prompts = ["Once upon a time"]', "dim"),
    ("every_steps = 500", "dim"),
)


@dataclass(frozen=True)
class Chosen:
    """The choice that is looked at."""

    prompt: str | None = None  # None: the first
    sample: tuple[float, int] | None = None  # time and number of an answer; None: the newest
    scroll: int = 0  # rows of the answer above the pane


@dataclass(frozen=True)
class AnswerTable:
    """A run's answers, each once, by prompt in the order in which prompts were first asked."""

    by_prompt: dict[str, list[Sample]]  # by time
    chosen: Chosen

    @classmethod
    def of(cls, samples: Iterable[Sample], chosen: Chosen) -> "AnswerTable":
        """Return the table of these answers, some of which may be there twice."""
        known = {key(sample): sample for sample in samples}
        by_prompt: dict[str, list[Sample]] = {}
        for one in sorted(known.values(), key=key):
            by_prompt.setdefault(one.prompt, []).append(one)
        return cls(by_prompt, chosen)

    @property
    def prompt_index(self) -> int:
        prompts = list(self.by_prompt)
        return prompts.index(self.chosen.prompt) if self.chosen.prompt in prompts else 0

    @property
    def row(self) -> list[Sample]:
        """Return the answers to the chosen prompt."""
        rows = list(self.by_prompt.values())
        return rows[self.prompt_index] if rows else []

    @property
    def step_index(self) -> int:
        """Return the place of the chosen answer: of another prompt's the one of its step or before."""
        row = self.row
        at = self.chosen.sample
        if at is None:
            return len(row) - 1
        return max((place for place, one in enumerate(row) if one.at <= at[0]), default=0)

    @property
    def sample(self) -> Sample | None:
        return self.row[self.step_index] if self.row else None

    def to_prompt(self, index: int) -> Chosen:
        prompts = list(self.by_prompt)
        if not prompts:
            return self.chosen
        return replace(self.chosen, prompt=prompts[min(max(index, 0), len(prompts) - 1)], scroll=0)

    def to_step(self, index: int) -> Chosen:
        """Choose another; the newest is followed."""
        row = self.row
        at = min(max(index, 0), len(row) - 1)
        sample = key(row[at]) if row and at < len(row) - 1 else None
        return replace(self.chosen, sample=sample, scroll=0)


def key(sample: Sample) -> tuple[float, int]:
    """Return what tells an answer from others."""
    return sample.at, sample.number


def answers_body(answers: AnswerTable, columns: int, rows: int) -> list[Line]:
    """Return exactly `rows` lines."""
    if not answers.by_prompt:
        lines = [line(Piece(text, role)) for text, role in _NO_SAMPLES]
    else:
        above = max(4, rows * 3 // 5)
        lines = _side_by_side(answers, columns, above) + _in_full(answers, columns, rows - above)
    return filled(lines, columns, rows)


def answers_title(answers: AnswerTable) -> str:
    """Return the title of the rule above."""
    count, steps = len(answers.by_prompt), len({one.at for row in answers.by_prompt.values() for one in row})
    counted = f": {_counted(count, 'prompt')}, answered {_counted(steps, 'time')}" if count else ""
    return f"─ samples{counted} "


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _side_by_side(answers: AnswerTable, columns: int, rows: int) -> list[Line]:
    left = min(max(columns // 5, 16), 34)
    count = max((columns - left) // _COLUMN_CELLS, 1)
    cells = (columns - left) // count
    last = max(answers.step_index + 1, min(count, len(answers.row)))
    shown = answers.row[max(0, last - count) : last]
    prompts = [_prompt_lines(answers, left - 3, rows)]
    cut = [_column(answers, one, cells - 2, rows) for one in shown]
    widths = [left, *[cells] * len(cut)]
    return [
        tuple(piece for cell, size in zip(row, widths, strict=True) for piece in fit(cell, size))
        for row in zip_longest(*prompts, *cut, fillvalue=())
    ]


def _prompt_lines(answers: AnswerTable, cells: int, rows: int) -> list[Line]:
    prompts, at = list(answers.by_prompt), answers.prompt_index
    start = min(max(at - (rows - 1) + 1, 0), max(len(prompts) - (rows - 1), 0))
    lines = [line(Piece("  PROMPT", "label"))]
    for index, prompt in enumerate(prompts[start : start + rows - 1], start):
        role = "cursor" if index == at else "text"
        text = shorten(one_line(prompt), cells)
        mark = Piece("▸" if index == at else " ", "key")
        lines.append(line(mark, Piece(" "), Piece(text, role, f"screen.choose_prompt({index})")))
    return lines


def _column(answers: AnswerTable, sample: Sample, cells: int, rows: int) -> list[Line]:
    chosen = answers.sample is not None and key(sample) == key(answers.sample)
    action = f"screen.choose_step({answers.row.index(sample)})"
    head = f"@{sample.step:,} loss {loss(sample.loss)}"
    lines = [line(Piece(shorten(head, cells), "cursor" if chosen else "label", action))]
    texts = answer_rows(sample, cells)
    if len(texts) > rows - 1:
        texts = [*texts[: rows - 2], shorten(f"{texts[rows - 2]} …", cells)]
    return [*lines, *(line(Piece(text, "text" if chosen else "dim", action)) for text in texts)]


def _in_full(answers: AnswerTable, columns: int, rows: int) -> list[Line]:
    sample = answers.sample
    assert sample is not None
    texts = answer_rows(sample, columns - 2)
    start = min(answers.chosen.scroll, max(len(texts) - (rows - 1), 0))
    label = shorten(f"─ {said(sample)} ", columns)
    more = len(texts) - start - (rows - 1)
    tail = f" {more:,} more {'rows' if more != 1 else 'row'}: pagedown " if more > 0 else ""
    place = columns - len(tail)
    labels = [(0, label, "title"), *([(place, tail, "dim")] if tail and place > len(label) else [])]
    return [
        rule(columns, *labels),
        *(line(Piece(f"  {text}")) for text in texts[start : start + rows - 1]),
    ]


def said(sample: Sample) -> str:
    """Return `@1,500 loss 2.310 eval 2.402 57 tokens in 1.20 s on studio by auto`."""
    evaluated = f"  eval {loss(sample.eval_loss)}" if sample.eval_loss is not None else ""
    how = f"  temperature {sample.temperature:g}" if sample.temperature else ""
    cut = "" if sample.ended else ", cut"
    made = f"{_counted(sample.tokens, 'token')} in {seconds(sample.seconds)}{cut}"
    who = clean(f"{sample.node} {sample.by}")
    return f"@{sample.step:,}  loss {loss(sample.loss)}{evaluated}{how}  {made}  {who}"


def answer_rows(sample: Sample, cells: int) -> list[str]:
    """Return the answer as it is, its own lines kept."""
    return wrap_lines(sample.answer, max(cells, 1))


SAMPLES_PAGE = 100


class SamplesScreen(BaseScreen):
    """The answers to one prompt side by side, or held-out pairs with their margins; prompt or pair, and step, are
    chosen with the arrow keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "prompt(1)", "next prompt", show=False),
        Binding("up,k", "prompt(-1)", "previous prompt", show=False),
        Binding("right", "step(1)", "next step", show=False),
        Binding("left", "step(-1)", "previous step", show=False),
        Binding("home", "step(-1000000)", "oldest", show=False),
        Binding("end", "step(1000000)", "newest", show=False),
        Binding("pagedown", "scroll_answer(1)", "scroll down", show=False),
        Binding("pageup", "scroll_answer(-1)", "scroll up", show=False),
        Binding("m", "switch", "answers, or held-out pairs", show=False),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._recorded: tuple[Sample, ...] = ()
        self._chosen = Chosen()
        self._pairs: tuple[HeldOutPairs, ...] = ()
        self._chosen_pair = ChosenPair()
        self._of_evaluation: tuple[str, int | None] | None = None  # run and step that pairs were loaded for
        self._wants_answers = False

    @property
    def shows_pairs(self) -> bool:
        """Return whether the run is on pairs, and the answers to prompts aren't wanted."""
        run = self.owner.shown.run
        return run is not None and run.sample_unit == PAIRS and not self._wants_answers

    @property
    def pairs(self) -> PairTable:
        return PairTable.of(self._pairs, self._chosen_pair)

    @property
    def answers(self) -> AnswerTable:
        """Return the answers of the run shown: from its record, and what came since."""
        state = self.owner.shown
        run = state.run.run if state.run is not None else ""
        return AnswerTable.of((one for one in (*self._recorded, *state.samples) if one.run == run), self._chosen)

    @property
    def table(self) -> AnswerTable | PairTable:
        return self.pairs if self.shows_pairs else self.answers

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.arrived()

    def arrived(self) -> None:
        self.run_worker(self._load(), group="samples", exclusive=True)

    async def _load(self) -> None:
        client, run = self.owner.client, self.owner.shown.run
        if client is None or run is None:
            return
        try:
            self._recorded = (await client.lead.ask(SamplesRequest, run.run, limit=SAMPLES_PAGE, newest=True)).samples
            if run.sample_unit == PAIRS:
                self._of_evaluation = (run.run, run.eval_step)
                self._pairs = (await client.lead.ask(PairsRequest, run.run)).evaluations
        except TrainctlError as error:
            self.app.notify(str(error), severity="error", markup=False)
        self.paint()

    def paint(self) -> None:
        """Draw the present state, and ask again after another evaluation."""
        super().paint()
        run = self.owner.shown.run
        if self.shows_pairs and run is not None and self._of_evaluation not in (None, (run.run, run.eval_step)):
            self._of_evaluation = (run.run, run.eval_step)
            self.arrived()

    def lines(self, columns: int, rows: int) -> list[Line]:
        if self.shows_pairs:
            title, body = pairs_view.title(self.pairs), pairs_view.body(self.pairs, columns, rows - 2)
        else:
            answers = self.answers
            title, body = answers_title(answers), answers_body(answers, columns, rows - 2)
        return [self.head(columns), rule(columns, (0, title, "title")), *body]

    def values(self) -> Values:
        texts: Values = ()
        if self.shows_pairs and self.pairs.rows:
            pair = self.pairs.rows[self.pairs.prompt_index]
            rejected = ("the rejected answer", pair.rejected_text)
            texts = ("the prompt", pair.prompt), ("the chosen answer", pair.chosen_text), rejected
        elif not self.shows_pairs and (sample := self.answers.sample) is not None:
            texts = ("the answer", sample.answer), ("the prompt", sample.prompt)
        return (*texts, *super().values())

    def _choose(self, chosen: Chosen | ChosenPair) -> None:
        if isinstance(chosen, ChosenPair):
            self._chosen_pair = chosen
        else:
            self._chosen = chosen
        self.paint()

    def action_switch(self) -> None:
        self._wants_answers = not self._wants_answers
        self.paint()

    def action_prompt(self, by: int) -> None:
        self._choose(self.table.to_prompt(self.table.prompt_index + by))

    def action_step(self, by: int) -> None:
        self._choose(self.table.to_step(self.table.step_index + by))

    def action_choose_prompt(self, index: int) -> None:
        """Choose a prompt or a pair that was clicked."""
        self._choose(self.table.to_prompt(index))

    def action_choose_step(self, index: int) -> None:
        """Choose an answer or an evaluation that was clicked."""
        self._choose(self.table.to_step(index))

    def action_scroll_answer(self, pages: int) -> None:
        """Scroll the pane below by most of its rows."""
        sample = self.answers.sample
        if sample is not None:
            count = len(answer_rows(sample, self.size.width - 2))
            by = pages * max(self.size.height // 3, 1)
            self._choose(Chosen(self._chosen.prompt, self._chosen.sample, min(max(self._chosen.scroll + by, 0), count)))
