"""Copies of records and traces that clients read in parts: whole, bounded, and refused with one line."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from tests.node_agent.support.records import part, step
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.clients import record_copies
from trainctl.node_agent.clients.queries import _read_trace
from trainctl.node_agent.clients.record_copies import RecordCopies
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import RECORD_PART_BYTES, RecordRequest
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

STEPS = 200


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run-1")
    paths.directory.mkdir()
    commit(paths, 1, STEPS)
    return paths


def commit(paths: RunPaths, first: int, last: int) -> None:
    with RunDb(paths) as recorder:
        for number in range(first, last + 1):
            recorder.commit(step(number), [part(number, rank) for rank in range(4)], 1000.0 + number)


async def test_a_copy_is_the_record_of_one_moment_while_it_is_written(paths: RunPaths, tmp_path: Path) -> None:
    copies = RecordCopies()
    first = await copies.part(RecordRequest("a", None), paths)
    commit(paths, STEPS + 1, STEPS + 50)
    assert first.size_bytes > 2 * RECORD_PART_BYTES
    content = first.data
    while len(content) < first.size_bytes:
        content += (await copies.part(RecordRequest("b", None, first.digest, len(content)), paths)).data
    assert hashlib.sha256(content).hexdigest() == first.digest
    assert not [*paths.directory.glob(".*")], "a copy has no name on the disk"
    directory = tmp_path / "copy" / "run-1"
    directory.mkdir(parents=True)
    (directory / "record.db").write_bytes(content)
    with RecordReader(directory) as copy, RecordReader(paths) as kept:
        last = copy.last_step()
        assert last is not None and last.step == STEPS
        assert copy.steps(0, STEPS)[0] == kept.steps(0, STEPS)[0]
        assert copy.parts_between(1, STEPS) == kept.parts_between(1, STEPS)
    copies.close()


async def test_a_request_that_comes_twice_makes_one_copy_and_an_unknown_one_is_refused(paths: RunPaths) -> None:
    copies = RecordCopies()
    twice = await asyncio.gather(*(copies.part(RecordRequest("a", None), paths) for _ in range(2)))
    assert twice[0] == twice[1] and len(copies._copies) == 1
    with pytest.raises(InvalidInputError, match="gone"):
        await copies.part(RecordRequest("b", None, "0" * 64), paths)
    copies.close()


async def test_copies_are_few_and_go_when_nobody_reads_them(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_copies, "MAX_COPIES", 2)
    monkeypatch.setattr(record_copies, "IDLE_SECONDS", 0.05)
    copies, digests = RecordCopies(), []
    for number in range(3):
        commit(paths, STEPS + number + 1, STEPS + number + 1)
        digests.append((await copies.part(RecordRequest(str(number), None), paths)).digest)
    assert len({*digests}) == 3
    assert {*copies._copies} <= {*digests[1:]}
    async with asyncio.timeout(HANG_SECONDS):
        while copies._copies:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("bound", "value"), [("MAX_BYTES", 10), ("SPARE_BYTES", 1 << 62), ("MAX_SECONDS", -1.0)])
async def test_a_copy_beyond_its_bounds_is_refused_and_leaves_nothing(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, bound: str, value: float
) -> None:
    monkeypatch.setattr(record_copies, bound, value)
    with pytest.raises(InvalidInputError, match="run: "):
        await RecordCopies().part(RecordRequest("a", None), paths)
    assert not [*paths.directory.glob(".*")]


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
