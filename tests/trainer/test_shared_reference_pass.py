"""Ranks compute a reference together over a line that loses and repeats messages, with a lead that forgets."""

import random
import struct
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest

from trainctl.node_agent.work.dealer import Slice
from trainctl.node_agent.work.reference import ReferencePass
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import ReferenceSlice
from trainctl.trainer import reference
from trainctl.trainer.common.reference_cache import ReferenceKey
from trainctl.trainer.reference import Company, SharedPass, check_sizes, stored_values

COUNTS = np.array([random.Random(2).randrange(1, 9) for _ in range(700)], np.int64)
KEY = ReferenceKey("samples", "model", "float32", int(COUNTS.sum()))


class SmallLead:
    """Deals as an agent does, with values in memory."""

    def __init__(self):
        self.lock, self.values, self.one = threading.Lock(), b"", None
        self.deals: list[tuple[int, Slice]] = []
        self.digest = ""

    def answer(self, ask, now):
        with self.lock:
            return self._answer(ask, now)

    def _answer(self, ask, now):
        said: dict[str, Any] = {"run": ask.run, "ask": ask.ask, "reference": ask.reference}
        if self.one is None:
            if not ask.counts:
                return ReferenceSlice(**said, known=False)
            units = len(ask.counts) // 4
            self.one = ReferencePass(*(struct.unpack(f"<{units}I", raw) for raw in (ask.counts, ask.tokens)))
            self.values = b"\xff" * 4 * self.one.values
        one = self.one
        done = Slice(ask.slice, ask.first, ask.units) if ask.slice is not None else None
        if done is not None and one.is_new(done):
            start, count = one.span(done)
            raw = b"".join(ask.values)
            assert len(raw) == 4 * count
            self.values = self.values[: 4 * start] + raw + self.values[4 * (start + count) :]
            one.answer(ask.rank, done, now)
        dealt = one.deal(ask.rank, now) if ask.wants else None
        if dealt is not None:
            self.deals.append((ask.rank, dealt))
            said |= {"slice": dealt.id, "first": dealt.first, "units": dealt.rows}
        part = self.values[4 * ask.offset : 4 * min(one.available, ask.offset + 300)]
        digest = ""
        if one.is_done:
            import hashlib

            digest = self.digest or hashlib.sha256(self.values).hexdigest()
        return ReferenceSlice(**said, offset=ask.offset, values=part, answered=one.answered, digest=digest)


class UnreliableLine:
    """Loses a part of all messages, and repeats others."""

    def __init__(self, lead, seed, lost):
        self.lead, self.chance, self.lost, self.told = lead, random.Random(seed), lost, deque[ReferenceSlice]()
        self.now = 0.0

    def send(self, ask):
        self.now += 0.01
        for _ in range(self.chance.choice([1, 1, 2])):
            if self.chance.random() >= self.lost and (said := self.lead.answer(ask, self.now)):
                self.told.append(said)

    def receive(self, seconds):
        return self.told.popleft() if self.told and self.chance.random() >= self.lost else None


class RoundedValues:
    """Values as one rank computes them: its rounding is its own."""

    def __init__(self, rank):
        self.rank, self.computed = rank, 0

    def values(self, first, samples, look):
        look(samples // 2)
        self.computed += samples
        start = int(COUNTS[:first].sum())
        places = np.arange(start, start + int(COUNTS[first : first + samples].sum()), dtype=np.float32)
        return -places - np.float32(self.rank / 4)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The line is in memory: nothing takes time on it."""
    monkeypatch.setattr(reference, "AGAIN_SECONDS", 0.002)
    monkeypatch.setattr(reference, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(reference, "MAX_UNITS", 300)


def shared(rank, lead, supply, lost=0.0):
    line = UnreliableLine(lead, rank, lost)
    return SharedPass(Company("r", rank, line), KEY, supply, lambda done, whole: None, COUNTS, 3 * COUNTS)


def together(passes, folder):
    """Return the values that each rank ends with."""
    threads = [
        threading.Thread(target=one.run, args=(folder / f"{rank}.bin",), name=f"rank {rank}")
        for rank, one in enumerate(passes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [(folder / f"{rank}.bin").read_bytes() for rank in range(len(passes))]


@pytest.mark.parametrize("lost", [0.0, 0.3])
def test_all_ranks_end_with_the_same_bits(tmp_path, lost):
    lead, supplies = SmallLead(), [RoundedValues(rank) for rank in range(3)]
    found = together([shared(rank, lead, supply.values, lost) for rank, supply in enumerate(supplies)], tmp_path)
    assert found[0] == found[1] == found[2] == lead.values
    values = np.frombuffer(found[0], "<f4")
    assert (np.round(values) == -np.arange(KEY.counted)).mean() > 0.4
    assert np.abs(values + np.arange(KEY.counted)).max() <= 0.5
    if not lost:
        assert sum(supply.computed for supply in supplies) == len(COUNTS)


def test_a_lead_that_knows_nothing_is_told_again(tmp_path):
    """The run's lead has changed when some values had been fetched: the new one's are fetched from their beginning."""
    lead = SmallLead()
    shared(0, lead, RoundedValues(0).values).run(tmp_path / "0.bin")
    late, forgotten = shared(1, lead, RoundedValues(1).values), []

    def forget(done, whole):
        if late._received > KEY.counted // 2 and not forgotten:
            forgotten.append(done)
            lead.one, lead.values = None, b""

    late._report = forget
    late.run(tmp_path / "1.bin")
    assert forgotten
    assert (tmp_path / "1.bin").read_bytes() == lead.values
    assert (np.frombuffer(lead.values, "<f4") == -np.arange(KEY.counted, dtype=np.float32) - 0.25).all()


def test_a_rank_with_values_gives_them_and_keeps_them(tmp_path):
    kept = RoundedValues(2).values(0, len(COUNTS), lambda done: None)
    lead = SmallLead()
    digest = shared(0, lead, RoundedValues(2).values).run(tmp_path / "0.bin")
    lead = SmallLead()
    assert shared(0, lead, stored_values(kept, COUNTS)).run(tmp_path / "1.bin", digest) == digest
    assert not (tmp_path / "1.bin").stat().st_size
    assert lead.values == (tmp_path / "0.bin").read_bytes()
    other = shared(1, lead, stored_values(kept + 1, COUNTS))
    assert other.run(tmp_path / "2.bin", "d" * 64) == digest
    assert (tmp_path / "2.bin").read_bytes() == lead.values


def test_values_that_are_not_those_named_end_the_run(tmp_path):
    lead = SmallLead()
    shared(0, lead, RoundedValues(0).values).run(tmp_path / "0.bin")
    lead.digest = "e" * 64
    with pytest.raises(TrainctlError, match=rf"delete {KEY.name} and \.{KEY.name}\.\* in"):
        shared(1, lead, RoundedValues(1).values).run(tmp_path / "1.bin")
    lead.values = lead.values[:-4]
    with pytest.raises(TrainctlError, match="are damaged"):
        shared(1, lead, RoundedValues(1).values).run(tmp_path / "1.bin")


def test_values_that_no_message_holds_are_refused_with_what_helps(monkeypatch):
    monkeypatch.setattr(reference, "MAX_VALUES", 2000)
    check_sizes(np.full(700, 2000 // 3), "run file", has_adapter=False)
    for each, has_adapter, helps in (
        (800, True, 'objective.reference = "adapter-off"'),
        (800, False, "use fewer pairs"),
    ):
        with pytest.raises(InvalidInputError, match=f"^run file: data.path: 3 consecutive pairs have 2,400 .*{helps}"):
            check_sizes(np.full(700, each), "run file", has_adapter=has_adapter)
    with pytest.raises(InvalidInputError, match=r"a pair has 2,500 answer .* may: set a lower data.sequence_length"):
        check_sizes(np.full(9, 2500), "run file", has_adapter=False)


def test_a_lead_that_cannot_keep_them_ends_the_run(tmp_path):
    one = shared(0, SmallLead(), RoundedValues(0).values)
    full = "alpha can't keep them: No space left on device"

    def refuse(ask):
        one._line.told.append(ReferenceSlice(run="r", ask=ask.ask, reference=KEY.name, problem=full))  # type: ignore[attr-defined]

    one._line.send = refuse  # type: ignore[method-assign]
    with pytest.raises(TrainctlError, match="No space left"):
        one.run(tmp_path / "0.bin")
