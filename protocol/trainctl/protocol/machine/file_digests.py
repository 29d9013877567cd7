"""Digests by which ranks, and the doctor, know that nodes hold the same model and data files."""

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainctl.protocol.config.data_files import data_files, glob_root, is_glob
from trainctl.protocol.config.model_facts import weight_files
from trainctl.protocol.config.run_tables import DataKind
from trainctl.protocol.messages import FileDigest

Check = Callable[[], None]
MAX_FILES = 64
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileDigests:
    """The digests of some files: of all together, and of each, so that the one that differs can be named."""

    whole: str
    files: tuple[FileDigest, ...]  # at most MAX_FILES: the last one counts for the rest


def files_digests(files: Iterable[Path], root: Path, check: Check = lambda: None) -> FileDigests:
    """SHA-256 over the name, size and content of each file, in the order given; in the list, files are named from
    `root`. `check` is called before each part that is read; what it raises ends the reading."""
    whole, each = hashlib.sha256(), []
    for path in files:
        own = hashlib.sha256()
        for part in _parts(path):
            check()
            whole.update(part)
            own.update(part)
        each.append(FileDigest(path.relative_to(root).as_posix(), own.hexdigest()))
    return FileDigests(whole.hexdigest(), listed(each))


def file_digest(path: Path) -> str:
    """SHA-256 over one file's name, size and content, as nodes compare it. Raises OSError."""
    digest = hashlib.sha256()
    for part in _parts(path):
        digest.update(part)
    return digest.hexdigest()


def model_digests(model: Path, check: Check = lambda: None) -> FileDigests:
    """Return the digests of a Hugging Face directory's configuration and weights. Raises InvalidInputError as
    `weight_files`."""
    return files_digests([model / "config.json", *weight_files(model)], model, check)


def data_digests(path: Path, kind: DataKind, check: Check = lambda: None) -> FileDigests:
    """Return the digests of the files that data of a kind are read from."""
    root = path if path.is_dir() else glob_root(path) if is_glob(path) else path.parent
    return files_digests(data_files(path, kind), root, check)


def _parts(path: Path) -> Iterator[bytes]:
    """Raise OSError, also for what isn't a regular file: a pipe may wait, and a device may never end."""
    with open(path, "rb", opener=_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if found.st_blocks == 0 and os.fstatvfs(file.fileno()).f_blocks == 0:  # as of /proc/kcore, of 128 TB
            raise OSError(errno.EINVAL, "not on a disk: the kernel makes it as it is read", str(path))
        yield f"{path.name} {found.st_size}\n".encode()
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def listed(each: list[FileDigest]) -> tuple[FileDigest, ...]:
    """Return at most MAX_FILES of the files: the last one counts for the rest."""
    if len(each) <= MAX_FILES:
        return tuple(each)
    rest = each[MAX_FILES - 1 :]
    together = hashlib.sha256("".join(f"{file.name} {file.digest}\n" for file in rest).encode()).hexdigest()
    return (*each[: MAX_FILES - 1], FileDigest(f"{len(rest)} more files", together))
