"""The ballast: a file that only takes up space, which is freed when the disk is full."""

import os
import shutil
from pathlib import Path

BALLAST_BYTES = 4 * 1024 * 1024
"""Bytes to which SQLite's log grows before it is merged into the database, so that unfinished work fits."""


class Ballast:
    """At most one file at `path`, taken only while the disk has four times its size left."""

    def __init__(self, path: Path, size_bytes: int = BALLAST_BYTES) -> None:
        self._path, self._size = path, size_bytes
        self.take()

    @property
    def taken(self) -> bool:
        return self._path.exists()

    def take(self) -> bool:
        """Take up the room; False if there is too little left."""
        if self.taken:
            return True
        try:
            if shutil.disk_usage(self._path.parent).free < 4 * self._size:
                return False
            # Random bytes: a file system that compresses would keep no room behind zeros.
            self._path.write_bytes(os.urandom(self._size))
        except OSError:
            self.release()
            return False
        return True

    def release(self) -> bool:
        """Give the room back; False if there was none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
