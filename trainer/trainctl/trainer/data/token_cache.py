"""Token caches: tokens in flat files, made once on a node for each content of the sources, then memory-mapped.

A cache is a folder: tokens.bin (uint16, or uint32 where ids need it), for rows and samples also counted.bin (one byte a
token: its loss counts as a target) and offsets.bin (int64, one more than there are samples), and cache.json that
describes them.

Texts are laid end to end, each followed by the end token, files in ascending order of their path.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.run_file import data_files
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.file_digests import data_digests
from trainctl.protocol.messages import FileDigest
from trainctl.trainer.common.atomic_folder import make_folder
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.model_files import model_config, vocabulary_size
from trainctl.trainer.data.byte_tokens import BYTES_END, BYTES_VOCABULARY
from trainctl.trainer.data.row_tokens import TokenRow, row_tokenizer
from trainctl.trainer.data.rows import numbered_lines, read_rows

_FORMAT = 2
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class TokenCache:
    """Tokens of all sources; `counted` and `offsets` only where they came as samples."""

    tokens: NDArray[Any]
    counted: NDArray[np.uint8] | None
    offsets: NDArray[np.int64] | None
    digest: str  # of the tokens
    files: tuple[FileDigest, ...]  # the sources


class _Sample(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a samples file; without a mask every token counts."""

    tokens: list[int]
    mask: list[int | bool] | None = None


def open_cache(config: RunFile, folder: Path, where: str) -> TokenCache:
    """The token cache of `config`'s data, made under `folder` if it isn't there yet; any number of trainers may do so
    at once. Raises InvalidInputError naming file and line."""
    sources = data_files(Path(config.data.path), config.data.kind)
    target = folder / f"tokens-{_key(config, sources)}"
    make_folder(target, lambda work: _write(config, sources, work, where))
    notes = json.loads((target / "cache.json").read_text(encoding="utf-8"))
    tokens = _mapped(target / "tokens.bin", np.dtype(notes["dtype"]))
    files = tuple(FileDigest(name, digest) for name, digest in notes["files"])
    if config.data.kind == "text":
        return TokenCache(tokens, None, None, notes["digest"], files)
    counted = _mapped(target / "counted.bin", np.dtype(np.uint8))
    return TokenCache(tokens, counted, _mapped(target / "offsets.bin", np.dtype(np.int64)), notes["digest"], files)


def _key(config: RunFile, sources: list[Path]) -> str:
    """Of everything a cache depends on: the sources by path, size and time of change, and how they are read."""
    model = Path(config.model.path)
    readers = [model / "config.json"]
    if config.data.tokenizer == "model":
        readers += [model / name for name in _TOKENIZER_FILES if (model / name).exists()]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sources + readers]
    how = [_FORMAT, config.data.kind, config.data.tokenizer, stats]
    return hashlib.sha256(json.dumps(how).encode()).hexdigest()[:16]


def _write(config: RunFile, sources: list[Path], work: Path, where: str) -> None:
    if config.data.kind == "text":
        notes = _write_text(config, sources, work, where)
    else:
        notes = _write_samples(config, sources, work, where)
    files = data_digests(Path(config.data.path), config.data.kind).files
    notes["files"] = [[file.name, file.digest] for file in files]
    (work / "cache.json").write_text(json.dumps(notes), encoding="utf-8")


def _write_text(config: RunFile, sources: list[Path], work: Path, where: str) -> dict[str, Any]:
    encode, highest = _encoder(config, where)
    _check_vocabulary(highest, Path(config.model.path), where)
    dtype = np.dtype("<u2" if highest < 65536 else "<u4")
    digest = hashlib.sha256()
    with (work / "tokens.bin").open("wb") as file:
        for source in sources:
            raw = encode(source).astype(dtype).tobytes()
            digest.update(raw)
            file.write(raw)
    return {"format": _FORMAT, "dtype": dtype.str, "digest": digest.hexdigest()}


def _encoder(config: RunFile, where: str) -> tuple[Callable[[Path], NDArray[Any]], int]:
    """What turns a file into tokens, and the highest id it gives."""
    if config.data.tokenizer == "bytes":
        return _encode_bytes, BYTES_VOCABULARY - 1
    return _model_encoder(Path(config.model.path), where)


def _encode_bytes(source: Path) -> NDArray[Any]:
    raw = np.frombuffer(source.read_bytes(), np.uint8)
    return np.append(raw.astype(np.uint16), np.uint16(BYTES_END))


def _model_encoder(model: Path, where: str) -> tuple[Callable[[Path], NDArray[Any]], int]:
    path = model / "tokenizer.json"
    end = model_config(model).get("eos_token_id")
    ends = end[:1] if isinstance(end, list) else [] if end is None else [end]
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InvalidInputError(
            f"{where}: data.tokenizer", "needs the tokenizers package: run pip install tokenizers"
        ) from None
    try:
        tokenizer: Any = Tokenizer.from_buffer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInputError(str(path), f"not a readable tokenizer: {first_line(error)}") from None

    def encode(source: Path) -> NDArray[Any]:
        try:
            text = source.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInputError(str(source), f"not UTF-8 text: {error}") from None
        return np.array([*tokenizer.encode(text, add_special_tokens=False).ids, *ends], np.uint32)

    return encode, max([tokenizer.get_vocab_size(with_added_tokens=True) - 1, *ends])


def _write_samples(config: RunFile, sources: list[Path], work: Path, where: str) -> dict[str, Any]:
    vocabulary = vocabulary_size(Path(config.model.path))
    dtype = np.dtype("<u2" if vocabulary is not None and vocabulary <= 65536 else "<u4")
    digest, offsets = hashlib.sha256(), [0]
    with (work / "tokens.bin").open("wb") as tokens_file, (work / "counted.bin").open("wb") as counted_file:
        rows = config.data.kind == "rows"
        samples = _read_rows(config, sources, where) if rows else _read_samples(sources[0], vocabulary)
        for tokens, counted in samples:
            raw, flags = np.array(tokens, dtype).tobytes(), np.array(counted, np.uint8).tobytes()
            digest.update(len(tokens).to_bytes(8, "little") + raw + flags)
            tokens_file.write(raw)
            counted_file.write(flags)
            offsets.append(offsets[-1] + len(tokens))
    np.array(offsets, "<i8").tofile(work / "offsets.bin")
    return {"format": _FORMAT, "dtype": dtype.str, "digest": digest.hexdigest()}


def _read_rows(config: RunFile, sources: list[Path], where: str) -> Iterator[TokenRow]:
    model = Path(config.model.path)
    tokenizer = row_tokenizer(model, config.data.tokenizer, where)
    _check_vocabulary(tokenizer.highest, model, where)
    return tokenizer.encode(row for source in sources for row in read_rows(source))


def _check_vocabulary(highest: int, model: Path, where: str) -> None:
    vocabulary = vocabulary_size(model)
    if vocabulary is not None and highest >= vocabulary:
        raise InvalidInputError(
            f"{where}: data.tokenizer",
            f"produces token IDs up to {highest}, but the model has {vocabulary} (config.json: vocab_size)",
        )


def _read_samples(source: Path, vocabulary: int | None) -> Iterator[tuple[list[int], list[bool]]]:
    decoder = msgspec.json.Decoder(_Sample)
    highest = (vocabulary or 2**32) - 1
    for where, line in numbered_lines(source):
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


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, dtype)
    mapped: NDArray[Any] = np.asarray(np.memmap(path, dtype, mode="r"))  # a memmap's own slices are slower by far
    return mapped
