"""The model's answer to one prompt."""

from collections.abc import Callable
from typing import NamedTuple

from trainctl.protocol.config.prompts import Prompt
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.base import Backend, Decoding
from trainctl.trainer.data.row_tokens import RowTokenizer
from trainctl.trainer.data.rows import Conversation


class Answered(NamedTuple):
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
        made = self._backend.generate(tokens, how, ends, alive)
        ended = bool(made) and made[-1] in ends
        return Answered(self._tokenizer.text(made[:-1] if ended else made), len(made), ended)
