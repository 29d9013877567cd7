"""The newest reports that a trainer kept in its own record: its agent may have missed some of them."""

from contextlib import closing, suppress
from pathlib import Path

from trainctl.protocol import messages as m
from trainctl.protocol.errors import ProtocolError, TrainctlError
from trainctl.protocol.record.schema import UNREADABLE, open_for_reading
from trainctl.protocol.wire.codec import decode_answer

NEWEST = 8
"""Newest reports kept: more than a trainer can make without its agent, which plans one step ahead."""


def reports_after(record: Path, step: int) -> list[m.Report]:
    """Return the train reports of the steps above `step`, in their order, as far as they can be read. Raises
    InvalidInputError if there is no such file or it is damaged."""
    found = []
    with closing(open_for_reading(record)) as connection, suppress(*UNREADABLE):  # its trainer may have made no tables
        for (body,) in connection.execute("SELECT body FROM reports WHERE step > ? ORDER BY step", (step,)):
            with suppress(ProtocolError, TypeError):
                if isinstance(report := decode_answer(body), m.Report):
                    found.append(report)
    return found


def newest_reports(record: Path) -> list[m.Report]:
    """The last `NEWEST` of them; none of a record that is missing or can't be read."""
    with suppress(TrainctlError):
        return reports_after(record, 0)[-NEWEST:]
    return []
