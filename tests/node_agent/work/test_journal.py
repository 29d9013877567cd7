"""The journal of separate work: rows in parts, results in row order, and everything again after a restart."""

import hashlib
from pathlib import Path

import pytest

from trainctl.node_agent.work.dealer import Slice
from trainctl.node_agent.work.journal import Journal, Opened
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError

ROWS = "".join(f'{{"text":"row {number} \u00e4"}}\n' for number in range(6)).encode()


def opened(data: bytes = ROWS) -> Opened:
    request = m.OpenWork(
        rid="r", work="abcd", kind="log-probabilities", run="run-1", rows=6, size_bytes=len(data),
        digest=hashlib.sha256(data).hexdigest(),
    )  # fmt: skip
    return Opened(request, 4, ("studio",))


def filled(folder: Path) -> Journal:
    journal = Journal(folder, opened())
    for offset in range(0, len(ROWS), 7):
        journal.receive(offset, ROWS[offset : offset + 7])
        journal.receive(offset, ROWS[offset : offset + 7])  # sent again, for the reply was lost
    return journal


def test_rows_that_differ_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "work", opened())
    journal.receive(0, ROWS.replace(b"row 0", b"row 9"))
    with pytest.raises(InvalidInputError, match="differ"):
        journal.seal()
    with pytest.raises(InvalidInputError, match="more rows"):
        journal.receive(len(ROWS), b"x")


def test_results_come_in_row_order_up_to_the_first_that_is_missing(tmp_path: Path) -> None:
    journal = filled(tmp_path / "work")
    slices = [Slice(0, 0, 2), Slice(1, 2, 2), Slice(2, 4, 2)]
    for one in slices:
        journal.dealt(one, "studio")
    journal.answered(slices[2], "studio", [b"4", b"5"])
    assert journal.results(0, 100, 1000) == ()
    journal.answered(slices[0], "studio", [b"0", b"1"])
    assert journal.results(0, 100, 1000) == (b"0", b"1")
    journal.dealt(slices[1], "mbp")
    journal.answered(slices[1], "mbp", [b"2", b"3"])
    assert journal.results(1, 3, 1000) == (b"1", b"2", b"3")
    assert journal.results(0, 100, 20) == (b"0", b"1")


def test_a_journal_opened_again_continues(tmp_path: Path) -> None:
    journal = filled(tmp_path / "work")
    assert journal.is_whole and sum(journal.seal()) == len(ROWS)
    assert journal.rows(Slice(0, 2, 3)) == tuple(ROWS.decode().splitlines()[2:5])
    journal.state = "running"
    journal.dealt(Slice(0, 0, 4), "studio")
    journal.answered(Slice(0, 0, 4), "studio", [b"0", b"1", b"2", b"3"])
    journal.dealt(Slice(1, 4, 1), "mbp")
    journal.close()
    again = Journal(tmp_path / "work")
    assert (again.opened, again.state, again.is_whole) == (opened(), "running", True)
    assert [*again.slices()] == [(Slice(0, 0, 4), True), (Slice(1, 4, 1), False)]
    with pytest.raises(InvalidInputError, match="empty"):
        Journal(tmp_path / "other")
