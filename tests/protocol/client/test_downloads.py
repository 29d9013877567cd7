"""Records and traces from an agent arrive whole or not at all, also after an interruption, or if the agent lost its
copy."""

import asyncio
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainctl.protocol.client.downloads import download_record, download_trace
from trainctl.protocol.errors import InvalidInputError, RefusedError, UnreachableError
from trainctl.protocol.messages import (
    RECORD_PART_BYTES,
    TRACE_PART_BYTES,
    RecordPart,
    RecordRequest,
    TracePart,
    TraceRequest,
)
from trainctl.protocol.messages.events import Profiled

CONTENT = os.urandom(9 * RECORD_PART_BYTES + 17)


class Node:
    """Has copies by their digests; it may be out of reach, or lose one, at a part that is asked for."""

    def __init__(self, contents: list[bytes], failures: dict[int, Exception] | None = None) -> None:
        self.contents, self.failures, self.asked = contents, failures or {}, list[int]()
        self.digest = hashlib.sha256(contents[0]).hexdigest()

    async def ask(self, request: Any, run: str | None, digest: str = "", offset_bytes: int = 0) -> Any:
        assert request is RecordRequest and digest in ("", self.digest)
        place = len(self.asked)
        self.asked.append(offset_bytes)
        if place in self.failures:
            failure = self.failures.pop(place)
            if isinstance(failure, RefusedError):
                self.contents.pop(0)
                self.digest = hashlib.sha256(self.contents[0]).hexdigest()
            raise failure
        data = self.contents[0][offset_bytes : offset_bytes + RECORD_PART_BYTES]
        return RecordPart("r", "run-1", self.digest, offset_bytes, len(self.contents[0]), data)


def fetch(node: Node, folder: Path) -> bytes:
    directory = asyncio.run(download_record(node, "run-1", folder))
    assert directory == folder / "run-1"
    assert [*folder.iterdir()] == [directory]
    return (directory / "record.db").read_bytes()


def test_a_record_arrives_whole(tmp_path: Path) -> None:
    assert fetch(Node([CONTENT]), tmp_path) == CONTENT


def test_a_copy_goes_on_after_an_agent_was_out_of_reach(tmp_path: Path) -> None:
    node = Node([CONTENT], {6: UnreachableError("no answer")})
    assert fetch(node, tmp_path) == CONTENT
    assert node.asked.count(RECORD_PART_BYTES) == 1, "what was there was not asked for again"


def test_a_copy_that_is_gone_is_begun_again(tmp_path: Path) -> None:
    newer = CONTENT + b"more"
    assert fetch(Node([CONTENT, newer], {6: RefusedError("digest: gone")}), tmp_path) == newer


def test_a_damaged_copy_leaves_nothing(tmp_path: Path) -> None:
    node = Node([CONTENT])
    node.digest = "0" * 64
    with pytest.raises(RefusedError, match="damaged"):
        asyncio.run(download_record(node, "run-1", tmp_path))
    assert not [*tmp_path.iterdir()]


def test_an_agent_of_an_earlier_version_is_named_in_one_line(tmp_path: Path) -> None:
    class Earlier:
        async def ask(self, request: Any, *args: Any) -> Any:
            raise RefusedError("invalid value 'record-request' - at `$.type`")

    with pytest.raises(RefusedError, match="version of trainctl can't send a record: upgrade it"):
        asyncio.run(download_record(Earlier(), "run-1", tmp_path))


# ---------------------------------------------------------------- traces

TRACE_CONTENT = os.urandom(5 * TRACE_PART_BYTES + 17)
TRACE = Profiled(
    "mbp", 1, 5, 7, "rank-1.steps-5-7.trace.json.gz", len(TRACE_CONTENT), hashlib.sha256(TRACE_CONTENT).hexdigest(), ()
)
TRACE_NAME = f"mbp-{TRACE.file}"


class TraceNode:
    """Has the file; an agent that can be lost."""

    def __init__(self, content: bytes = TRACE_CONTENT, lost_after: int = 10**9) -> None:
        self.content, self.lost_after, self.asked = content, lost_after, list[int]()

    async def ask(self, request: Any, run: str, node: str, file: str, offset_bytes: int) -> Any:
        assert (request, run, node, file) == (TraceRequest, "r", TRACE.node, TRACE.file)
        if offset_bytes >= self.lost_after:
            raise UnreachableError("no answer")
        self.asked.append(offset_bytes)
        data = self.content[offset_bytes : offset_bytes + TRACE_PART_BYTES]
        return TracePart(rid="", offset_bytes=offset_bytes, size_bytes=len(self.content), data=data)


def fetch_trace(node: TraceNode, folder: Path, trace: Profiled = TRACE) -> Path:
    return asyncio.run(download_trace(node, "r", trace, folder))


def test_a_trace_arrives_whole_and_is_not_copied_again(tmp_path: Path) -> None:
    node, folder = TraceNode(), tmp_path / "new"
    path = fetch_trace(node, folder)
    assert path.read_bytes() == TRACE_CONTENT
    assert [*folder.iterdir()] == [folder / TRACE_NAME]
    asked = list(node.asked)
    assert fetch_trace(node, folder) == path
    assert node.asked == asked


def test_an_interrupted_copy_is_continued_where_it_ended(tmp_path: Path) -> None:
    lost = TraceNode(lost_after=4 * TRACE_PART_BYTES)
    with pytest.raises(UnreachableError):
        fetch_trace(lost, tmp_path)
    assert [*tmp_path.iterdir()] == [tmp_path / f".{TRACE_NAME}.part"], "nothing under the trace's own name"
    node = TraceNode()
    assert fetch_trace(node, tmp_path).read_bytes() == TRACE_CONTENT
    assert min(node.asked) == 4 * TRACE_PART_BYTES


def test_a_damaged_copy_leaves_nothing_and_two_programs_do_not_write_one(tmp_path: Path) -> None:
    for content in (TRACE_CONTENT[:-1] + bytes([TRACE_CONTENT[-1] ^ 1]), TRACE_CONTENT[:100]):
        with pytest.raises(RefusedError, match="damaged"):
            fetch_trace(TraceNode(content), tmp_path)
        assert [*tmp_path.iterdir()] == []

    with (tmp_path / f".{TRACE_NAME}.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match="another program"):
            fetch_trace(TraceNode(), tmp_path)
    assert fetch_trace(TraceNode(), tmp_path).read_bytes() == TRACE_CONTENT


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    for odd in ({"file": "../../.bashrc"}, {"node": "../x"}, {"file": "a/b"}, {"node": ""}):
        with pytest.raises(InvalidInputError, match="is not a name"):
            fetch_trace(TraceNode(), tmp_path, msgspec.structs.replace(TRACE, **odd))
    assert [*tmp_path.iterdir()] == []
