"""The model's answers to prompts, and the texts of held-out pairs, for people to read."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from trainctl.protocol.config.run_tables import Prompt, RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import Answer, AnswerOptions, EvaluatedPair, Sampling, StepPlan
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.passes import Decoding
from trainctl.trainer.common.model_files import generation_config, longest_context, model_config
from trainctl.trainer.data.growing_dataset import TrainingData
from trainctl.trainer.data.row_tokens import RowTokenizer, row_tokenizer
from trainctl.trainer.data.rows import Conversation
from trainctl.trainer.step.progress import Progress

PROMPT_BYTES, ANSWER_BYTES = 1000, 4000
"""Most bytes of a prompt and of an answer in a report; what is longer is cut."""
SAMPLE_FAILURES = (
    TrainctlError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    MemoryError,
)
"""Errors of tokenizers and array libraries, which cost the answers and not the run."""
PAIR_PROMPT_BYTES, PAIR_ANSWER_BYTES = 160, 240
"""Most bytes of a prompt and of an answer of a held-out pair."""
NOT_APPLIED = (
    "stop_strings",
    "max_time",
    "penalty_alpha",
    "num_beam_groups",
    "diversity_penalty",
    "force_words_ids",
    "constraints",
    "dola_layers",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "watermarking_config",
    "custom_generate",
)
"""Settings of generation_config.json for which transformers needs code or another model, or that a clock decides."""


@dataclass(frozen=True)
class Answered:
    """An answer as text."""

    text: str
    tokens: int  # that were generated, with the one that ended the answer
    ended: bool  # whether the model ended it


class Answerer:
    """A model with its tokenizer."""

    def __init__(self, backend: Backend, tokenizer: RowTokenizer, longest: int | None, *, plain: bool) -> None:
        """`longest`: tokens that the model allows, None: any number. `plain`: texts are tokenized as for
        `kind = "text"`, else as for rows."""
        self._backend, self._tokenizer, self._longest, self._plain = backend, tokenizer, longest, plain

    def decoding(self, asked: Sampling | AnswerOptions, model: Path) -> Decoding:
        """Return how tokens are chosen, with the settings of the folder `model` if they are asked for. Raises
        InvalidInputError if the backend can't apply them."""
        how = Decoding(asked.max_tokens, asked.temperature, asked.top_p, asked.seed)
        if not asked.use_generation_config:
            return how
        if self._backend.name != "torch":
            problem = "MLX doesn't apply generation_config.json: leave this out, or have a node with torch answer"
            raise InvalidInputError("use_generation_config", problem)
        settings = generation_config(model) or model_config(model)  # which has them in folders of old versions
        if refused := next((name for name in NOT_APPLIED if settings.get(name)), None):
            problem = f"has {refused}, which can't be applied: remove it, or leave out use_generation_config"
            raise InvalidInputError(str(model / "generation_config.json"), problem)
        return replace(how, settings=settings)

    def answer(self, prompt: Prompt | Conversation, how: Decoding, alive: Callable[[], None]) -> Answered:
        """Return the model's answer; `alive` is called after each token. Raises InvalidInputError for a prompt that the
        model can't take, and what `alive` and the libraries raise."""
        tokens, ends = self._tokenizer.prompt(prompt, plain=self._plain), self._tokenizer.ends
        if self._longest is not None:
            encodes = self._tokenizer.encodes_prompts  # the answer is then in another sequence
            if len(tokens) + (0 if encodes else 1) > self._longest:
                raise InvalidInputError("prompt", f"has {len(tokens)} tokens; the model's context has {self._longest}")
            used = 0 if encodes else len(tokens)
            how = replace(how, max_tokens=min(how.max_tokens, self._longest - used))
        how = replace(how, decoder_start=self._tokenizer.decoder_start)
        generated = self._backend.generate(tokens, how, ends, alive)
        ended = bool(generated) and generated[-1] in ends
        return Answered(self._tokenizer.text(generated[:-1] if ended else generated), len(generated), ended)


class Sampler:
    """Has the model answer what a plan asks. It changes nothing that training reads."""

    def __init__(self, config: RunFile, backend: Backend, progress: Progress, status: StatusWriter) -> None:
        self._config, self._backend, self._progress, self._status = config, backend, progress, status

    def answers(self, plan: StepPlan) -> tuple[Answer, ...]:
        """Return an answer for each prompt. Raises AbandonedError if fenced meanwhile, and SAMPLE_FAILURES."""
        assert plan.sampling is not None, "a sample plan says what it asks"

        def alive() -> None:
            self._progress.check(plan.generation)
            self._status.show("sample")  # once more for each token, as a sign of life

        alive()
        how = self._answerer.decoding(plan.sampling, Path(self._config.model.path))
        return tuple(self._answer(prompt, how, alive) for prompt in plan.sampling.prompts)

    def _answer(self, prompt: Prompt, how: Decoding, alive: Callable[[], None]) -> Answer:
        begun = time.perf_counter()
        answered = self._answerer.answer(prompt, how, alive)
        seconds = time.perf_counter() - begun
        shown, text = cut(_shown(prompt), PROMPT_BYTES), cut(answered.text, ANSWER_BYTES)
        return Answer(shown, text, answered.tokens, answered.ended, seconds)

    @functools.cached_property
    def _answerer(self) -> Answerer:
        model, data = Path(self._config.model.path), self._config.data
        tokenizer = row_tokenizer(model, data.tokenizer, "run file")
        return Answerer(self._backend, tokenizer, longest_context(model), plain=data.kind == "text")


def _shown(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1].content


def cut(text: str, size: int) -> str:
    """Return at most so many bytes of UTF-8."""
    encoded = text.encode("utf-8", "replace")
    return encoded[:size].decode("utf-8", "ignore") if len(encoded) > size else encoded.decode()


class PairTexts:
    """The texts of held-out pairs of a run's data."""

    def __init__(self, config: RunFile, data: TrainingData) -> None:
        self._config, self._data = config, data

    def described(self, pair: EvaluatedPair) -> EvaluatedPair:
        """Return the pair with its texts, cut. Raises what tokenizers do."""
        (prompt, chosen), (_, rejected) = self._halves(pair.index)
        return msgspec.structs.replace(
            pair,
            prompt=_end(prompt, PAIR_PROMPT_BYTES),
            chosen_text=cut(chosen, PAIR_ANSWER_BYTES),
            rejected_text=cut(rejected, PAIR_ANSWER_BYTES),
        )

    @functools.cached_property
    def _tokenizer(self) -> RowTokenizer:
        return row_tokenizer(Path(self._config.model.path), self._config.data.tokenizer, "run file")

    def _halves(self, index: int) -> list[tuple[str, str]]:
        """Return prompt and answer of both rows: what comes before the first target that counts, and all from there
        on."""
        batch, halves = self._data.held_out_batch(np.array([index])), []
        for inputs, targets, counted, length in zip(
            batch.inputs, batch.targets, batch.counted, batch.lengths, strict=True
        ):
            tokens = [int(inputs[0]), *targets[:length].tolist()]
            first = int(np.argmax(counted > 0)) + 1
            halves.append((self._tokenizer.text(tokens[:first]), self._tokenizer.text(tokens[first:])))
        return halves


def _end(text: str, size: int) -> str:
    """Return at most so many bytes of UTF-8, the last ones."""
    encoded = text.encode("utf-8", "replace")
    return encoded[-size:].decode("utf-8", "ignore")
