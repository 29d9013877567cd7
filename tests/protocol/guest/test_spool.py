"""The file that stands in for an agent."""

import fcntl
import os
from pathlib import Path

import pytest

from trainctl.guest import spool
from trainctl.guest.spool import Spool


def test_each_opening_begins_with_hello(tmp_path: Path) -> None:
    file = Spool(tmp_path, "r1")
    file.write(b"hello\n", [b"a\n"])
    file.write(b"hello\n", [b"b\n"])
    file.close()
    with file.path.open("ab") as left:
        left.write(b'{"type":"st')  # of a loop that was killed
    Spool(tmp_path, "r1").write(b"hello\n", [b"c\n"])
    assert file.path.read_bytes().split(b"\n") == [b"hello", b"a", b"b", b'{"type":"st', b"hello", b"c", b""]
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_an_agent_has_read_is_made_again(tmp_path: Path) -> None:
    file = Spool(tmp_path, "r1")
    file.write(b"hello\n", [])
    reader = os.open(file.path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(reader, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.close()
    fcntl.flock(reader, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(BlockingIOError):
        Spool(tmp_path, "r1").write(b"hello\n", [])
    file.path.unlink()
    file.write(b"again\n", [])
    assert file.path.read_bytes() == b"again\n"
    os.close(reader)


def test_lines_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Spool(tmp_path, "r1")
    file.write(b"hello\n", [b"a\n"])
    whole, real = file.path.read_bytes(), os.write

    def full(number: int, text: bytes) -> int:
        if len(text) <= 3:
            raise OSError(28, "No space left on device")
        return real(number, bytes(text)[:3])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.write(b"hello\n", [b"bcdef\n"])
    monkeypatch.undo()
    assert file.path.read_bytes() == whole
    monkeypatch.setattr(spool, "MAX_BYTES", 20)
    with pytest.raises(OSError, match="has reached"):
        file.write(b"hello\n", [b"0123456789abcdef\n"])
