"""References that ranks compute together: the lead's answers, and units dealt to ranks that come and go."""

import asyncio
import hashlib
import json
import random
import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.work.dealer import Slice
from trainctl.node_agent.work.reference import PART_VALUES, ReferenceJournal, ReferenceLead, ReferencePass, UnitSizes
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec

NAME = f"reference-{'0f' * 16}"
COUNTS = struct.pack("<3I", 2, 1, 3)


class Port:
    def __init__(self) -> None:
        self.told: list[m.ReferenceSlice] = []

    async def tell(self, order: m.ReferenceSlice) -> bool:
        self.told.append(order)
        return True


@pytest.fixture
def session(tmp_path: Path) -> Any:
    """A run of two ranks, both heard a moment ago."""
    config = run_file.parse({
        "run": {"name": "p", "steps": 3}, "model": {"path": "/m"}, "data": {"path": "/pairs.jsonl", "kind": "rows"},
        "batch": {"global": 8}, "optimizer": {"learning_rate": 1e-5}, "objective": {"kind": "dpo"},
    })  # fmt: skip
    ranks = {rank: SimpleNamespace(ended=False, heard=time.monotonic()) for rank in (0, 1)}
    paths = RunPaths(tmp_path / "alpha" / "runs" / "r")
    conductor = SimpleNamespace(config=config, ranks=ranks)
    fed: list[d.Input] = []

    async def feed(event: d.Input) -> None:
        fed.append(event)

    ports = {0: Port(), 1: Port()}
    return SimpleNamespace(run="r", paths=paths, conductor=conductor, ports=ports, fed=fed, feed=feed)


async def asked(lead: ReferenceLead, session: Any, rank: int = 0, **fields: Any) -> m.ReferenceSlice:
    told = {"ask": 1, "wants": True, "offset": 0, "reference": NAME} | fields
    await lead.take(session, m.ReferenceAsk(run="r", rank=rank, **told))
    answer: m.ReferenceSlice = session.ports[rank].told[-1]
    return answer


async def test_what_ranks_compute_is_handed_on_over_a_restart(session: Any) -> None:
    lead = ReferenceLead("alpha")
    assert not (await asked(lead, session)).known
    first = await asked(lead, session, counts=COUNTS, tokens=COUNTS)
    assert (first.slice, first.first, first.units) == (0, 0, 3)
    assert (await asked(lead, session, rank=1)).slice is None
    lead.close()
    again, values = ReferenceLead("alpha"), struct.pack("<6f", *range(6))
    done = {"slice": 0, "first": 0, "units": 3, "values": (values[:20], values[20:])}
    answer = await asked(again, session, **done)
    assert (answer.values, answer.answered) == (values, 3)
    while not answer.digest:
        await asyncio.sleep(0)
        answer = await asked(again, session, rank=1, offset=4)
    assert (answer.offset, answer.values) == (4, values[16:])
    assert answer.digest == hashlib.sha256(values).hexdigest()
    again.ended()
    assert not [*session.paths.node_data.iterdir()]
    assert session.fed == [d.Computing(0), d.Computing(1)] * 2


async def test_what_a_failed_run_has_computed_is_kept_for_the_next_one(session: Any) -> None:
    lead = ReferenceLead("alpha")
    counts = struct.pack("<5I", 2, 2, 2, 2, 1)
    first = await asked(lead, session, counts=counts, tokens=counts)
    values = struct.pack("<8f", *range(8))
    await asked(lead, session, slice=first.slice, first=0, units=4, values=(values,), wants=False)
    lead.ended()
    session.run = "s"
    answer = await asked(lead, session)
    assert (answer.known, answer.answered, answer.first, answer.values) == (True, 4, 4, values)
    lead.close()


async def test_what_this_node_has_in_its_caches_is_handed_on(session: Any) -> None:
    values, folder = bytes(range(256)) * 256, session.paths.node_data / NAME
    folder.mkdir(parents=True)
    (folder / "values.bin").write_bytes(values)
    digest = hashlib.sha256(values).hexdigest()
    (folder / "reference.json").write_text(json.dumps({"key": [], "digest": digest}))
    lead, found = ReferenceLead("alpha"), b""
    while len(found) < len(values):
        answer = await asked(lead, session, offset=len(found) // 4)
        assert (answer.digest, answer.slice, len(answer.values) <= PART_VALUES * 4) == (digest, None, True)
        relay = m.PeerRelay(link="f" * 16, seq=2**40, rank=1, order=answer)
        assert len(codec.encode(relay)) < codec.CONTROL_FRAME_BYTES
        found += answer.values
    assert found == values
    assert not (await asked(lead, session, digest=digest, offset=len(values) // 4)).values


async def test_a_rank_whose_slice_another_has_computed_gets_the_next_one(session: Any) -> None:
    """The lead's agent has restarted: it doesn't know who has the slices that were dealt before."""
    counts = struct.pack("<12I", *[1] * 12)
    first = await asked(ReferenceLead("alpha"), session, counts=counts, tokens=counts)
    lead = ReferenceLead("alpha")
    assert (await asked(lead, session, rank=1)).slice == first.slice == 0
    done = {"slice": 0, "first": 0, "units": 4, "values": (b"\0" * 16,)}
    assert (await asked(lead, session, rank=0, **done)).slice == 1
    assert (await asked(lead, session, rank=1, **done)).slice == 2
    lead.close()


async def test_what_cannot_be_kept_is_said(session: Any) -> None:
    lead = ReferenceLead("alpha")
    first = await asked(lead, session, counts=COUNTS, tokens=COUNTS)
    done = {"slice": first.slice, "first": 0, "units": 3, "values": (b"\0" * 20,)}
    assert "sent 20 bytes for 6 values" in (await asked(lead, session, **done)).problem
    lead.close()
    other = ReferenceLead("alpha")
    (session.paths.node_data / f".{NAME}.alpha" / "slices.db").write_bytes(b"no database")
    assert (await asked(other, session)).problem.startswith("alpha can't keep the reference's log-probabilities")
    other.close()


@pytest.mark.parametrize("place", ["{0}", "{0}/values.bin", "{0}/reference.json", ".{0}.alpha", ".{0}.alpha/slices.db",
                                   ".{0}.alpha/values.bin"])  # fmt: skip
async def test_no_link_in_the_caches_is_followed(session: Any, tmp_path: Path, place: str) -> None:
    """To another folder, or to a file in one, whether it is there or not."""
    outside, content = tmp_path / "outside", b"what nobody may read or change"
    (outside / NAME).mkdir(parents=True)
    caches, link = session.paths.node_data, session.paths.node_data / place.format(NAME)
    (caches / NAME).mkdir(parents=True)
    (caches / f".{NAME}.alpha").mkdir()
    for folder in (caches / NAME, outside):
        (folder / "values.bin").write_bytes(content)
        (folder / "reference.json").write_text(json.dumps({"digest": hashlib.sha256(content).hexdigest()}))
    if place.startswith(".{0}.alpha/"):  # else the whole values would be handed on
        (caches / NAME / "values.bin").unlink()
    if link.is_dir():
        shutil.rmtree(link)
        link.symlink_to(outside)
    else:
        link.unlink(missing_ok=True)
        link.symlink_to(outside / (link.name if link.name != "slices.db" else "new.db"))
    before = {path: path.read_bytes() for path in outside.iterdir() if path.is_file()}
    lead = ReferenceLead("alpha")
    for _ in range(2):
        answer = await asked(lead, session, counts=COUNTS, tokens=COUNTS)
        assert content not in answer.values
    lead.ended()
    assert {path: path.read_bytes() for path in outside.iterdir() if path.is_file()} == before


async def test_what_a_rank_names_is_a_name(session: Any) -> None:
    """It comes from the follower's node; a reference that is none is answered, and makes no folder."""
    inputs = "", ".", "..", "../x", "/etc", "a/../../b", "a\0", ".hidden", f".{NAME}.alpha", "x" * 200
    for name in inputs:
        answer = await asked(ReferenceLead("alpha"), session, reference=name, counts=COUNTS, tokens=COUNTS)
        assert answer.problem
    assert not session.paths.node_data.exists()


def sizes(counts: list[int]) -> UnitSizes:
    return UnitSizes(*(struct.pack(f"<{len(counts)}I", *(times * count for count in counts)) for times in (1, 3)))


@pytest.mark.parametrize("seed", range(8))
def test_every_unit_is_answered_once_whoever_is_lost(seed: int) -> None:
    chance = random.Random(seed)
    counts = [chance.randrange(1, 40) for _ in range(chance.randrange(1, 300))]
    one, held, now = ReferencePass(*sizes(counts).numbers()), dict[int, Slice](), 0.0
    answered, journal = list[int](), dict[int, tuple[Slice, bool]]()
    while not one.is_done:
        now += chance.random()
        assert now < 100 * len(counts), "a rank computes the same slice over and over"
        rank = chance.randrange(3)
        if rank in held and chance.random() < 0.2:
            one.lose(rank)
            if chance.random() < 0.5:  # its values still arrive
                continue
            del held[rank]
        if chance.random() < 0.02:  # the lead's agent restarts, and knows no one's slice; their values still arrive
            one = ReferencePass(*sizes(counts).numbers(), [journal[number] for number in sorted(journal)])
        if rank in held and chance.random() < 0.6:
            done = held.pop(rank)
            if one.is_new(done):
                answered += range(done.first, done.first + done.rows)
                journal[done.id] = (done, True)
            one.answer(rank, done, now)
        elif rank not in held and (dealt := one.deal(rank, now)) is not None:
            held[rank] = dealt
            journal.setdefault(dealt.id, (dealt, False))
        whole = next((unit for unit in range(len(counts)) if unit not in answered), len(counts))
        assert one.available == sum(counts[:whole])
        assert one.answered == len(answered)
    assert sorted(answered) == [*range(len(counts))]
    assert one.available == one.values == sum(counts)


def test_a_journal_continues_after_its_lead(tmp_path: Path) -> None:
    counts = [3, 1, 2, 5, 4, 2, 7, 1, 1]
    journal = ReferenceJournal(tmp_path, sizes(counts))
    before = ReferencePass(*journal.sizes.numbers())
    first, second = before.deal(0, 0.0), before.deal(1, 0.0)
    assert first is not None and second is not None
    for rank, one in enumerate((first, second)):
        journal.dealt(one, rank)
    offset, count = before.span(second)
    journal.answered(second, 1, offset, [b"\x01" * 4 * (count - 1), b"\x02" * 4])
    journal.close()

    again = ReferenceJournal(tmp_path)
    after = ReferencePass(*again.sizes.numbers(), again.slices())
    assert (after.answered, after.available) == (second.rows, 0)
    assert after.is_new(first) and not after.is_new(second)
    assert not after.is_new(replace(first, first=5)) and not after.is_new(replace(first, id=7)), "of another lead"
    assert after.deal(2, 0.0) == first
    assert again.read(offset, count) == b"\x01" * 4 * (count - 1) + b"\x02" * 4
    after.answer(2, first, 1.0)
    assert after.available == offset + count
    again.close()
