"""The status page: what is shown is read, whole or not at all."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainctl.protocol.record import status_page


def test_what_is_shown_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.status"
    assert status_page.read_status(path) is None
    for content in (b"", b"short", bytes(64), b"\x01" + bytes(63), b"\xff" * 64):  # torn, empty or odd
        path.write_bytes(content)
        assert status_page.read_status(path) is None
    path.unlink()
    writer = status_page.StatusWriter(path, os.getpid())
    first = status_page.read_status(path)
    assert first is not None
    assert first == status_page.Status(os.getpid(), 0, 0, 0, "starting", first.changed_at)
    writer.show("forward", step=7, generation=(1, 4))
    for phase in status_page.STATUS_PHASES:
        writer.show(phase)
        seen = status_page.read_status(path)
        assert seen is not None
        assert seen == status_page.Status(os.getpid(), 1, 4, 7, phase, seen.changed_at)
    writer.close()
    assert status_page.read_status(path) is not None


def test_no_reader_sees_half_an_update(tmp_path: Path) -> None:
    writer = status_page.StatusWriter(tmp_path / "page", 1)

    def write() -> None:
        for step in range(3000):
            writer.show("forward", step=step, generation=(step, step))

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        while not writing.done():
            seen = status_page.read_status(tmp_path / "page")
            assert seen is None or seen.step == seen.term == seen.n
        writing.result()
    writer.close()
