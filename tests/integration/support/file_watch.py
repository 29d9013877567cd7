"""A watch over a folder: what any process does to its files, by inotify."""

import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.waiting import Patience

_EVENT = struct.Struct("iIII")
_MASK = 0x1 | 0x2 | 0x4 | 0x20 | 0x100 | 0x200 | 0xC0
"""Access, change, attributes, opening, making, removal and moves."""
_OPENED = 0x20


class FileWatch:
    """All of a folder's files; `touched` names those that something was done to since it was last asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._libc = folder, ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> Self:
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        added = self._libc.inotify_add_watch(self._descriptor, os.fsencode(self.folder), _MASK)
        if self._descriptor < 0 or added < 0:
            raise OSError(ctypes.get_errno(), "inotify")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def touched(self) -> list[str]:
        """By name. A file of its own, opened here, comes last, so that nothing is missed."""
        marker = self.folder / ".last"
        marker.write_bytes(b"")
        found: list[str] = []
        patience = Patience(10)
        while True:
            try:
                said = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                assert not patience.is_over(), "inotify says nothing of the marker"
                continue
            place = 0
            while place < len(said):
                _, mask, _, length = _EVENT.unpack_from(said, place)
                name = said[place + _EVENT.size : place + _EVENT.size + length].rstrip(b"\0").decode()
                place += _EVENT.size + length
                if name == marker.name and mask & _OPENED:
                    return found
                if name and name != marker.name:
                    found.append(name)
