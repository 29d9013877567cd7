"""A log's lines in their form, and what has none left as it is."""

import logging

import pytest

from trainctl.protocol.record import log_format

AT = 1763649065.123


def test_what_is_written_is_read_again_and_a_line_of_another_form_stays_whole() -> None:
    for text in ("g1.2 joined: 3 ranks", "", "  indented", "größer ✓"):
        line = log_format.write(AT, "WARNING", text)
        assert line.startswith("2025-11-20T14:31:05.123Z WARNING ")
        assert log_format.read(line) == log_format.LogLine(pytest.approx(AT, abs=1e-3), "WARNING", text)
    for line in (
        "", "Traceback (most recent call last):", "2025-11-20 14:31:05,123 INFO elsewhere",
        "2025-13-20T14:31:05Z INFO x", "[E1120 14:31:05] gloo: peer closed", "2025-11-20T14:31:05.123Z LOUD x",
    ):  # fmt: skip
        assert log_format.read(line) == log_format.LogLine(None, "", line)
    fields = {"levelname": "ERROR", "msg": "rank %s: %s", "args": (0, "no memory"), "created": AT}
    formatted = log_format.Formatter().format(logging.makeLogRecord(fields))
    assert formatted == "2025-11-20T14:31:05.123Z ERROR rank 0: no memory"
