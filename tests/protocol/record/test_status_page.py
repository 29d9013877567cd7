"""The status page: what is shown is read, whole or not at all."""

import os
import threading
from pathlib import Path

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.protocol.record import status_page


def test_what_is_shown_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.status"
    assert status_page.read_status(path) is None
    writer = status_page.StatusWriter(path, os.getpid())
    first = status_page.read_status(path)
    assert first is not None
    assert first[:5] == (os.getpid(), 0, 0, 0, "starting")
    writer.show("forward", step=7, generation=(1, 4))
    for phase in status_page.STATUS_PHASES:
        writer.show(phase)
        assert (status_page.read_status(path) or ())[:5] == (os.getpid(), 1, 4, 7, phase)
    writer.close()
    assert status_page.read_status(path) is not None


@pytest.mark.parametrize("content", [b"", b"short", bytes(64), b"\x01" + bytes(63), b"\xff" * 64])
def test_a_page_that_is_torn_empty_or_odd_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "page"
    path.write_bytes(content)
    assert status_page.read_status(path) is None


def test_no_reader_sees_half_an_update(tmp_path: Path) -> None:
    path = tmp_path / "page"
    writer = status_page.StatusWriter(path, 1)
    writer.show("idle", step=0, generation=(0, 0))
    done = threading.Event()

    def write() -> None:
        for step in range(1, 3000):
            writer.show("forward", step=step, generation=(step, step))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    looks = 0
    while not done.is_set() or looks == 0:
        seen = status_page.read_status(path)
        looks += 1
        assert seen is None or seen.step == seen.term == seen.n
    thread.join(timeout=HANG_SECONDS)
    writer.close()
