"""The tokens of a source's chunks, which depend only on the chunks and a `Recipe`.

A text is read in parts that overlap. Each is tokenized with the start of the next, and the two are joined where they
agree.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import DataKind
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.cgroups import usable_cores
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.model_files import model_config, vocabulary_size
from trainctl.trainer.data.row_tokens import RowTokenizer, TokenRow, check_ids, row_tokenizer
from trainctl.trainer.data.rows import Chunk, lines_in, rows_in
from trainctl.trainer.data.tokenizer_file import BYTES_END, BYTES_VOCABULARY

TEXT_BYTES = 1 << 20
"""Bytes of a part of a text."""
OVERLAP_BYTES = 1 << 13
"""Bytes of the next part that a part of a text is tokenized with."""
AGREEING_TOKENS = 16
"""Tokens in a row that two parts must have in common where they are joined."""
_MAX_PARTS = 8
"""Parts of texts that one call tokenizes at most, one for each core. Each takes up to 0.5 GB meanwhile."""


@dataclass(frozen=True)
class TextTokens:
    """Tokens of a part of a text and of what follows it."""

    tokens: NDArray[np.uint32]
    starts: NDArray[np.int64]  # the first character of each token, from the part's start
    length: int  # characters of the part itself
    is_end: bool


@dataclass(frozen=True)
class SampleTokens:
    """The samples of a chunk, end to end."""

    tokens: NDArray[np.uint32]
    counted: NDArray[np.uint8]
    lengths: NDArray[np.int64]
    remarks: Mapping[str, int] = field(default_factory=dict)  # what was left out of rows, and how often


Encode = Callable[[Iterable[Chunk]], Iterator[TextTokens | SampleTokens]]


@dataclass(frozen=True)
class Recipe:
    """The settings by which chunks are tokenized."""

    model: Path
    kind: DataKind
    tokenizer: Literal["bytes", "model"]
    where: str  # the run file, for errors
    sequences: int = 1  # of a row: 2 for pairs of answers, and for prompts apart from their completions
    encodes_prompts: bool = False  # whether they are prompts and completions

    def encoder(self) -> Encode:
        """Return what tokenizes chunks, one after another. Raises InvalidInputError for a tokenizer that can't be read
        or doesn't fit the model; so does what it returns, naming file and line."""
        if self.kind == "samples":
            highest = (vocabulary_size(self.model) or 2**32) - 1
            return lambda chunks: (_samples(_read_samples(chunk, highest)) for chunk in chunks)
        around = () if self.kind == "rows" else (*self.begin, *self.end)
        highest, vocabulary = max(self._rows.highest, *around, 0), vocabulary_size(self.model)
        if vocabulary is not None and highest >= vocabulary:
            problem = f"produces token IDs up to {highest}, but the model has {vocabulary} (config.json: vocab_size)"
            raise InvalidInputError(f"{self.where}: data.tokenizer", problem)
        if self.kind == "rows":
            return self._encode_rows
        return self._encode_texts if self.tokenizer == "model" else lambda chunks: map(_byte_tokens, chunks)

    @property
    def begin(self) -> Sequence[int]:
        """The tokens before a text: those that the tokenizer itself puts there, such as a begin token."""
        return self._rows.begin

    @property
    def end(self) -> Sequence[int]:
        """The token that ends a text, if there is one."""
        if self.tokenizer == "bytes":
            return (BYTES_END,)
        end = model_config(self.model).get("eos_token_id")
        return end[:1] if isinstance(end, list) else () if end is None else (end,)

    @property
    def has_end(self) -> bool:
        """True if texts and completions get an end token."""
        return self._rows.has_end if self.kind == "rows" else self.kind == "samples" or bool(self.end)

    @property
    def prompt_end(self) -> int:
        """Special tokens at the end of each prompt for an encoder."""
        return self._rows.prompt_end if self.encodes_prompts else 0

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds each ID."""
        is_bytes = self.kind == "text" and self.tokenizer == "bytes"
        vocabulary = BYTES_VOCABULARY if is_bytes else vocabulary_size(self.model)
        return np.dtype("<u2" if vocabulary is not None and vocabulary <= 65536 else "<u4")

    @functools.cached_property
    def _rows(self) -> RowTokenizer:
        return row_tokenizer(self.model, self.tokenizer, self.where)

    def _encode_rows(self, chunks: Iterable[Chunk]) -> Iterator[SampleTokens]:
        are_pairs = self.sequences > 1 and not self.encodes_prompts
        for chunk in chunks:
            yield _samples(self._rows.encode(rows_in(chunk, are_pairs=are_pairs)), self._rows.take_remarks)

    def _encode_texts(self, chunks: Iterable[Chunk]) -> Iterator[TextTokens]:
        vocabulary, remaining = vocabulary_size(self.model), iter(chunks)
        count = min(_MAX_PARTS, max(1, int(usable_cores())))
        while batch := list(islice(remaining, count)):
            texts = [_text(chunk) for chunk in batch]
            wholes = [text + _lines(chunk.following, "replace") for text, chunk in zip(texts, batch, strict=True)]
            encodings = self._rows.encode_texts(wholes)
            for chunk, text, encoding in zip(batch, texts, encodings, strict=True):
                check_ids(encoding.ids, vocabulary, str(chunk.source))
                starts = np.fromiter((start for start, _ in encoding.offsets), np.int64, len(encoding.ids))
                yield TextTokens(np.array(encoding.ids, np.uint32), starts, len(text), chunk.is_end)


def text_chunks(path: Path, size: int = TEXT_BYTES, overlap: int = OVERLAP_BYTES) -> Iterator[Chunk]:
    """Yield the parts of a UTF-8 text, which begin and end between characters."""
    with path.open("rb") as file:
        held, first = b"", 0
        while True:
            held += file.read(size + overlap + 1 - len(held))
            if len(held) <= size + overlap:
                yield Chunk(path, held, first, len(held))
                return
            cut, end = _between(held, size), _between(held, size + overlap)
            yield Chunk(path, held[:cut], first, cut, held[cut:end], is_end=False)
            held, first = held[cut:], first + cut


def _between(text: bytes, place: int) -> int:
    """Return a place near `place` where no character and no line end is divided; what isn't UTF-8 is found later."""
    for _ in range(3):
        place -= place < len(text) and text[place] & 0xC0 == 0x80
    return place - (text[place - 1 : place + 1] == b"\r\n")


def joined(
    parts: Iterable[TextTokens], begin: NDArray[np.uint32], end: NDArray[np.uint32]
) -> Iterator[NDArray[np.uint32]]:
    """Yield the tokens of texts whose parts come in order, without what two parts have in common; `begin` precedes each
    text that doesn't start with it, and `end` follows each."""
    before: TextTokens | None = None
    used = 0  # tokens of the part that are left out at its start
    for part in parts:
        if before is not None:
            border = int(np.searchsorted(before.starts, before.length))
            tail = _marks(before.starts[border:] - before.length, before.tokens[border:])
            reach = int(np.searchsorted(part.starts, int(tail[-1][0]) + 1)) if tail else 0
            keep, skip = seam(tail, _marks(part.starts[:reach], part.tokens[:reach]))
            yield before.tokens[used : border + keep]
            used = skip
        elif not np.array_equal(part.tokens[: len(begin)], begin):
            yield begin
        before = part
        if part.is_end:
            yield part.tokens[used:]
            yield end
            before, used = None, 0


def seam(tail: Sequence[tuple[int, int]], head: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return how many tokens of a part's `tail` to keep, and how many of the next part's `head` to leave out. Both are
    (first character, ID), in order. They are joined in the middle of the first AGREEING_TOKENS that agree; without
    such, at the border."""
    mine = theirs = run = 0
    while mine < len(tail) and theirs < len(head):
        if tail[mine] == head[theirs]:
            run += 1
            if run == AGREEING_TOKENS:
                return mine + 1 - run // 2, theirs + 1 - run // 2
            mine, theirs = mine + 1, theirs + 1
            continue
        run = 0
        place = min(tail[mine][0], head[theirs][0])
        mine, theirs = mine + (tail[mine][0] == place), theirs + (head[theirs][0] == place)
    return 0, 0


def _marks(starts: NDArray[np.int64], tokens: NDArray[np.uint32]) -> list[tuple[int, int]]:
    return list(zip(starts.tolist(), tokens.tolist(), strict=True))


def _text(chunk: Chunk) -> str:
    try:
        return _lines(chunk.content)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text: byte {chunk.first + error.start:,}: {error.reason}"
        raise InvalidInputError(str(chunk.source), problem) from None


def _lines(raw: bytes, errors: str = "strict") -> str:
    """Decode bytes as Python reads a text file."""
    return raw.decode(errors=errors).replace("\r\n", "\n").replace("\r", "\n")


def _byte_tokens(chunk: Chunk) -> TextTokens:
    tokens = np.frombuffer(chunk.content, np.uint8).astype(np.uint32)
    return TextTokens(tokens, np.empty(0, np.int64), 0, is_end=True)


def _samples(rows: Iterable[TokenRow], take_remarks: Callable[[], Mapping[str, int]] = dict) -> SampleTokens:
    tokens, counted = [np.empty(0, np.uint32)], [np.empty(0, np.uint8)]
    for ids, flags in rows:
        tokens.append(np.array(ids, np.uint32))
        counted.append(np.array(flags, np.uint8))
    lengths = np.array([len(ids) for ids in tokens[1:]], np.int64)
    return SampleTokens(np.concatenate(tokens), np.concatenate(counted), lengths, take_remarks())


class _Sample(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a samples file; without a mask every token counts."""

    tokens: list[int]
    mask: list[int | bool] | None = None


def _read_samples(chunk: Chunk, highest: int) -> Iterator[TokenRow]:
    decoder = msgspec.json.Decoder(_Sample)
    for where, line in lines_in(chunk):
        try:
            sample = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInputError(where, f"not a sample {{tokens, mask}}: {first_line(error)}") from None
        tokens, mask = sample.tokens, sample.mask
        if len(tokens) < 2:
            problem = "a sample needs at least two tokens: the first is never a target"
            raise InvalidInputError(f"{where}: tokens", problem)
        worst = max(tokens) if min(tokens) >= 0 else min(tokens)
        if not 0 <= worst <= highest:
            raise InvalidInputError(f"{where}: tokens", f"{worst} must be an ID from 0 to {highest}")
        if mask is None:
            mask = [True] * len(tokens)
        if len(mask) != len(tokens):
            problem = f"{len(mask)} flags for {len(tokens)} tokens; each token needs one"
            raise InvalidInputError(f"{where}: mask", problem)
        if any(flag not in (0, 1) for flag in mask):
            raise InvalidInputError(f"{where}: mask", "flags must be 0 or 1")
        yield tokens, [bool(flag) for flag in mask]
