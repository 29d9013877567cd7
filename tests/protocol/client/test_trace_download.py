"""Copies of traces: whole or not there, continued after an interruption, and refused if they are another file."""

import asyncio
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainctl.protocol import messages as m
from trainctl.protocol.client.trace_download import download
from trainctl.protocol.errors import InvalidInputError, RefusedError, UnreachableError
from trainctl.protocol.messages import events as e

CONTENT = os.urandom(5 * m.TRACE_PART_BYTES + 17)
TRACE = e.Profiled(
    "mbp", 1, 5, 7, "rank-1.steps-5-7.trace.json.gz", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), ()
)
NAME = f"mbp-{TRACE.file}"


class Node:
    """Has the file; an agent that can be lost."""

    def __init__(self, content: bytes = CONTENT, lost_after: int = 10**9) -> None:
        self.content, self.lost_after, self.asked = content, lost_after, list[int]()

    async def ask(self, request: Any, run: str, node: str, file: str, offset_bytes: int) -> Any:
        assert (request, run, node, file) == (m.TraceRequest, "r", TRACE.node, TRACE.file)
        if offset_bytes >= self.lost_after:
            raise UnreachableError("no answer")
        self.asked.append(offset_bytes)
        data = self.content[offset_bytes : offset_bytes + m.TRACE_PART_BYTES]
        return m.TracePart(rid="", offset_bytes=offset_bytes, size_bytes=len(self.content), data=data)


def fetch(node: Node, folder: Path, trace: e.Profiled = TRACE) -> Path:
    return asyncio.run(download(node, "r", trace, folder))


def test_a_trace_arrives_whole_and_is_not_copied_again(tmp_path: Path) -> None:
    node, folder = Node(), tmp_path / "new"
    path = fetch(node, folder)
    assert path.read_bytes() == CONTENT
    assert [*folder.iterdir()] == [folder / NAME]
    asked = list(node.asked)
    assert fetch(node, folder) == path
    assert node.asked == asked


def test_an_interrupted_copy_is_continued_where_it_ended(tmp_path: Path) -> None:
    lost = Node(lost_after=4 * m.TRACE_PART_BYTES)
    with pytest.raises(UnreachableError):
        fetch(lost, tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / f".{NAME}.part"], "nothing under the trace's own name"
    node = Node()
    assert fetch(node, tmp_path).read_bytes() == CONTENT
    assert min(node.asked) == 4 * m.TRACE_PART_BYTES


def test_a_damaged_copy_leaves_nothing_and_two_programs_do_not_write_one(tmp_path: Path) -> None:
    for content in (CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]), CONTENT[:100]):
        with pytest.raises(RefusedError, match="damaged"):
            fetch(Node(content), tmp_path)
        assert [*tmp_path.iterdir()] == []

    with (tmp_path / f".{NAME}.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match="another program"):
            fetch(Node(), tmp_path)
    assert fetch(Node(), tmp_path).read_bytes() == CONTENT


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    for odd in ({"file": "../../.bashrc"}, {"node": "../x"}, {"file": "a/b"}, {"node": ""}):
        with pytest.raises(InvalidInputError, match="is not a name"):
            fetch(Node(), tmp_path, msgspec.structs.replace(TRACE, **odd))
    assert [*tmp_path.iterdir()] == []
