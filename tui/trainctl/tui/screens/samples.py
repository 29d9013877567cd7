"""What the model answers to prompts, over the steps."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.tui.dialogs import clipboard
from trainctl.tui.screens import samples_view
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.screens.samples_view import AnswerTable, Chosen
from trainctl.tui.text.styled_line import Line, rule

SAMPLES_PAGE = 100


class SamplesScreen(BaseScreen):
    """The answers to one prompt side by side; prompt and step are chosen with the arrow keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "prompt(1)", "next prompt", show=False),
        Binding("up,k", "prompt(-1)", "previous prompt", show=False),
        Binding("right", "step(1)", "next step", show=False),
        Binding("left", "step(-1)", "previous step", show=False),
        Binding("home", "step(-1000000)", "oldest", show=False),
        Binding("end", "step(1000000)", "newest", show=False),
        Binding("pagedown", "scroll_answer(1)", "scroll down", show=False),
        Binding("pageup", "scroll_answer(-1)", "scroll up", show=False),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._recorded: tuple[m.Sample, ...] = ()
        self._chosen = Chosen()

    @property
    def answers(self) -> AnswerTable:
        """Those of the run shown: from its record, and what came since."""
        state = self.owner.shown
        run = state.run.run if state.run is not None else ""
        return AnswerTable.of((one for one in (*self._recorded, *state.samples) if one.run == run), self._chosen)

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
            self._recorded = (await client.samples(run.run, limit=SAMPLES_PAGE, newest=True)).samples
        except TrainctlError as error:
            self.app.notify(str(error), severity="error", markup=False)
        self.paint()

    def lines(self, columns: int, rows: int) -> list[Line]:
        answers, glyphs = self.answers, self.owner.glyphs
        title = samples_view.title(answers, glyphs)
        body = samples_view.body(answers, columns, rows - 2, glyphs)
        return [self.head(columns), rule(columns, glyphs.horizontal, (0, title, "title")), *body]

    def values(self) -> clipboard.Values:
        sample = self.answers.sample
        found = (("the answer", sample.answer), ("the prompt", sample.prompt)) if sample is not None else ()
        return (*found, *super().values())

    def _choose(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self.paint()

    def action_prompt(self, by: int) -> None:
        answers = self.answers
        self._choose(answers.to_prompt(answers.prompt_index + by))

    def action_step(self, by: int) -> None:
        answers = self.answers
        self._choose(answers.to_step(answers.step_index + by))

    def action_choose_prompt(self, index: int) -> None:
        """A click on a prompt."""
        self._choose(self.answers.to_prompt(index))

    def action_choose_step(self, index: int) -> None:
        """A click on an answer."""
        self._choose(self.answers.to_step(index))

    def action_scroll_answer(self, pages: int) -> None:
        """The pane below by most of its rows."""
        sample = self.answers.sample
        if sample is not None:
            count = len(samples_view.answer_rows(sample, self.size.width - 2, self.owner.glyphs))
            by = pages * max(self.size.height // 3, 1)
            self._choose(Chosen(self._chosen.prompt, self._chosen.sample, min(max(self._chosen.scroll + by, 0), count)))
