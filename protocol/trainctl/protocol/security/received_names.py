"""Names of files and folders that come from another machine, and the files that they stand for below a folder here.

Every such name passes `check`, alone or by one of the other functions. A name is one part of a path, of a closed set of
characters. `opened` follows no link below the folder and opens only regular files. `below` and `id_folder` look for
links before they return a path; who can replace a folder by a link after that needs no message from another machine.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Literal

from trainctl.protocol.config.names import FILE_PATTERN, ID_PATTERN
from trainctl.protocol.errors import InvalidInputError

_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_FLAGS = {"read": os.O_RDONLY | os.O_NONBLOCK, "write": os.O_RDWR | os.O_CREAT | os.O_NONBLOCK}


def check(*names: str) -> None:
    """Refuse what is no name. Raises InvalidInputError."""
    for name in names:
        if not re.match(FILE_PATTERN, name):
            raise InvalidInputError("name", f"{name[:200]!r} is not a name: use letters, digits, '.', '_' and '-'")


def below(root: Path, *names: str) -> Path:
    """Return the path of `names`, one part each, below the folder `root`. Raises InvalidInputError for what is no name,
    and where a link stands in the way."""
    check(*names)
    path = root
    for name in names:
        path = unlinked(path / name)
    return path


def id_folder(root: Path, id: str, field: str = "run") -> Path:
    """Return the folder below `root` of the run or separate work with this ID. Raises InvalidInputError, blaming
    `field`, for what is no ID, and where a link stands in the way."""
    if not re.match(ID_PATTERN, id):
        raise InvalidInputError(field, f"{id[:200]!r} is not an ID: use lower-case letters, digits, '.', '_' and '-'")
    return below(root, id)


def unlinked(path: Path) -> Path:
    """Return the path if it is no link. Raises InvalidInputError if it is one."""
    if path.is_symlink():
        raise InvalidInputError("name", f"{path} is a link: remove it")
    return path


@contextlib.contextmanager
def opened(root: Path, *names: str, to: Literal["read", "write"] = "read") -> Iterator[BufferedIOBase]:
    """Open the regular file `names`, one part each, below the folder `root`; to write, as an empty one, in folders that
    exist. Raises InvalidInputError for what is no name, and OSError, also for a link or another kind of file."""
    check(*names)
    descriptor = _descriptor(root, names, _FLAGS[to] | _NO_LINK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(root.joinpath(*names)))
    file: BufferedIOBase = os.fdopen(descriptor, "rb") if to == "read" else os.fdopen(descriptor, "r+b")
    with file:
        if to == "write":
            file.truncate()
        yield file


def _descriptor(root: Path, names: Sequence[str], flags: int) -> int:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(names[-1], flags, 0o666, dir_fd=folder)
    except OSError as error:
        said = "a link is in its place" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, said, str(root.joinpath(*names))) from None
    finally:
        os.close(folder)
