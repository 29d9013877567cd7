"""Parts of a trace that a client asks for: what cannot be read is refused with one line."""

from pathlib import Path

import pytest

from trainctl.node_agent.clients.queries import _read_trace
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError

NAME = "rank-0.steps-3-4.trace.json.gz"
REQUEST = m.TraceRequest(rid="r", run="r", node="a", file=NAME, offset_bytes=2)


def test_a_trace_is_read_from_an_offset_and_one_that_is_gone_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"a no longer has {NAME}"):
        _read_trace(REQUEST, tmp_path)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / NAME).write_bytes(b"content")
    part = _read_trace(REQUEST, tmp_path)
    assert (part.data, part.size_bytes, part.offset_bytes) == (b"ntent", 7, 2)
    (tmp_path / "profiles" / NAME).unlink()
    (tmp_path / "profiles" / NAME).mkdir()
    with pytest.raises(InvalidInputError) as refused:
        _read_trace(REQUEST, tmp_path)
    assert refused.value.problem == f"a can't read {NAME}: not a regular file"
