"""Token caches: tokens in flat files, made once on a node for each content of the sources, then memory-mapped.

A cache is a folder: tokens.bin (uint16, or uint32 where ids need it), for rows and samples also counted.bin (one byte a
token: its loss counts as a target) and offsets.bin (int64, one more than there are samples), and cache.json that
describes them.

Texts are laid end to end, each between the begin and the end token if there are such, files in ascending order of their
path.
"""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.data_files import data_files, hidden_files
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.run_file import grows
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.machine.file_digests import data_digests
from trainctl.protocol.messages import FileDigest
from trainctl.trainer.common.model_files import vocabulary_size
from trainctl.trainer.data.byte_tokens import BYTES_VOCABULARY
from trainctl.trainer.data.chunk_tokens import Encode, Recipe, SampleTokens
from trainctl.trainer.data.chunks import Chunk, TextTokens, joined, row_chunks, text_chunks
from trainctl.trainer.data.worker_pool import tokenized

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_LIBRARIES = ("jinja2", "tokenizers", "transformers")
_DATA_CODE = (
    "byte_tokens", "chat_dates", "chat_spans", "chunk_tokens", "chunks", "pairs", "row_tokens", "rows", "token_cache",
    "tokenizer_file",
)  # fmt: skip
"""Modules beside this one that decide what a row or a text tokenizes to."""

Report = Callable[[int, int], object]
"""Takes the bytes tokenized so far, and all there are."""


def no_report(done: int, whole: int) -> None:
    """Keeps progress to itself."""


@dataclass(frozen=True)
class TokenCache:
    """Tokens of all sources; `counted` and `offsets` only where they came as samples."""

    tokens: NDArray[Any]
    counted: NDArray[np.uint8] | None
    offsets: NDArray[np.int64] | None
    digest: str  # of the tokens
    files: tuple[FileDigest, ...]  # the sources
    has_end: bool = True  # texts and completions end with a token
    prompt_end: int = 0  # special tokens that end each prompt for an encoder
    remarks: Mapping[str, int] = field(default_factory=dict)  # what was left out of the sources, and how often


def sources_of(config: RunFile) -> list[Path]:
    """The files that a run's data are read from."""
    return data_files(Path(config.data.path), config.data.kind)


def cache_name(config: RunFile) -> str:
    """After everything a cache depends on: the sources by path, size and time of change, and how they are read."""
    return f"tokens-{_digest_of(config, _stats(sources_of(config) + _readers(config)))[:16]}"


def chunk_name(config: RunFile, lines: Sequence[bytes]) -> str:
    """As `cache_name`, of lines by their content, wherever they are."""
    content = hashlib.sha256(b"".join(lines)).hexdigest()
    digest = _digest_of(config, ["chunk", content, *_stats(_readers(config))])
    return f"chunks-{digest[:2]}/tokens-{digest[:32]}"


def _readers(config: RunFile) -> list[Path]:
    """The files that say how sources are read."""
    model = Path(config.model.path)
    found = [model / name for name in _TOKENIZER_FILES if (model / name).exists()]
    found += sorted((model / _TEMPLATES).glob("*.jinja"))
    start = (
        [model / "generation_config.json"] if objective_of(config.objective, config.data.kind).encodes_prompts else []
    )
    found = [*(found if config.data.tokenizer == "model" else ()), *(path for path in start if path.exists())]
    return [model / "config.json", *found]


def _stats(paths: Sequence[Path]) -> list[Any]:
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def _digest_of(config: RunFile, what: list[Any]) -> str:
    how: list[Any] = [*_code_versions(), config.data.kind, config.data.tokenizer, what]
    objective = objective_of(config.objective, config.data.kind)
    if objective.sequences > 1:
        how.append("prompts apart, with their end" if objective.encodes_prompts else objective.sequences)
    return hashlib.sha256(json.dumps(how).encode()).hexdigest()


@functools.cache
def _code_versions() -> tuple[str, ...]:
    """Return the versions of what decides tokens beside files: libraries, and the code of this package."""
    own = hashlib.sha256()
    for name in _DATA_CODE:
        own.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return (*(f"{name} {installed_version(name)}" for name in _LIBRARIES), own.hexdigest())


def read_cache(folder: Path) -> TokenCache:
    """A cache that has been written."""
    notes = json.loads((folder / "cache.json").read_text(encoding="utf-8"))
    tokens = _mapped(folder / "tokens.bin", np.dtype(notes["dtype"]))
    files = tuple(FileDigest(name, digest) for name, digest in notes["files"])
    if not (folder / "offsets.bin").exists():
        return TokenCache(tokens, None, None, notes["digest"], files, notes["has_end"], remarks=notes["remarks"])
    counted = _mapped(folder / "counted.bin", np.dtype(np.uint8))
    offsets = _mapped(folder / "offsets.bin", np.dtype(np.int64))
    return TokenCache(
        tokens, counted, offsets, notes["digest"], files, notes["has_end"], notes["prompt_end"], notes["remarks"]
    )


def write_cache(config: RunFile, work: Path, where: str, workers: int, report: Report) -> None:
    """Tokenize a run's data into an empty folder, by so many processes or by this one alone. Raises InvalidInputError
    naming file and line."""
    sources = sources_of(config)
    recipe = recipe_of(config, where)
    cut = text_chunks if recipe.kind == "text" else functools.partial(row_chunks, grows=grows(config))
    in_bytes = recipe.kind == "text" and recipe.tokenizer == "bytes"
    done, whole = 0, sum(source.stat().st_size for source in sources)
    report(done, whole)

    def parts() -> Iterator[TextTokens | SampleTokens]:
        nonlocal done
        chunks: Iterator[Chunk] = (chunk for source in sources for chunk in cut(source))
        for part, size in tokenized(recipe, chunks, 0 if in_bytes else workers):
            yield part
            done += size
            report(min(done, whole), whole)

    dtype, remarks = _dtype(recipe), Counter[str]()
    if hidden := hidden_files(Path(config.data.path), recipe.kind):
        remarks["hidden files"] = hidden
    if recipe.kind == "text":
        digest = _write_texts((part for part in parts() if isinstance(part, TextTokens)), recipe, dtype, work)
    else:
        samples = (part for part in parts() if isinstance(part, SampleTokens))
        digest = _write_samples(samples, dtype, work, remarks)
    files = data_digests(Path(config.data.path), recipe.kind).files
    _write_notes(work, dtype, digest, files, remarks, has_end=recipe.has_end(), prompt_end=recipe.prompt_end())


def recipe_of(config: RunFile, where: str) -> Recipe:
    """How a run's data are tokenized."""
    objective = objective_of(config.objective, config.data.kind)
    return Recipe(
        Path(config.model.path), config.data.kind, config.data.tokenizer, where, objective.sequences,
        objective.encodes_prompts,
    )  # fmt: skip


def write_chunk(recipe: Recipe, encode: Encode, chunk: Chunk, work: Path) -> None:
    """Tokenize lines into an empty folder. Raises InvalidInputError naming file and line."""
    parts, dtype = encode(chunk), _dtype(recipe)
    assert isinstance(parts, SampleTokens)
    remarks = Counter[str]()
    digest = _write_samples(iter([parts]), dtype, work, remarks)
    _write_notes(work, dtype, digest, (), remarks, has_end=_has_end(recipe))


def _write_notes(
    work: Path, dtype: np.dtype[Any], digest: str, files: Sequence[FileDigest], remarks: Mapping[str, int], *,
    has_end: bool, prompt_end: int = 0,
) -> None:  # fmt: skip
    named = [[file.name, file.digest] for file in files]
    notes = {"dtype": dtype.str, "digest": digest, "files": named, "has_end": has_end, "prompt_end": prompt_end}
    notes["remarks"] = remarks
    (work / "cache.json").write_text(json.dumps(notes), encoding="utf-8")


@functools.cache
def _has_end(recipe: Recipe) -> bool:
    """Of the chunks of a growing file: the tokenizer is read once."""
    return recipe.has_end()


def _write_texts(parts: Iterator[TextTokens], recipe: Recipe, dtype: np.dtype[Any], work: Path) -> str:
    """The digest of what was written."""
    begin, end = (np.array(ids, np.uint32) for ids in (recipe.begin(), recipe.end()))
    with _HashedFile(work / "tokens.bin") as file:
        for tokens in joined(parts, begin, end):
            file.write(tokens.astype(dtype))
        return file.digest


def _write_samples(parts: Iterator[SampleTokens], dtype: np.dtype[Any], work: Path, remarks: "Counter[str]") -> str:
    """Write the samples' files, count their remarks, and return the digest of what was written."""
    with (
        _HashedFile(work / "tokens.bin") as tokens, _HashedFile(work / "counted.bin") as counted,
        _HashedFile(work / "offsets.bin") as offsets,
    ):  # fmt: skip
        written = 0
        offsets.write(np.zeros(1, "<i8"))
        for part in parts:
            tokens.write(part.tokens.astype(dtype))
            counted.write(part.counted)
            offsets.write((written + np.cumsum(part.lengths)).astype("<i8"))
            written += len(part.tokens)
            remarks.update(part.remarks)
        together = f"{tokens.digest} {counted.digest} {offsets.digest}"
        return hashlib.sha256(together.encode()).hexdigest()


class _HashedFile:
    """A file of arrays, with its SHA-256."""

    def __init__(self, path: Path) -> None:
        self._file, self._hash = path.open("wb"), hashlib.sha256()

    def __enter__(self) -> "_HashedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, array: NDArray[Any]) -> None:
        raw = array.tobytes()
        self._hash.update(raw)
        self._file.write(raw)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def _dtype(recipe: Recipe) -> np.dtype[Any]:
    """The smallest that holds each ID."""
    vocabulary = vocabulary_size(recipe.model)
    if recipe.kind == "text" and recipe.tokenizer == "bytes":
        vocabulary = BYTES_VOCABULARY
    return np.dtype("<u2" if vocabulary is not None and vocabulary <= 65536 else "<u4")


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, dtype)
    mapped: NDArray[Any] = np.asarray(np.memmap(path, dtype, mode="r"))  # a memmap's own slices are slower by far
    return mapped
