"""Copies of a record on other nodes: whatever is lost on the way, they come to what the lead's has."""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest
from tests.node_agent.support.records import check_rollups, part, step
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.records import keys, replication
from trainctl.node_agent.records.replication import Copies
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages.events import Notice
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.wire import codec

RUN = "run-1"
COMMAND = m.KeptCommand(
    id="c", digest="d", verb="note", args={}, by="anna", run=RUN, node=None, if_plan=None, received_at=1.0,
    ttl_seconds=60.0, state="accepted",
)  # fmt: skip


class Node:
    """A node's record, and the link of a lead to its agent, which may be cut."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder / RUN)
        self.paths.directory.mkdir(parents=True)
        self.recorder, self.is_cut, self.commands = RunDb(self.paths), False, list[m.KeptCommand]()

    async def send(self, order) -> bool:
        if self.is_cut:
            return False
        message = msgspec.structs.replace(order, link="link", seq=1)
        assert len(codec.encode(message)) <= codec.CONTROL_FRAME_BYTES
        for item in codec.decode_control(codec.encode(message)).items:
            kept = codec.decode_kept(item)
            replication.keep(self.recorder, kept)
            self.commands += [kept] if isinstance(kept, m.KeptCommand) else []
        return True

    @property
    def hosted(self) -> m.HostedRank:
        return m.HostedRank(RUN, 1, None, *self.recorder.newest())

    def contents(self) -> tuple:
        self.recorder.flush()
        with RecordReader(self.paths) as reader:
            steps, _ = reader.steps(0, 10_000)
            events, _ = reader.events(0, 10_000)
            own = {key: value for key, value in reader.metas().items() if key not in keys.OWN_KEYS}
            series = [reader.series(metric, None, 0, None, 50) for metric in ("loss", "tokens_per_second")]
            parts = [reader.rank_steps(row.step) for row in steps]
            return steps, parts, events, own, reader.evaluations(), series


class Lead:
    """Keeps what happens by chance, as a conductor would, in one term."""

    def __init__(self, node: Node, term: int, seed: int) -> None:
        self.node, self.chance = node, random.Random(seed)
        self.step, self.generation = node.recorder.newest()[0], m.Generation(term, 0)

    def commit(self) -> None:
        self.step += 1
        row = step(self.step, self.generation)
        self.node.recorder.commit(row, [part(row.step, 0, row.generation)], row.committed_at)
        self.node.recorder.commit(row, [part(row.step, 1, row.generation)], row.committed_at)

    def retract(self) -> None:
        if self.step > 1:
            self.step -= 1
            self.node.recorder.retract_after(self.step)
            self.generation = self.generation.next()

    def happen(self) -> None:
        self.node.recorder.event(1.0, Notice("x" * 900), "info", "auto", step=self.step, generation=self.generation)

    def rest(self) -> None:
        recorder = self.node.recorder
        recorder.set_meta("conductor", str(self.chance.random()))
        recorder.set_meta(keys.VIEW_KEY, "its own", own=True)
        recorder.evaluation(self.step, 2.0 + self.step, 2.5, 100.0, 0.5, {"eval/kl": 0.25})
        pair = m.EvaluatedPair(3, 0.5, -0.5, "2+2?", "4", "5")
        recorder.pairs(m.HeldOutPairs(self.step, 2.0 + self.step, (pair,)))
        recorder.drifts(self.step, 2.0, {0: 0.0, 1: 1e-7})

    def act(self) -> None:
        self.chance.choices((self.commit, self.happen, self.rest, self.retract), (8, 2, 1, 0.4))[0]()


async def come_to_rest(made: Copies, node: Node) -> None:
    """The node is in touch, and has been told all."""
    node.is_cut = False
    made.begin("n1", node.hosted)
    async with asyncio.timeout(HANG_SECONDS):
        while "n1" not in made._waiting:
            await asyncio.sleep(0.01)
    await made.flush()


@pytest.fixture
def nodes(tmp_path):
    pair = Node(tmp_path / "a"), Node(tmp_path / "b")
    yield pair
    for node in pair:
        node.recorder.close()


@pytest.mark.parametrize("seed", range(6))
async def test_a_copy_comes_to_the_lead_s_record_whenever_the_line_is_cut(nodes, seed):
    ours, theirs = nodes
    lead, chance = Lead(ours, 1, seed), random.Random(seed)
    made = Copies(ours.recorder, {"n1": theirs}, lambda: [COMMAND])
    ours.recorder.on_kept = made.add
    lead.rest()
    for _ in range(4):
        await come_to_rest(made, theirs)
        for _ in range(chance.randrange(250)):
            lead.act()
            if chance.random() < 0.01:
                theirs.is_cut = True
            if chance.random() < 0.5:
                await made.flush()
    await come_to_rest(made, theirs)
    assert theirs.contents() == ours.contents()
    assert COMMAND in theirs.commands
    await made.close()


async def test_what_a_replaced_lead_had_made_alone_does_not_stand_in_its_copy(nodes):
    ours, theirs = nodes
    old = Lead(theirs, 1, 1)
    theirs.recorder.on_kept = lambda item: replication.keep(ours.recorder, item)
    for _ in range(5):
        old.commit()
        old.happen()
    theirs.recorder.on_kept = lambda _: None
    for _ in range(3):  # out of reach of the others, it goes on for a while
        old.commit()
        old.happen()
    new = Lead(ours, 2, 2)
    made = Copies(ours.recorder, {"n1": theirs}, lambda: ())
    ours.recorder.on_kept = made.add
    new.happen()
    new.commit()
    await come_to_rest(made, theirs)
    new.commit()
    await made.flush()
    assert theirs.contents()[:3] == ours.contents()[:3]
    with RecordReader(theirs.paths) as reader:
        assert [reader.is_retracted(number, m.Generation(1, 0)) for number in (5, 6, 7, 8)] == [False, True, True, True]
    await made.close()


async def test_a_copy_takes_the_rows_of_steps_that_the_next_lead_commits_again(nodes):
    """The rows have one generation, as have the ranks' reports of them: the old lead had not sent its rows to any
    node."""
    ours, theirs = nodes
    old = Lead(theirs, 1, 1)
    theirs.recorder.on_kept = lambda item: replication.keep(ours.recorder, item)
    for _ in range(40):
        old.commit()
    theirs.recorder.on_kept = lambda _: None
    for _ in range(2):
        old.commit()
    for number in (41, 42):
        row = msgspec.structs.replace(
            step(number, old.generation), committed_at=1000.0 + number, step_seconds=3.5, seconds_total=99.0,
            values={"remaining_seconds": 12.5},
        )  # fmt: skip
        ours.recorder.commit(
            row, [msgspec.structs.replace(part(row.step, 0, row.generation), values={"wait_seconds": 1.5})], 1000.0
        )
        ours.recorder.commit(row, [part(row.step, 1, row.generation)], 1000.0)
    new = Lead(ours, 2, 2)
    made = Copies(ours.recorder, {"n1": theirs}, lambda: ())
    ours.recorder.on_kept = made.add
    assert theirs.contents() != ours.contents()
    await come_to_rest(made, theirs)
    assert theirs.contents() == ours.contents()
    for _ in range(20):  # past the buckets of those steps
        new.commit()
    await made.flush()
    assert theirs.contents() == ours.contents()
    check_rollups(theirs.paths)
    await made.close()


def test_a_claimant_gets_what_a_record_has_beyond_its_own_unless_that_is_much(nodes):
    ours, theirs = nodes
    lead = Lead(ours, 1, 3)
    ours.recorder.on_kept = lambda item: replication.keep(theirs.recorder, item)
    lead.commit()
    ours.recorder.on_kept = lambda _: None
    assert replication.beyond(theirs.recorder, theirs.paths, theirs.hosted, ours.hosted) == []
    lead.commit()
    lead.happen()
    lead.rest()
    assert replication.beyond(theirs.recorder, theirs.paths, theirs.hosted, ours.hosted) == []
    for item in replication.beyond(ours.recorder, ours.paths, ours.hosted, theirs.hosted):
        replication.keep(theirs.recorder, item)
    assert theirs.contents()[:4] == ours.contents()[:4]
    for _ in range(replication.PAGE_STEPS + 1):
        lead.commit()
    with pytest.raises(
        RefusedError, match=r"has the record up to step 2, rank 1's node up to step 103: promote rank 1's node"
    ):
        replication.beyond(ours.recorder, ours.paths, ours.hosted, theirs.hosted)
