"""Where compiled code is kept: in a folder to which only this user can write, since what is in it is run."""

import os
import stat
import sys
from pathlib import Path


def code_cache(name: str) -> Path:
    """A folder for one compiler's code, made where it isn't there. Raises OSError, with a text that names the folder
    and what is wrong."""
    default = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or default) / "trainctl" / name
    for one in (folder.parent, folder):
        if fault := _fault(one):
            raise OSError(f"{one}, where compiled code is kept, {fault}")
    return folder


def _fault(folder: Path) -> str | None:
    """Why code from a folder can't be run."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        link, found = folder.lstat(), folder.stat()
    except OSError as error:
        return f"can't be made: {error.strerror}"
    if {link.st_uid, found.st_uid} != {os.geteuid()}:
        return "belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written to by other users (chmod go-w)"
    return None if os.access(folder, os.W_OK | os.X_OK) else "can't be written to"
