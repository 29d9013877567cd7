"""The model's answers to prompts, over the steps; of a run on pairs, what it makes of those held out."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.config.objectives import PAIRS
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import HeldOutPairs, PairsRequest, Sample, SamplesRequest
from trainctl.tui.commands.context import Values
from trainctl.tui.screens import pairs_view, samples_view
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.screens.pairs_view import ChosenPair, PairTable
from trainctl.tui.screens.samples_view import AnswerTable, Chosen
from trainctl.tui.text.styled_line import Line, rule

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
            title, body = samples_view.title(answers), samples_view.body(answers, columns, rows - 2)
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
            count = len(samples_view.answer_rows(sample, self.size.width - 2))
            by = pages * max(self.size.height // 3, 1)
            self._choose(Chosen(self._chosen.prompt, self._chosen.sample, min(max(self._chosen.scroll + by, 0), count)))
