"""Token caches: tokens in flat files, made once on a node for each content of the sources, then memory-mapped.

A cache is a folder: tokens.bin (uint16, or uint32 where ids need it), for rows and samples also counted.bin (one byte a
token: its loss counts as a target) and offsets.bin (int64, one more than there are samples), and cache.json that
describes them.

Texts are laid end to end, each between the begin and the end token if there are such, files in ascending order of their
path.
"""

import errno
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from trainctl.trainer.data.chunk_tokens import Encode, Recipe, joined, text_chunks
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.data.rows import Chunk, row_chunks

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES = "additional_chat_templates"
_LIBRARIES = ("jinja2", "tokenizers", "transformers")
_DATA_CODE = ("chat_template", "chunk_tokens", "row_tokens", "rows", "token_cache", "tokenizer_file")
"""Modules of this folder that decide what a row or a text tokenizes to."""
_BLOCK_TOKENS = 1 << 22
"""Tokens whose flags are looked through at once: a cache may be larger than memory."""
_PROBES = 16
"""Places of a file at which `drop_pages` looks."""

Report = Callable[[int, int], object]
"""Takes the bytes tokenized so far, and all there are."""


def no_report(done: int, whole: int) -> None:
    """Keep progress to itself."""


@dataclass(frozen=True)
class TokenCache:
    """Tokens of all sources."""

    tokens: NDArray[Any]
    counted: NDArray[np.uint8]  # 1 where a token's loss counts as a target
    offsets: NDArray[np.int64] | None  # None: of texts
    digest: str  # of the tokens
    files: tuple[FileDigest, ...]  # the sources
    has_end: bool = True  # texts and completions end with a token
    prompt_end: int = 0  # special tokens that end each prompt for an encoder
    remarks: Mapping[str, int] = field(default_factory=dict)  # what was left out of the sources, and how often

    def lengths_and_counts(self, length: int) -> tuple[Indices, NDArray[np.float64]]:
        """Return the targets of each sample, and how many of its first `length` count."""
        assert self.offsets is not None
        counts = np.empty(len(self.offsets) - 1)
        begin = 0
        while begin < len(counts):
            limit = self.offsets[begin] + _BLOCK_TOKENS
            end = max(begin + 1, int(np.searchsorted(self.offsets, limit, side="right")) - 1)
            places = self.offsets[begin : end + 1] - self.offsets[begin]
            flags = self.counted[self.offsets[begin] : self.offsets[end]]
            before = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])  # counted among the tokens before each
            first = places[:-1] + 1
            counts[begin:end] = before[np.minimum(places[1:], first + length)] - before[first]
            begin = end
        return np.diff(self.offsets) - 1, counts

    def equal_pairs(self, length: int) -> NDArray[np.bool_]:
        """[pairs] Whether both halves of a pair have the same first `length` + 1 tokens, so that its margin is always
        0."""
        assert self.offsets is not None
        begins, widths = self.offsets[:-1], np.minimum(np.diff(self.offsets), length + 1)
        last = self.tokens[begins + widths - 1]
        equal: NDArray[np.bool_] = (widths[0::2] == widths[1::2]) & (last[0::2] == last[1::2])
        for pair in np.flatnonzero(equal):
            chosen, rejected = (self.tokens[begins[half] :][: widths[half]] for half in (2 * pair, 2 * pair + 1))
            equal[pair] = np.array_equal(chosen, rejected)
        return equal


# ------------------------------------------------------------ names


def sources_of(config: RunFile) -> list[Path]:
    """Return the files that a run's data are read from."""
    return data_files(Path(config.data.path), config.data.kind)


def cache_name(config: RunFile) -> str:
    """Return a name after everything a cache depends on: the sources by path, size and time of change, and how they
    are read."""
    return f"tokens-{_digest_of(config, _stats(sources_of(config) + _readers(config)))[:16]}"


def chunk_name(config: RunFile, lines: Sequence[bytes]) -> str:
    """Return the `cache_name` of lines by their content, wherever they are."""
    content = hashlib.sha256(b"".join(lines)).hexdigest()
    digest = _digest_of(config, ["chunk", content, *_stats(_readers(config))])
    return f"chunks-{digest[:2]}/tokens-{digest[:32]}"


def _readers(config: RunFile) -> list[Path]:
    """Return the files that say how sources are read."""
    model = Path(config.model.path)
    paths: list[Path] = []
    if config.data.tokenizer == "model":
        paths = [*(model / name for name in _TOKENIZER_FILES), *sorted((model / _TEMPLATES).glob("*.jinja"))]
    if objective_of(config.objective, config.data.kind).encodes_prompts:
        paths.append(model / "generation_config.json")
    return [model / "config.json", *(path for path in paths if path.exists())]


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
    """Map a cache that has been written."""
    notes = json.loads((folder / "cache.json").read_text(encoding="utf-8"))
    tokens = _mapped(folder / "tokens.bin", np.dtype(notes["dtype"]))
    files = tuple(FileDigest(name, digest) for name, digest in notes["files"])
    counted, offsets = all_counted(tokens), None
    if (folder / "offsets.bin").exists():
        counted = _mapped(folder / "counted.bin", np.dtype(np.uint8))
        offsets = _mapped(folder / "offsets.bin", np.dtype(np.int64))
    return TokenCache(
        tokens, counted, offsets, notes["digest"], files, notes["has_end"], notes["prompt_end"], notes["remarks"]
    )


def all_counted(tokens: NDArray[Any]) -> NDArray[np.uint8]:
    """Return flags by which every token counts, which take no memory."""
    return np.broadcast_to(np.uint8(1), tokens.shape)


# ------------------------------------------------------------ writing


def write_cache(config: RunFile, work: Path, where: str, report: Report) -> None:
    """Tokenize a run's data into an empty folder. Raises InvalidInputError naming file and line."""
    sources, recipe = sources_of(config), recipe_of(config, where)
    whole = sum(source.stat().st_size for source in sources)

    def chunks() -> Iterator[Chunk]:
        """Yield all chunks; those read count as done."""
        cut, done = text_chunks if recipe.kind == "text" else functools.partial(row_chunks, grows=grows(config)), 0
        for source in sources:
            for chunk in cut(source):
                report(min(done, whole), whole)
                yield chunk
                done += chunk.size

    report(0, whole)
    remarks = Counter[str]()
    if hidden := hidden_files(Path(config.data.path), recipe.kind):
        remarks["hidden files"] = hidden
    digest = _write_tokens(recipe, recipe.encoder(), chunks(), work, remarks)
    report(whole, whole)
    _write_notes(recipe, work, digest, data_digests(Path(config.data.path), recipe.kind).files, remarks)


def recipe_of(config: RunFile, where: str) -> Recipe:
    """Return how a run's data are tokenized."""
    objective = objective_of(config.objective, config.data.kind)
    model, data = Path(config.model.path), config.data
    return Recipe(model, data.kind, data.tokenizer, where, objective.sequences, objective.encodes_prompts)


def write_chunk(recipe: Recipe, encode: Encode, chunk: Chunk, work: Path) -> None:
    """Tokenize lines into an empty folder. Raises InvalidInputError naming file and line."""
    remarks = Counter[str]()
    _write_notes(recipe, work, _write_tokens(recipe, encode, [chunk], work, remarks), (), remarks)


def _write_tokens(recipe: Recipe, encode: Encode, chunks: Iterable[Chunk], work: Path, remarks: "Counter[str]") -> str:
    """Write what chunks tokenize to, count their remarks, and return the digest of what was written."""
    parts: Iterator[Any] = encode(chunks)
    if recipe.kind == "text":
        begin, end = (np.array(part, np.uint32) for part in (recipe.begin, recipe.end))
        with _HashedFile(work / "tokens.bin") as file:
            for ids in joined(parts, begin, end):
                file.write(ids.astype(recipe.dtype))
            return file.digest
    with (
        _HashedFile(work / "tokens.bin") as tokens,
        _HashedFile(work / "counted.bin") as counted,
        _HashedFile(work / "offsets.bin") as offsets,
    ):
        written = 0
        offsets.write(np.zeros(1, "<i8"))
        for part in parts:
            tokens.write(part.tokens.astype(recipe.dtype))
            counted.write(part.counted)
            offsets.write((written + np.cumsum(part.lengths)).astype("<i8"))
            written += len(part.tokens)
            remarks.update(part.remarks)
        return hashlib.sha256(f"{tokens.digest} {counted.digest} {offsets.digest}".encode()).hexdigest()


def _write_notes(
    recipe: Recipe, work: Path, digest: str, files: Sequence[FileDigest], remarks: Mapping[str, int]
) -> None:
    notes = {
        "dtype": recipe.dtype.str,
        "digest": digest,
        "files": [[file.name, file.digest] for file in files],
        "has_end": recipe.has_end,
        "prompt_end": recipe.prompt_end,
        "remarks": remarks,
    }
    (work / "cache.json").write_text(json.dumps(notes), encoding="utf-8")


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


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, dtype)
    mapped: NDArray[Any] = np.asarray(np.memmap(path, dtype, mode="r"))  # a memmap's own slices are slower by far
    return mapped


# ------------------------------------------------------------ the system's page cache


def drop_pages(files: Iterable[Path]) -> bool:
    """Drop files' pages from memory, written to the disk first. Return whether they are gone; False where the system
    can't tell. Pages that a process has mapped stay."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    are_gone = True
    for path in files:
        with path.open("rb", buffering=0) as opened:
            file = opened.fileno()
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            are_gone &= not _is_cached(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # a look begins to read what it doesn't find
    return are_gone


def _is_cached(file: int) -> bool:
    """Return whether any of a few places spread over the file is in memory; a read that may not wait says so."""
    size = os.fstat(file).st_size
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # a look begins to read no more than its own page
    for probe in range(_PROBES if size else 0):
        try:
            if os.preadv(file, [bytearray(1)], size * probe // _PROBES, os.RWF_NOWAIT) > 0:
                return True
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return True
    return False
