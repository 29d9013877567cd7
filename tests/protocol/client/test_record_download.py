"""Records from an agent arrive whole or not at all, also after an interruption, or if the agent lost its copy."""

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from trainctl.protocol.client.record_download import download_record
from trainctl.protocol.errors import RefusedError, UnreachableError
from trainctl.protocol.messages import RECORD_PART_BYTES, RecordPart, RecordRequest

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
