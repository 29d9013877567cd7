"""Rows to tokens and masks, by the tokenizer and the chat template of the model's directory.

A text and a completion end with the end token. A completion counts from the first token in which it differs from its
prompt alone, as in TRL. In a conversation the assistant's turns count, as `chat_spans` finds them or, if the template
has `{% generation %}`, as it marks them.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainctl.protocol.config.prompts import Prompt
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.common import model_files
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.model_files import decoder_start, vocabulary_size
from trainctl.trainer.common.without_torch import import_without_torch
from trainctl.trainer.data.byte_tokens import BYTES_BEGIN, ByteTokenizer
from trainctl.trainer.data.chat_dates import dated
from trainctl.trainer.data.chat_spans import NotNestedError, Render, Span, assistant_spans, common_length
from trainctl.trainer.data.rows import Completion, Conversation, Message, Row, Text, tool_names

TokenRow = tuple[list[int], list[bool]]
"""Tokens, and whether each counts as a target."""
_BATCH_ROWS = 256
"""Rows that one call tokenizes: the library spreads them over its threads."""


def row_tokenizer(model: Path, kind: Literal["bytes", "model"], where: str) -> "RowTokenizer":
    """The tokenizer of a model directory, or that of bytes. Raises InvalidInputError, blaming a field of `where`, if
    there is none that can be read."""
    if kind == "bytes":
        return RowTokenizer(ByteTokenizer(), model)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        problem = f"rows need transformers; {installing('torch', 'mlx')}"
        raise InvalidInputError(f"{where}: data.kind", problem) from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        problem = f"cannot read the tokenizer in {model}: {first_line(error)}"
        raise InvalidInputError(f"{where}: data.tokenizer", problem) from None
    if not tokenizer.is_fast:
        raise InvalidInputError(f"{where}: data.tokenizer", f"{model} has no tokenizer.json")
    is_model = (model / "config.json").is_file()
    vocabulary, start = (vocabulary_size(model), decoder_start(model)) if is_model else (None, None)
    return RowTokenizer(tokenizer, model, vocabulary, start)


def import_tokenizers(kind: Literal["bytes", "model"]) -> None:
    """Import what `row_tokenizer` needs, in a process that has no use for torch. If it isn't installed, `row_tokenizer`
    raises the error."""
    if kind == "model":
        with contextlib.suppress(ImportError):
            import_without_torch("transformers")


class RowTokenizer:
    """A tokenizer of transformers, or of bytes, with the directory that it is from."""

    def __init__(
        self, tokenizer: Any, model: Path, vocabulary: int | None = None, decoder_start: int | None = None
    ) -> None:
        """`vocabulary`: how many ids the model knows, None: any number. `decoder_start`: the token that the decoder of
        an encoder-decoder model begins with, None: the model has no encoder."""
        self._tokenizer, self._model, self._vocabulary = tokenizer, model, vocabulary
        self._decoder_start = decoder_start

    @property
    def encodes_prompts(self) -> bool:
        """Whether its model has an encoder for prompts."""
        return self._decoder_start is not None

    @property
    def highest(self) -> int:
        """The highest id that it gives, added tokens left out: many a tokenizer has some that its model lacks."""
        ids = {int(number) for number in self._tokenizer.get_vocab().values()}
        return max(ids - {*getattr(self._tokenizer, "added_tokens_decoder", ())}, default=0)

    @property
    def has_end(self) -> bool:
        """Whether it has a token that ends texts and completions."""
        return self._tokenizer.eos_token_id is not None

    @property
    def prompt_end(self) -> int:
        """How many special tokens it puts after a prompt for an encoder."""
        if not self.encodes_prompts:
            return 0
        whole, plain = self._ids(["a"])[0], [*self._tokenizer(["a"], add_special_tokens=False)["input_ids"][0]]
        return len(whole) - len(added_before(whole, plain)) - len(plain)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer: those that the model's directory names, and the tokenizer's own."""
        named = () if isinstance(self._tokenizer, ByteTokenizer) else model_files.end_tokens(self._model)
        own = self._tokenizer.eos_token_id
        return frozenset(named if own is None else (*named, own))

    def prompt(self, prompt: Prompt | Conversation, *, plain: bool) -> list[int]:
        """The tokens before an answer, as training has them: `plain`, with the special tokens that a text begins with
        only. Raises InvalidInputError."""
        tokens = self._prompt(prompt, plain=plain)
        check_ids(tokens, self._vocabulary, "prompt")
        return tokens

    def _prompt(self, prompt: Prompt | Conversation, *, plain: bool) -> list[int]:
        if not isinstance(prompt, str):
            if not isinstance(prompt, Conversation):
                prompt = Conversation("prompt", [msgspec.to_builtins(message) for message in prompt])
            return self._opened(prompt)
        tokens = self._plain(prompt) if plain else self._ids([prompt])[0]
        if not tokens:
            raise InvalidInputError("prompt", f"{prompt!r} has no tokens")
        if self.encodes_prompts:
            return tokens
        return tokens[:-1] if tokens[1:] and tokens[-1] == self._tokenizer.eos_token_id else tokens

    def _plain(self, text: str) -> list[int]:
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._ids([text])[0]
        plain = [*self._tokenizer([text], add_special_tokens=False)["input_ids"][0]]
        begin = added_before(self._ids([text])[0], plain)
        return plain if plain[: len(begin)] == begin else [*begin, *plain]

    def _opened(self, row: Conversation) -> list[int]:
        """A conversation up to where the assistant's turn begins."""
        self._check_template(row)
        return [*self._applied(row, row.messages, return_dict=True, add_generation_prompt=True)["input_ids"]]

    def render(self, row: Conversation) -> Render:
        """The chat template, for messages with the row's tools. What it returns raises InvalidInputError."""

        def rendered(messages: Sequence[Message], prompted: bool) -> str:
            text: str = self._applied(row, [*messages], tokenize=False, add_generation_prompt=prompted)
            return text

        return rendered

    def writes_date(self, row: Conversation) -> bool:
        """Whether the chat template writes the day's date."""
        template = self._check_template(row)
        return dated(template) != template

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as a person reads them, without special ones."""
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._tokenizer.decode([token for token in tokens if token < BYTES_BEGIN])
        return str(self._tokenizer.decode([*tokens], skip_special_tokens=True))

    def pieces(self, tokens: Sequence[int], flags: Sequence[bool]) -> Iterator[tuple[str, bool]]:
        """Tokens as text, each with its flag. Tokens that hold parts of a character are put together."""
        begun: list[int] = []
        for number, (token, flag) in enumerate(zip(tokens, flags, strict=True)):
            begun.append(token)
            text = str(self._tokenizer.decode(begun))
            if not text.endswith("\ufffd") or number + 1 == len(tokens) or flags[number + 1] != flag:
                yield text, flag
                begun = []

    def encode(self, rows: Iterable[Row]) -> Iterator[TokenRow]:
        """Each row's tokens and mask. Raises InvalidInputError naming the row's place."""
        remaining = iter(rows)
        while batch := list(islice(remaining, _BATCH_ROWS)):
            made = self._batch(batch)
            for row, (tokens, _) in zip(batch, made, strict=True):
                check_ids(tokens, self._vocabulary, row.place)
            yield from made

    def encode_apart(self, rows: Iterable[Row]) -> Iterator[TokenRow]:
        """Of each row the prompt for the encoder, with a token after it that is never read, and the completion after
        the token that the decoder begins with. Raises InvalidInputError naming the row's place."""
        assert self._decoder_start is not None, "an encoder-decoder model"
        remaining = iter(rows)
        while batch := list(islice(remaining, _BATCH_ROWS)):
            pairs = [_apart(row) for row in batch]
            prompts, completions = (self._ids([pair[half] for pair in pairs]) for half in (0, 1))
            for row, prompt, completion in zip(batch, prompts, completions, strict=True):
                check_ids([*prompt, *completion], self._vocabulary, row.place)
                if not prompt:
                    raise InvalidInputError(f"{row.place}: prompt", "has no tokens for the encoder")
                yield [*prompt, prompt[-1]], [False] * (len(prompt) + 1)
                ended = self._ended(completion)
                yield [self._decoder_start, *ended], [False, *([True] * len(ended))]

    def _batch(self, rows: Sequence[Row]) -> list[TokenRow]:
        made: dict[int, TokenRow] = {}
        texts = [
            row.text if isinstance(row, Text) else _whole(row) for row in rows if not isinstance(row, Conversation)
        ]
        prompts = [row.prompt for row in rows if isinstance(row, Completion)]
        whole, before = iter(self._ids(texts)), iter(self._ids(prompts))
        for place, row in enumerate(rows):
            match row:
                case Text():
                    tokens = self._ended(next(whole))
                    made[place] = tokens, [True] * len(tokens)
                case Completion():
                    tokens = self._ended(next(whole))
                    start = common_length(next(before), tokens)
                    made[place] = tokens, [number >= start for number in range(len(tokens))]
                case Conversation():
                    pass  # all of them at once, below
        talks = {place: row for place, row in enumerate(rows) if isinstance(row, Conversation)}
        made |= dict(zip(talks, self._conversations([*talks.values()]), strict=True))
        return [made[place] for place in range(len(rows))]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer([*texts])["input_ids"] if texts else []

    def _ended(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]

    def _conversations(self, rows: Sequence[Conversation]) -> list[TokenRow]:
        if not rows:
            return []
        for row in rows:
            self._check_tools(row)
        template = self._check_template(rows[0])
        if "{% generation" in template or "{%- generation" in template:
            return [self._marked(row) for row in rows]
        found = [self._spans(row) for row in rows]
        encoded = self._tokenizer([text for text, _ in found], add_special_tokens=False, return_offsets_mapping=True)
        return [
            (tokens, [_is_in(offset, spans) for offset in offsets])
            for tokens, offsets, (_, spans) in zip(
                encoded["input_ids"], encoded["offset_mapping"], found, strict=True
            )
        ]  # fmt: skip

    def _check_template(self, row: Conversation) -> str:
        """The template that the row's tools select, if there are several."""
        if not self._tokenizer.chat_template:
            raise InvalidInputError(
                row.place, f"messages need a chat template, and {self._model} has none; use prompt and completion"
            )
        try:
            return str(self._tokenizer.get_chat_template(tools=row.tools))
        except ValueError as error:
            raise self._refusal(row, error) from None

    def _check_tools(self, row: Conversation) -> None:
        """Whether the template writes the tools and their calls: older ones leave them out."""
        names = tool_names(row)
        text = self._applied(row, row.messages, tokenize=False) if names else ""
        if left_out := [name for name in names if name not in text]:
            problem = (
                f"the chat template of {self._model} leaves out the tool {left_out[0]!r}; use one that writes tools"
            )
            raise InvalidInputError(row.place, problem)

    def _marked(self, row: Conversation) -> TokenRow:
        """As the template itself marks it; of what a prompt holds nothing counts."""
        encoded = self._applied(row, row.messages, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]
        start = 0
        if row.first:
            prompt = self._applied(row, row.messages[: row.first], return_dict=True)["input_ids"]
            start = common_length(prompt, tokens)
        return tokens, [flag and number >= start for number, flag in enumerate(mask)]

    def _spans(self, row: Conversation) -> tuple[str, list[Span]]:
        try:
            return assistant_spans(row.messages, self.render(row), row.first)
        except NotNestedError as error:
            raise InvalidInputError(
                row.place, f"no rule finds the assistant's turns in {self._model}'s chat template: {error}; "
                "use prompt and completion, or a template that marks the assistant's turns with {% generation %}"
            ) from None  # fmt: skip

    def _applied(self, row: Conversation, messages: list[Message], **options: Any) -> Any:
        try:
            template = dated(self._check_template(row))
            return self._tokenizer.apply_chat_template(messages, row.tools, chat_template=template, **options)
        except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError) as error:
            raise self._refusal(row, error) from None
        except Exception as error:
            # jinja2's errors have no base but Exception in the tokenizer's public interface.
            if type(error).__module__.partition(".")[0] != "jinja2":
                raise
            raise self._refusal(row, error) from None

    def _refusal(self, row: Conversation, error: Exception) -> InvalidInputError:
        return InvalidInputError(row.place, f"the chat template of {self._model} refuses it: {first_line(error)}")


def added_before(whole: list[int], plain: list[int]) -> list[int]:
    """The special tokens that a text's tokens begin with, if they are `plain` without special ones."""
    starts = range(len(whole) - len(plain) + 1)
    return whole[: next((start for start in starts if whole[start : start + len(plain)] == plain), 0)]


def check_ids(tokens: Sequence[int], vocabulary: int | None, place: str) -> None:
    """Whether the model knows each token. Raises InvalidInputError naming `place` and the first that it doesn't."""
    if vocabulary is not None and max(tokens, default=0) >= vocabulary:
        wrong = next(token for token in tokens if token >= vocabulary)
        problem = f"has the token ID {wrong}, but the model has {vocabulary} (config.json: vocab_size)"
        raise InvalidInputError(place, problem)


def _apart(row: Row) -> tuple[str, str]:
    if not isinstance(row, Completion):
        raise InvalidInputError(row.place, 'needs "prompt" and "completion" of text for an encoder-decoder model')
    return row.prompt, row.completion


def _whole(row: Completion) -> str:
    return row.prompt + row.completion


def _is_in(offset: tuple[int, int], spans: Sequence[Span]) -> bool:
    """Whether a token has a character of a span and none after it: a span's end is the template's, its start may lie
    within a token."""
    return any(span.start < offset[1] <= span.stop for span in spans)
