"""The files that a run's data are read from: one file, those of a folder, or those that a glob matches.

A folder and a glob agree: suffixes count in any case, hidden files and folders don't, links are followed.
"""

import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from trainctl.protocol.config.run_tables import SUFFIXES, DataKind
from trainctl.protocol.errors import InvalidInputError

Split = Literal["train", "held-out", "test"]
_SPLITS: Final[dict[str, Split]] = {
    "train": "train",
    **dict.fromkeys(("valid", "validation", "val", "dev", "eval"), "held-out"),
    "test": "test",
}
"""Parts of a data set by how the names of their files begin, as mlx-lm and datasets have them."""
PARTIAL_FOLDER = ".trainctl-partial"
"""Hidden folder of files that are still being copied."""
_WILDCARDS = frozenset("*?[")
_TO_PARQUET = "python -c \"import datasets; datasets.{read}.to_parquet('rows.parquet')\""
_CONVERSIONS = {
    ".csv": "load_dataset('csv', data_files='{path}', split='train')",
    ".tsv": "load_dataset('csv', data_files='{path}', sep='\\t', split='train')",
    ".arrow": "Dataset.from_file('{path}')",
    ".gz": "load_dataset('json', data_files='{path}', split='train')",
    ".zst": "load_dataset('json', data_files='{path}', split='train')",
    ".bz2": "load_dataset('json', data_files='{path}', split='train')",
    ".xz": "load_dataset('json', data_files='{path}', split='train')",
}
"""The call by which `datasets` reads files that hold rows in a form that isn't read here, by suffix."""
_SAVED_DATASET = "load_from_disk('{path}')"


def data_files(path: Path, kind: DataKind) -> list[Path]:
    """Return the files that data of a kind are read from, in order: a folder's or a glob's by their suffix, or the file
    itself. Raises InvalidInputError for a folder that is linked into itself, and for a link to nothing, a device or the
    like among the files."""
    if not path.is_dir() and not is_glob(path):
        return [path]
    files = [file for file in _files(path) if file.suffix.lower() in SUFFIXES[kind]]
    for file in files:
        if not file.is_file():
            raise InvalidInputError(str(file), "is not a regular file; remove it, or restore what it links to")
    return files


def named_splits(folder: Path, kind: DataKind) -> dict[Split, Path]:
    """Return the parts of a data set in a folder, by the names of its files: a file each, or a glob of several.

    Empty if the folder has no file of training data, or no other part.
    """
    if not folder.is_dir():
        return {}
    files: dict[Split, list[Path]] = {}
    for file in data_files(folder, kind):
        if split := _SPLITS.get(re.split(r"[-_.]", file.name.lower())[0]):
            files.setdefault(split, []).append(file)
    if "train" not in files or len(files) == 1:
        return {}
    return {split: paths[0] if len(paths) == 1 else _glob_of(paths[0]) for split, paths in files.items()}


def _glob_of(file: Path) -> Path:
    return file.with_name(f"{re.split(r'[-_.]', file.name)[0]}*{file.suffix}")


def hidden_files(path: Path, kind: DataKind) -> int:
    """Return how many hidden files `data_files` leaves out of a folder, those in hidden folders among them."""
    if not path.is_dir():
        return 0
    suffixes = SUFFIXES[kind]
    return sum(
        file.suffix.lower() in suffixes
        and any(part.startswith(".") for part in file.relative_to(path).parts)
        and PARTIAL_FOLDER not in file.parts
        for file in path.rglob("*")
    )


def check_form(path: Path, kind: DataKind, where: str) -> None:
    """Raise InvalidInputError, blaming `where`, for rows in a form that must be converted, and say how."""
    if kind != "rows":
        return
    if path.is_dir():
        is_saved = (path / "state.json").is_file() and any(path.glob("*.arrow"))
        read = _SAVED_DATASET if is_saved else None
    else:
        suffix = path.suffix.lower()
        inner = Path(path.stem).suffix.lower()
        read = _CONVERSIONS.get(inner if inner in (".csv", ".tsv") and suffix in _CONVERSIONS else suffix)
    if read is not None:
        line = _TO_PARQUET.format(read=read.format(path=path))
        raise InvalidInputError(where, f"{path} isn't JSON lines or Parquet; to convert it: {line}")


def lacks_files(path: Path, kind: DataKind) -> str:
    """Return what to say about a folder or a glob without data."""
    suffixes = " or ".join(f"*{suffix}" for suffix in SUFFIXES[kind])
    return f"{'matches' if is_glob(path) else 'contains'} no {suffixes} file"


def is_glob(path: Path) -> bool:
    """Return whether a path has wildcards and isn't the name of a file or folder."""
    return glob_root(path) != path and not path.exists()


def glob_root(path: Path) -> Path:
    """Return the folder above the first part with a wildcard; without one, the path itself."""
    first = next((part for part in reversed((path, *path.parents)) if _WILDCARDS & set(part.name)), None)
    return path if first is None else first.parent


def _files(path: Path) -> list[Path]:
    """Return the visible files of a folder or a glob, each once however often links lead to it."""
    if path.is_dir():
        candidates: Iterator[Path] = _walk(path, ())
    else:
        if "**" in path.parts:
            for _ in _walk(glob_root(path), ()):
                pass  # a loop of links is refused before it is followed
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207  as a shell, without hidden files
        candidates = (file for match in matches if not (file := Path(match)).is_dir())
    by_place: dict[Path, Path] = {}
    for file in sorted(candidates):
        by_place.setdefault(file.resolve(), file)
    return [*by_place.values()]


def _walk(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    place = folder.resolve()
    if place in above:
        raise InvalidInputError(str(folder), f"is a link to {place}, a folder above it; remove the link")
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry, (*above, place))
        else:
            yield entry
