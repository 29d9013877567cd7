"""Disks whose power goes: ext4 on a loop device, and what its file held at one moment.

The file has what ext4 has given to its device, in whatever order; what waits in the page cache is lost with the power.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.waiting import Patience

SIZE_BYTES = 64 * 1024 * 1024


class CutDisk:
    """An ext4 file system that is mounted at a folder; use it as a context manager, or `close` it."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image, self.folder, self._device, self._cuts = image, folder, "", 0
        folder.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        self._mount()

    def __enter__(self) -> "CutDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mount(self) -> None:
        self._device = _run("losetup", "--find", "--show", str(self.image))
        with contextlib.ExitStack() as failed:
            failed.callback(self._detach)
            _run("mount", "-t", "ext4", self._device, str(self.folder))
            failed.pop_all()

    def _detach(self) -> None:
        device, self._device = self._device, ""
        if device:
            _run("losetup", "--detach", device)

    def close(self) -> None:
        """Unmount it, even if it is in use, and free its device."""
        if self._device:
            _run("umount", "--lazy", str(self.folder))
            self._detach()

    def restart(self, content: bytes) -> None:
        """Mount what a cut has left in place of what is there. ext4 replays its journal, as after a power cut."""
        self.close()
        self.image.unlink()
        self._cuts += 1
        self.image = self.image.with_suffix(f".{self._cuts}")
        with self.image.open("wb") as file:
            file.truncate(SIZE_BYTES)
            for start in range(0, SIZE_BYTES, 1 << 16):
                if any(piece := content[start : start + (1 << 16)]):
                    file.seek(start)
                    file.write(piece)
        self._mount()


def cut(disks: Sequence[CutDisk]) -> list[bytes]:
    """What the disks hold at one moment: two reads of all of them in a row were equal."""
    patience = Patience(30.0)
    before = _read(disks)
    while (now := _read(disks)) != before:
        assert not patience.is_over(), "the disks are never still"
        before = now
    return now


def _read(disks: Sequence[CutDisk]) -> list[bytes]:
    return [disk.image.read_bytes() for disk in disks]


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


def named_after(folder: Path, steps: set[int], seconds: float) -> set[int]:
    """The steps of the checkpoints in a folder as soon as there is one that isn't among `steps`."""
    patience = Patience(seconds)
    while not (found := _steps(folder)) - steps:
        assert not patience.is_over(), "no further checkpoint"
        time.sleep(0.002)
    return found


def _steps(folder: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.name.startswith("step-")}
    return set()
