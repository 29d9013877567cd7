"""The newest reports that a trainer kept in its own record: its agent may have missed some of them."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.wire.codec import decode_answer

NEWEST = 8
"""Newest reports kept: more than a trainer can make without its agent, which plans one step ahead."""


def reports_after(record: Path, step: int) -> list[m.Report]:
    """Train reports of the steps above `step`, in their order; none of a record without tables. Raises
    InvalidInputError if there is no such file, ProtocolError for one of another program version."""
    with closing(open_for_reading(record)) as connection, suppress(sqlite3.DatabaseError):
        rows = connection.execute("SELECT body FROM reports WHERE step > ? ORDER BY step", (step,)).fetchall()
        return [report for (body,) in rows if isinstance(report := decode_answer(body), m.Report)]
    return []  # its trainer died before it had made its tables


def newest_reports(record: Path) -> list[m.Report]:
    """The last `NEWEST` of them; none of a record that is missing or can't be read."""
    with suppress(TrainctlError):
        return reports_after(record, 0)[-NEWEST:]
    return []
