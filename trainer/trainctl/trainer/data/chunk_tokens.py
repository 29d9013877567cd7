"""What a chunk of a source tokenizes to. It depends only on the chunk and a `Recipe`, so any process can do it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import DataKind
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.model_files import model_config, vocabulary_size
from trainctl.trainer.data.byte_tokens import BYTES_END, BYTES_VOCABULARY
from trainctl.trainer.data.chunks import Chunk, TextTokens
from trainctl.trainer.data.pairs import halves_in
from trainctl.trainer.data.row_tokens import TokenRow, added_before, check_ids, row_tokenizer
from trainctl.trainer.data.rows import lines_in, rows_in
from trainctl.trainer.data.tokenizer_file import read_tokenizer


class SampleTokens(NamedTuple):
    """The samples of a chunk, end to end."""

    tokens: NDArray[np.uint32]
    counted: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    remarks: Mapping[str, int] = MappingProxyType({})  # what was left out of rows, and how often


Encode = Callable[[Chunk], TextTokens | SampleTokens]


class Recipe(NamedTuple):
    """How chunks are tokenized."""

    model: Path
    kind: DataKind
    tokenizer: Literal["bytes", "model"]
    where: str  # the run file, for errors
    sequences: int = 1  # of a row: 2 for pairs of answers, and for prompts apart from their completions
    encodes_prompts: bool = False  # whether they are prompts and completions

    def encoder(self) -> Encode:
        """Raises InvalidInputError for a tokenizer that can't be read or doesn't fit the model; so does what it
        returns, naming file and line."""
        if self.kind == "samples":
            highest = (vocabulary_size(self.model) or 2**32) - 1
            return lambda chunk: _samples(_read_samples(chunk, highest))
        if self.kind == "rows":
            return self._rows_encoder()
        if self.tokenizer == "bytes":
            self._check_vocabulary(BYTES_VOCABULARY - 1)
            return _byte_tokens
        return self._text_encoder()

    def begin(self) -> Sequence[int]:
        """The tokens before a text: those that the tokenizer itself puts there, such as a begin token."""
        return () if self.tokenizer == "bytes" else _begin(self._read_tokenizer())

    def end(self) -> Sequence[int]:
        """The token that ends a text, if there is one."""
        if self.tokenizer == "bytes":
            return (BYTES_END,)
        end = model_config(self.model).get("eos_token_id")
        return end[:1] if isinstance(end, list) else () if end is None else (end,)

    def has_end(self) -> bool:
        """Whether texts and completions get an end token."""
        if self.kind == "rows":
            return row_tokenizer(self.model, self.tokenizer, self.where).has_end
        return self.kind == "samples" or bool(self.end())

    def prompt_end(self) -> int:
        """How many special tokens end each prompt for an encoder."""
        return row_tokenizer(self.model, self.tokenizer, self.where).prompt_end if self.encodes_prompts else 0

    def _rows_encoder(self) -> Encode:
        tokenizer = row_tokenizer(self.model, self.tokenizer, self.where)
        self._check_vocabulary(tokenizer.highest)
        if self.encodes_prompts:
            return lambda chunk: _samples(tokenizer.encode_apart(rows_in(chunk)), tokenizer.take_remarks)
        read = rows_in if self.sequences == 1 else halves_in
        return lambda chunk: _samples(tokenizer.encode(read(chunk)), tokenizer.take_remarks)

    def _text_encoder(self) -> Encode:
        tokenizer = self._read_tokenizer()
        added = tokenizer.get_added_tokens_decoder()
        self._check_vocabulary(max([*({*tokenizer.get_vocab().values()} - {*added}), *_begin(tokenizer), *self.end()]))
        vocabulary = vocabulary_size(self.model)

        def encode(chunk: Chunk) -> TextTokens:
            text = _text(chunk)
            found = tokenizer.encode(text + _lines(chunk.following, "replace"), add_special_tokens=False)
            check_ids(found.ids, vocabulary, str(chunk.source))
            starts = np.fromiter((start for start, _ in found.offsets), np.int64, len(found.ids))
            return TextTokens(np.array(found.ids, np.uint32), starts, len(text), chunk.is_end)

        return encode

    def _read_tokenizer(self) -> Any:
        return read_tokenizer(self.model, self.where).backend_tokenizer

    def _check_vocabulary(self, highest: int) -> None:
        vocabulary = vocabulary_size(self.model)
        if vocabulary is not None and highest >= vocabulary:
            raise InvalidInputError(
                f"{self.where}: data.tokenizer",
                f"produces token IDs up to {highest}, but the model has {vocabulary} (config.json: vocab_size)",
            )


def _begin(tokenizer: Any) -> list[int]:
    whole, plain = (tokenizer.encode("a", add_special_tokens=special).ids for special in (True, False))
    return added_before(whole, plain)


def _text(chunk: Chunk) -> str:
    try:
        return _lines(chunk.content)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text: byte {chunk.first + error.start:,}: {error.reason}"
        raise InvalidInputError(str(chunk.source), problem) from None


def _lines(raw: bytes, errors: str = "strict") -> str:
    """As Python reads a text file."""
    return raw.decode(errors=errors).replace("\r\n", "\n").replace("\r", "\n")


def _byte_tokens(chunk: Chunk) -> TextTokens:
    tokens = np.frombuffer(chunk.content, np.uint8).astype(np.uint32)
    return TextTokens(tokens, np.empty(0, np.int64), 0, is_end=True)


def _samples(rows: Iterable[TokenRow], remarks: Callable[[], Mapping[str, int]] = dict) -> SampleTokens:
    each = [(np.array(tokens, np.uint32), np.array(counted, np.uint8)) for tokens, counted in rows]
    return SampleTokens(
        np.concatenate([tokens for tokens, _ in each]) if each else np.empty(0, np.uint32),
        np.concatenate([counted for _, counted in each]) if each else np.empty(0, np.uint8),
        np.array([len(tokens) for tokens, _ in each], np.int64),
        dict(remarks()),
    )


class _Sample(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a samples file; without a mask every token counts."""

    tokens: list[int]
    mask: list[int | bool] | None = None


def _read_samples(chunk: Chunk, highest: int) -> Iterable[TokenRow]:
    decoder = msgspec.json.Decoder(_Sample)
    for where, line in lines_in(chunk):
        try:
            sample = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInputError(where, f"not a sample {{tokens, mask}}: {first_line(error)}") from None
        yield sample.tokens, _checked_mask(sample, highest, where)


def _checked_mask(sample: _Sample, highest: int, where: str) -> list[bool]:
    if len(sample.tokens) < 2:
        raise InvalidInputError(f"{where}: tokens", "a sample needs at least two tokens: the first is never a target")
    worst = max(sample.tokens) if min(sample.tokens) >= 0 else min(sample.tokens)
    if not 0 <= worst <= highest:
        raise InvalidInputError(f"{where}: tokens", f"{worst} must be an ID from 0 to {highest}")
    mask = [True] * len(sample.tokens) if sample.mask is None else sample.mask
    if len(mask) != len(sample.tokens):
        problem = f"{len(mask)} flags for {len(sample.tokens)} tokens; each token needs one"
        raise InvalidInputError(f"{where}: mask", problem)
    if any(flag not in (0, 1) for flag in mask):
        raise InvalidInputError(f"{where}: mask", "flags must be 0 or 1")
    return [bool(flag) for flag in mask]
