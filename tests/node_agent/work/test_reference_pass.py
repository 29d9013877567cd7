"""Units are dealt to ranks that come and go: each gets its values once, and those without a gap can be fetched."""

import random
import struct
from pathlib import Path

import pytest

from trainctl.node_agent.work.dealer import Slice
from trainctl.node_agent.work.reference import ReferenceJournal, ReferencePass, UnitSizes


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
    assert not after.is_new(first._replace(first=5)) and not after.is_new(first._replace(id=7)), "of another lead"
    assert after.deal(2, 0.0) == first
    assert again.read(offset, count) == b"\x01" * 4 * (count - 1) + b"\x02" * 4
    after.answer(2, first, 1.0)
    assert after.available == offset + count
    again.close()
