"""The model's answers to prompts, between two steps of training."""

import functools
import time
from collections.abc import Callable
from pathlib import Path

from trainctl.protocol.config.prompts import Prompt
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import Answer, StepPlan
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.base import Backend, Decoding
from trainctl.trainer.common.model_files import longest_context
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.trainer.step.answering import Answerer
from trainctl.trainer.step.progress import Progress

PROMPT_BYTES, ANSWER_BYTES = 1000, 4000
"""Most bytes of a prompt and of an answer in a report; what is longer is cut."""
SAMPLE_FAILURES = (
    TrainctlError, OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, MemoryError,
)  # fmt: skip
"""Errors of tokenizers and array libraries, which cost the answers and not the run."""


class Sampler:
    """Has the model answer what a plan asks. It changes nothing that training reads."""

    def __init__(self, config: RunFile, backend: Backend, progress: Progress, status: StatusWriter) -> None:
        self._config, self._backend, self._progress, self._status = config, backend, progress, status

    def answers(self, plan: StepPlan) -> tuple[Answer, ...]:
        """One for each prompt. Raises AbandonedError if fenced meanwhile, and SAMPLE_FAILURES."""
        assert plan.sampling is not None, "a sample plan says what it asks"

        def alive() -> None:
            self._progress.check(plan.generation)
            self._status.show("sample")  # once more for each token, as a sign of life

        alive()
        how = self._answerer.decoding(plan.sampling, Path(self._config.model.path))
        return tuple(self._answer(prompt, how, alive) for prompt in plan.sampling.prompts)

    def _answer(self, prompt: Prompt, how: Decoding, alive: Callable[[], None]) -> Answer:
        begun = time.perf_counter()
        made = self._answerer.answer(prompt, how, alive)
        seconds = time.perf_counter() - begun
        shown, text = cut(_shown(prompt), PROMPT_BYTES), cut(made.text, ANSWER_BYTES)
        return Answer(shown, text, made.tokens, made.ended, seconds)

    @functools.cached_property
    def _answerer(self) -> Answerer:
        model, data = Path(self._config.model.path), self._config.data
        tokenizer = row_tokenizer(model, data.tokenizer, "run file")
        return Answerer(self._backend, tokenizer, longest_context(model), plain=data.kind == "text")


def _shown(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1].content


def cut(text: str, size: int) -> str:
    """At most so many bytes of UTF-8."""
    encoded = text.encode("utf-8", "replace")
    return encoded[:size].decode("utf-8", "ignore") if len(encoded) > size else encoded.decode()
