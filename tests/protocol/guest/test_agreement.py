"""Ranks agree: each order is carried out at one boundary by all ranks or by none, whatever is late, lost or stopped.

A simulation of ranks, each with its loop and the thread that asks the store, in simulated time.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import scale

from trainctl.guest.agreement import Delete, Leader, Member, Put, Read

BOUNDARIES = 150


@dataclass(frozen=True)
class Fault:
    """A rank that is stopped, or for which the store is silent, for some seconds."""

    kind: str  # stop, silence, or host: rank 0 stops, and the store with it
    rank: int
    at: float
    seconds: float

    def holds(self, at: float) -> bool:
        return self.at <= at < self.at + self.seconds


class World:
    """Simulated ranks, a store and the time. Actors are generators that yield the seconds until they go on."""

    def __init__(
        self, ranks: int, seed: int, faults: list[Fault], *, coupled: bool = True, alone: bool = False
    ) -> None:
        self.random, self.faults, self.coupled, self.alone = Random(seed), faults, coupled, alone
        self.now, self.keys = 0.0, dict[str, str]()
        self.most_keys = 0
        self.begun = [0] * ranks  # newest step that each rank's loop has begun
        self.applied: dict[str, dict[int, int]] = defaultdict(dict)  # order -> rank -> boundary
        self.waited = [0.0] * ranks
        self.leader = Leader(ranks)
        self.members: list[Member] = [self.leader, *(Member(rank, ranks, str) for rank in range(1, ranks))]
        self.step_seconds = self.random.choice([0.002, 0.02, 0.3, 3.0])
        self.running = ranks

    def run(self, orders: list[tuple[float, str]]) -> None:
        """Have each rank pass all its boundaries; each order arrives at a time."""
        counter = itertools.count()
        queue: list[tuple[float, int, int, Generator[float]]] = []
        for member in self.members:
            for actor in (self.loop(member), self.thread(member)):
                heapq.heappush(queue, (self.random.random() / 10, next(counter), member.rank, actor))
        waiting = sorted(orders)
        while queue and self.running:
            self.now, _, rank, actor = heapq.heappop(queue)
            assert self.now < 20_000, "a rank never ends"
            while waiting and waiting[0][0] <= self.now:
                self.leader.propose({"id": f"o{len(waiting)}", "verb": waiting.pop(0)[1], "args": {}})
            stopped = [f for f in self.faults if f.kind != "silence" and f.rank == rank and f.holds(self.now)]
            if stopped:
                heapq.heappush(queue, (stopped[0].at + stopped[0].seconds, next(counter), rank, actor))
                continue
            for member in self.members:
                member.now = self.now
            try:
                delay = next(actor)
            except StopIteration:
                continue
            heapq.heappush(queue, (self.now + delay, next(counter), rank, actor))

    def loop(self, member: Member) -> Generator[float]:
        for boundary in range(1, BOUNDARIES + 1):
            self.begun[member.rank] = boundary
            yield self.random.expovariate(1 / self.step_seconds)
            while self.coupled and min(self.begun) < boundary:
                yield self.step_seconds / 5
            while boundary >= member.boundary:
                decision = member.arrive()
                if decision is None:
                    if member.ended:
                        break
                    before = self.now
                    yield 0.05
                    member.wait(min(self.now - before, 0.5))
                    self.waited[member.rank] += self.now - before
                    continue
                yield self.random.choice([0.0, 0.001, 0.2, 15.0 if decision.orders else 0.0])
                for order in decision.orders:
                    self.applied[order["id"]][member.rank] = boundary
                member.leave()
        self.running -= 1

    def thread(self, member: Member) -> Generator[float]:
        exchange, answer = member.exchange(), None
        while True:
            try:
                request = exchange.send(answer)
            except StopIteration:
                return
            if request is None:
                answer = None
                yield 0.05
                continue
            yield from self.silence(member.rank)
            answer = self.serve(request)
            yield from self.silence(member.rank)

    def silence(self, rank: int) -> Generator[float]:
        yield self.random.uniform(0.0001, 0.003)
        for fault in self.faults:
            if fault.holds(self.now) and (fault.kind == "host" or (fault.kind == "silence" and fault.rank == rank)):
                yield fault.at + fault.seconds - self.now

    def serve(self, request: Put | Read | Delete) -> object:
        if isinstance(request, Put):
            kept = self.keys.setdefault(request.key, request.value)
            self.most_keys = max(self.most_keys, len(self.keys))
            return kept
        if isinstance(request, Read):
            return [self.keys[key] for key in request.keys] if self.keys.keys() >= {*request.keys} else None
        for key in request.keys:
            self.keys.pop(key, None)
        return None


def assert_together(world: World) -> None:
    for order, places in world.applied.items():
        assert len(places) == len(world.members), f"{order} was carried out by ranks {sorted(places)} alone"
        assert len({*places.values()}) == 1, f"{order} was carried out at boundaries {places}"


orders = st.lists(
    st.tuples(st.floats(0.0, 30.0), st.sampled_from(["set-lr", "checkpoint", "pause", "resume"])), max_size=6
)
faults = st.lists(
    st.builds(
        Fault,
        kind=st.sampled_from(["stop", "silence", "host"]),
        rank=st.integers(0, 2),
        at=st.floats(0.0, 20.0),
        seconds=st.sampled_from([0.5, 3.0, 9.0, 11.0, 12.0, 40.0]),
    ).map(lambda fault: Fault(fault.kind, 0, fault.at, fault.seconds) if fault.kind == "host" else fault),
    max_size=3,
)
seeds = st.integers(0, 2**32)


@settings(max_examples=scale("examples"), deadline=None)
@given(ranks=st.integers(2, 4), seed=seeds, coupled=st.booleans(), sent=orders)
def test_each_order_is_carried_out_at_one_boundary(ranks, seed, coupled, sent):
    world = World(ranks, seed, [], coupled=coupled)
    world.step_seconds = max(world.step_seconds, 0.3)  # the loop outlasts the orders
    world.run([*sent, (31.0, "resume")])
    assert_together(world)
    if coupled:
        assert len(world.applied) == len(sent) + 1
        assert not any(member.ended for member in world.members)
        assert world.most_keys <= 30 * (ranks + 1), "keys are not deleted"


@settings(max_examples=scale("examples"), deadline=None)
@given(ranks=st.integers(2, 3), seed=seeds, coupled=st.booleans(), sent=orders, faults=faults)
def test_ranks_stay_together_whatever_stops(ranks, seed, coupled, sent, faults):
    world = World(ranks, seed, [fault for fault in faults if fault.rank < ranks], coupled=coupled)
    world.run([*sent, (31.0, "resume")])
    assert_together(world)


def test_a_rank_that_does_not_take_part_ends_the_agreement():
    world = World(2, 1, [])
    world.step_seconds = 0.1
    world.members[1].boundary = BOUNDARIES + 1  # its loop never comes to a tick
    world.members[1].closing = True
    world.run([(1.0, "set-lr")])
    assert not world.applied
    assert "rank 1 has not confirmed a decision for 10 s" in world.leader.ended


@pytest.mark.parametrize("kind", ["stop", "host"])
def test_a_rank_without_decisions_goes_on_after_ten_seconds(kind):
    world = World(3, 2, [Fault(kind, 0, 5.0, 100.0)], coupled=False)
    world.step_seconds = 0.1
    world.run([(20.0, "set-lr")])
    assert not world.applied
    assert all(member.ended for member in world.members)
    assert "could not read a decision for 10 s" in world.leader.ended
    assert 10.0 <= max(world.waited[1:]) < 13.0
