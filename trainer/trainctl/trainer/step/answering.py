"""The model's answer to one prompt."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainctl.protocol.config.prompts import Prompt
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import AnswerOptions, Sampling
from trainctl.trainer.backends.base import Backend, Decoding
from trainctl.trainer.common.model_files import generation_config, model_config
from trainctl.trainer.data.row_tokens import RowTokenizer
from trainctl.trainer.data.rows import Conversation


class Answered(NamedTuple):
    """An answer as text."""

    text: str
    tokens: int  # that were generated, with the one that ended the answer
    ended: bool  # whether the model ended it


NOT_APPLIED = (
    "stop_strings", "max_time", "penalty_alpha", "num_beam_groups", "diversity_penalty", "force_words_ids",
    "constraints", "dola_layers", "prompt_lookup_num_tokens", "assistant_early_exit", "watermarking_config",
    "custom_generate",
)  # fmt: skip
"""Settings of generation_config.json for which transformers needs code or another model, or that a clock decides."""


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
        return how._replace(settings=settings)

    def answer(self, prompt: Prompt | Conversation, how: Decoding, alive: Callable[[], None]) -> Answered:
        """`alive` is called after each token. Raises InvalidInputError for a prompt that the model can't take, and what
        `alive` and the libraries raise."""
        tokens, ends = self._tokenizer.prompt(prompt, plain=self._plain), self._tokenizer.ends
        if self._longest is not None:
            encodes = self._tokenizer.encodes_prompts  # the answer is then in another sequence
            if len(tokens) + (0 if encodes else 1) > self._longest:
                raise InvalidInputError("prompt", f"has {len(tokens)} tokens; the model's context has {self._longest}")
            used = 0 if encodes else len(tokens)
            how = how._replace(max_tokens=min(how.max_tokens, self._longest - used))
        how = how._replace(decoder_start=self._tokenizer.decoder_start)
        made = self._backend.generate(tokens, how, ends, alive)
        ended = bool(made) and made[-1] in ends
        return Answered(self._tokenizer.text(made[:-1] if ended else made), len(made), ended)
