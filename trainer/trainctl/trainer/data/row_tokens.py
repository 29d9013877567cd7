"""Rows to tokens and masks, by the tokenizer and the chat template of the model's directory.

A text and a completion end with the end token. A completion counts from the first token in which it differs from its
prompt alone, as in TRL. In a conversation the assistant's turns count, as `chat_spans` finds them or, if the template
has `{% generation %}`, as it marks them. Both are spans of characters; the tokens in them count.
"""

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainctl.protocol.config.run_tables import Prompt
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common import model_files
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.libraries import import_without_torch
from trainctl.trainer.common.model_files import decoder_start, vocabulary_size
from trainctl.trainer.data.chat_template import NotNestedError, Render, Span, assistant_spans, dated
from trainctl.trainer.data.rows import (
    FIELDS,
    SETTINGS,
    Completion,
    Conversation,
    Message,
    Row,
    Text,
    common_length,
    is_learned,
    tool_names,
)
from trainctl.trainer.data.tokenizer_file import (
    ByteTokenizer,
    has_target_mode,
    read_tokenizer,
    with_exact_offsets,
)

TokenRow = tuple[list[int], list[bool]]
"""Tokens, and whether each counts as a target."""
_BATCH_ROWS = 256
"""Rows that one call tokenizes: the library spreads them over its threads."""


def row_tokenizer(model: Path, kind: Literal["bytes", "model"], where: str) -> "RowTokenizer":
    """Return the tokenizer of a model directory, or that of bytes. Raises InvalidInputError, blaming a field of
    `where`, if there is none that can be read."""
    if kind == "bytes":
        return RowTokenizer(ByteTokenizer(), model)
    tokenizer = read_tokenizer(model, where)
    if has_target_mode(tokenizer) and tokenizer.tgt_lang is None:
        problem = f"{model} translates, and tokenizer_config.json doesn't say into which language: set tgt_lang there"
        raise InvalidInputError(f"{where}: data.tokenizer", problem)
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
        self.decoder_start = decoder_start
        self._remarks: Counter[str] = Counter()

    def take_remarks(self) -> "Counter[str]":
        """Return what was left out of the rows encoded since the last call, and how often."""
        remarks, self._remarks = self._remarks, Counter()
        return remarks

    @property
    def encodes_prompts(self) -> bool:
        """True if its model has an encoder for prompts."""
        return self.decoder_start is not None

    @property
    def highest(self) -> int:
        """The highest id that it gives, added tokens left out: many a tokenizer has some that its model lacks."""
        ids = {int(number) for number in self._tokenizer.get_vocab().values()}
        return max(ids - {*getattr(self._tokenizer, "added_tokens_decoder", ())}, default=0)

    @property
    def has_end(self) -> bool:
        """True if it has a token that ends texts and completions."""
        return self._tokenizer.eos_token_id is not None

    @property
    def prompt_end(self) -> int:
        """Special tokens that it puts after a prompt for an encoder."""
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
        """Return the tokens before an answer, as training has them: `plain`, with the special tokens that a text begins
        with only. Raises InvalidInputError."""
        if isinstance(prompt, str):
            tokens = self._plain(prompt) if plain else self._ids([prompt])[0]
            if not tokens:
                raise InvalidInputError("prompt", f"{prompt!r} has no tokens")
            if not self.encodes_prompts and tokens[1:] and tokens[-1] == self._tokenizer.eos_token_id:
                del tokens[-1]
        else:
            if not isinstance(prompt, Conversation):
                prompt = Conversation("prompt", [msgspec.to_builtins(message) for message in prompt])
            text = self.render(prompt)(prompt.messages, True)
            tokens = [*self._tokenizer(text, add_special_tokens=False)["input_ids"]]
        check_ids(tokens, self._vocabulary, "prompt")
        return tokens

    def _plain(self, text: str) -> list[int]:
        plain = [*self._tokenizer([text], add_special_tokens=False)["input_ids"][0]]
        begin = self.begin
        return plain if plain[: len(begin)] == begin else [*begin, *plain]

    def render(self, row: Conversation) -> Render:
        """Return the chat template for messages with the row's tools. What it returns raises InvalidInputError."""
        return lambda messages, prompted: self._rendered(row, messages, prompted=prompted)[0]

    def writes_date(self, row: Conversation) -> bool:
        """Return whether the chat template writes the day's date."""
        template = self._template(row)
        return dated(template) != template

    def text(self, tokens: Sequence[int]) -> str:
        """Return tokens as a person reads them, without special ones."""
        return str(self._tokenizer.decode([*tokens], skip_special_tokens=True))

    def pieces(self, tokens: Sequence[int], flags: Sequence[bool]) -> Iterator[tuple[str, bool]]:
        """Yield tokens as text, each with its flag. Tokens that hold parts of a character are put together."""
        begun: list[int] = []
        for number, (token, flag) in enumerate(zip(tokens, flags, strict=True)):
            begun.append(token)
            text = str(self._tokenizer.decode(begun))
            if not text.endswith("\ufffd") or number + 1 == len(tokens) or flags[number + 1] != flag:
                yield text, flag
                begun = []

    def encode_texts(self, texts: Sequence[str]) -> Sequence[Any]:
        """Return the `tokenizers.Encoding` of each text, without special tokens."""
        encodings: Sequence[Any] = self._tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return encodings

    def encode(self, rows: Iterable[Row]) -> Iterator[TokenRow]:
        """Yield each row's tokens and mask; for an encoder-decoder model its prompt, with a token after it that is
        never read, and its completion after the token that the decoder begins with. Raises InvalidInputError naming
        the row's place."""
        remaining = iter(rows)
        while batch := list(islice(remaining, _BATCH_ROWS)):
            yield from self._batch(batch) if self.decoder_start is None else self._apart(batch, self.decoder_start)

    def _apart(self, rows: Sequence[Row], decoder_start: int) -> Iterator[TokenRow]:
        pairs = [row for row in rows if isinstance(row, Completion)]
        if len(pairs) < len(rows):
            place = next(row.place for row in rows if not isinstance(row, Completion))
            raise InvalidInputError(place, 'needs "prompt" and "completion" of text for an encoder-decoder model')
        prompts = self._ids([row.prompt for row in pairs])
        completions = self._ids([row.completion for row in pairs], are_targets=True)
        for row, prompt, completion in zip(rows, prompts, completions, strict=True):
            check_ids([*prompt, *completion], self._vocabulary, row.place)
            if not prompt:
                raise InvalidInputError(f"{row.place}: prompt", "has no tokens for the encoder")
            yield [*prompt, prompt[-1]], [False] * (len(prompt) + 1)
            ended = self._ended(completion)
            yield [decoder_start, *ended], [False, *([True] * len(ended))]

    def _batch(self, rows: Sequence[Row]) -> list[TokenRow]:
        texts = [row for row in rows if not isinstance(row, Conversation)]
        wholes = self._ids([row.text if isinstance(row, Text) else row.prompt + row.completion for row in texts])
        prompts = iter(self._ids([row.prompt for row in texts if isinstance(row, Completion)]))
        ended = map(self._ended, wholes)
        conversations = iter(self._conversations([row for row in rows if isinstance(row, Conversation)]))
        encoded: list[TokenRow] = []
        for row in rows:
            match row:
                case Text():
                    tokens = next(ended)
                    encoded.append((tokens, [True] * len(tokens)))
                case Completion():
                    tokens = next(ended)
                    start = common_length(next(prompts), tokens)
                    encoded.append((tokens, [number >= start for number in range(len(tokens))]))
                case Conversation():
                    encoded.append(next(conversations))
            check_ids(encoded[-1][0], self._vocabulary, row.place)
        return encoded

    def _ids(self, texts: Sequence[str], *, are_targets: bool = False) -> list[list[int]]:
        """Return the texts' tokens with special ones. A text that begins with the begin token keeps one."""
        if not texts:
            return []
        if are_targets and has_target_mode(self._tokenizer):
            encoded: list[list[int]] = self._tokenizer(text_target=[*texts])["input_ids"]
        else:
            encoded = self._tokenizer([*texts])["input_ids"]
        begin = self.begin
        for place, tokens in enumerate(encoded):
            if begin and tokens[len(begin) : 2 * len(begin)] == begin:
                encoded[place] = tokens[len(begin) :]
                self._remarks["begin tokens that texts repeat"] += 1
        return encoded

    @functools.cached_property
    def begin(self) -> list[int]:
        """The special tokens that begin each text."""
        whole, plain = (self._tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        return added_before([*whole], [*plain])

    def _ended(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]

    def _conversations(self, rows: Sequence[Conversation]) -> list[TokenRow]:
        if not rows:
            return []
        marked = []
        for row in rows:
            self._check_tools(row)
            others = itertools.chain.from_iterable(message.keys() - FIELDS for message in row.messages)
            self._remarks.update(f"field {name!r} of messages, unless the template writes it" for name in others)
            marked.append(self._marks(row) if has_marks(self._template(row)) else self._spans(row))
        encoded = self._exact.encode_batch([text for text, _ in marked], add_special_tokens=False)
        # A span's end is the template's, its start may lie within a token.
        return [
            (tokens.ids, [any(span.start < stop <= span.stop for span in spans) for _, stop in tokens.offsets])
            for tokens, (_, spans) in zip(encoded, marked, strict=True)
        ]

    @functools.cached_property
    def _exact(self) -> Any:
        return with_exact_offsets(self._tokenizer)

    def _template(self, row: Conversation) -> str:
        """Return the template that the row's tools select, if there are several."""
        if not self._tokenizer.chat_template:
            raise InvalidInputError(
                row.place, f"messages need a chat template, and {self._model} has none; use prompt and completion"
            )
        with self._refusing(row):
            return str(self._tokenizer.get_chat_template(tools=row.tools))

    def _check_tools(self, row: Conversation) -> None:
        """Refuse a template that leaves out the tools or their calls, as older ones do."""
        names = tool_names(row)
        text = self._rendered(row, row.messages)[0] if names else ""
        if left_out := [name for name in names if name not in text]:
            problem = f"leaves out the tool {left_out[0]!r}; use one that writes tools"
            raise InvalidInputError(row.place, f"the chat template of {self._model} {problem}")

    def _marks(self, row: Conversation) -> tuple[str, list[Span]]:
        """Return the text, and the spans that the template itself marks, of which nothing in a prompt counts."""
        text, spans = self._rendered(row, row.messages, marks=True)
        turns = [message for message in row.messages if message["role"] == "assistant"]
        if any(not is_learned(turn) for turn in turns):
            if len(spans) != len(turns):
                problem = f"the template marks {len(spans)} spans for {len(turns)} turns of the assistant"
                raise InvalidInputError(row.place, f"{problem}, so `weight` and `train` of a message have no meaning")
            spans = [span for span, turn in zip(spans, turns, strict=True) if is_learned(turn)]
        start = common_length(self._rendered(row, row.messages[: row.first])[0], text) if row.first else 0
        return text, [Span(max(span.start, start), span.stop) for span in spans if span.stop > start]

    def _rendered(
        self, row: Conversation, messages: Sequence[Message], *, prompted: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, with the generation prompt if it is `prompted`, and the spans that the template
        `marks`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        template = dated(self._template(row))
        with self._refusing(row):
            texts, spans = render(
                conversations=[[_seen_by_template(message) for message in messages]],
                tools=row.tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompted,
                **{**self._tokenizer.special_tokens_map, **row.template_settings},
            )
        return texts[0], [Span(*span) for span in spans[0]] if marks else []

    def _spans(self, row: Conversation) -> tuple[str, list[Span]]:
        try:
            return assistant_spans(row.messages, self.render(row), row.first)
        except NotNestedError as error:
            raise InvalidInputError(
                row.place,
                f"no rule finds the assistant's turns in {self._model}'s chat template: {error}; "
                "use prompt and completion, or a template that marks the assistant's turns with {% generation %}",
            ) from None

    @contextlib.contextmanager
    def _refusing(self, row: Conversation) -> Iterator[None]:
        """Raise InvalidInputError for what the template raises; jinja2's errors have no base but Exception."""
        try:
            yield
        except Exception as error:
            expected = isinstance(error, ValueError | TypeError | KeyError | ArithmeticError | RuntimeError)
            if not expected and type(error).__module__.partition(".")[0] != "jinja2":
                raise
            problem = f"the chat template of {self._model} refuses it: {first_line(error)}"
            raise InvalidInputError(row.place, problem) from None


def has_marks(template: str) -> bool:
    """Return whether a chat template marks turns with `{% generation %}`, however the tag is written."""
    return re.search(r"\{%[-+]?\s*generation\b", re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)) is not None


def _seen_by_template(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in SETTINGS and value is not None}


def added_before(whole: list[int], plain: list[int]) -> list[int]:
    """Return the special tokens that a text's tokens begin with, if they are `plain` without special ones."""
    starts = range(len(whole) - len(plain) + 1)
    return whole[: next((start for start in starts if whole[start : start + len(plain)] == plain), 0)]


def check_ids(tokens: Sequence[int], vocabulary: int | None, place: str) -> None:
    """Check that the model knows each token. Raises InvalidInputError naming `place` and the first that it doesn't."""
    if vocabulary is not None and max(tokens, default=0) >= vocabulary:
        wrong = next(token for token in tokens if token >= vocabulary)
        problem = f"has the token ID {wrong}, but the model has {vocabulary} (config.json: vocab_size)"
        raise InvalidInputError(place, problem)
