"""Several links to a neighbour: they join at once, each sums a part, and they end together."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
from tests.trainer.support.fork_servers import ForkServers
from tests.trainer.support.ranks import DEADLINE_SECONDS, pid_of
from tests.waiting import slowness

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.trainer.collective.group import Group, ReducerGroup
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout
from trainctl.trainer.collective.standby import SpawnStandby
from trainctl.trainer.common.errors import AbandonedError, GroupError

LINKS, FORMINGS, ALLOWANCE_SECONDS, LATE_SECONDS = 4, 5, 0.5, 0.1
WORDS = LINKS * (1 << 18) + 1001
Pair = tuple[ReducerGroup, ReducerGroup]


@pytest.fixture
def new_pair(fork_servers: ForkServers) -> Iterator[Callable[..., Pair]]:
    """Ranks 0 and 1 in a ring with so many links, formed; rank 0 may begin late."""
    made: list[Membership | Group] = []

    def make(links: int, late: float = 0.0) -> Pair:
        layout, table = Layout({"a": (WORDS,)}, "x"), GroupTable(links_per_peer=links)
        memberships = [Membership(rank, layout, table, "", "ring", fork_servers) for rank in (0, 1)]
        offer = m.Offer(run="r", generation=m.Generation(1, 1), engine="ring")
        endpoints = tuple(membership.offer(offer) for membership in memberships)
        form = m.Form(
            run="r", generation=offer.generation, engine="ring", ranks=(0, 1), endpoints=endpoints, layout_digest="x",
            deadline_seconds=DEADLINE_SECONDS,
        )  # fmt: skip
        second = memberships[1].form(form)
        time.sleep(late)
        first = memberships[0].form(form)
        made.extend([*memberships, first, second])
        assert isinstance(first, ReducerGroup)
        assert isinstance(second, ReducerGroup)
        assert both((first, second), ReducerGroup.complete) == []
        for group in (first, second):
            group.formed()
        return first, second

    yield make
    for one in made:
        one.close()


def both(pair: Pair, work: Callable[[ReducerGroup], object]) -> list[Exception]:
    """Do it on both ranks at once; what went wrong."""
    errors: list[Exception] = []

    def run(group: ReducerGroup) -> None:
        try:
            work(group)
        except Exception as error:  # noqa: BLE001  the caller's to judge
            errors.append(error)

    threads = [threading.Thread(target=run, args=(group,)) for group in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    return errors


def forming_seconds(new_pair: Callable[..., Pair], links: int, late: float = 0.0) -> float:
    """The fastest of some: MLX's ring may still sleep for 1 s where two ranks share a busy machine."""
    found = []
    for _ in range(FORMINGS):
        begun = time.perf_counter()
        pair = new_pair(links, late)
        found.append(time.perf_counter() - begun)
        for group in pair:
            group.close()
    return min(found)


def test_more_links_take_hardly_longer_to_form(new_pair: Callable[..., Pair]) -> None:
    new_pair(1)  # the engine is imported
    one, several = forming_seconds(new_pair, 1), forming_seconds(new_pair, LINKS)
    assert several < LINKS * one + ALLOWANCE_SECONDS * slowness(), (
        f"{several:.2f} s with {LINKS} links, {one:.2f} s with one"
    )


def test_a_rank_that_is_late_makes_nobody_sleep(new_pair: Callable[..., Pair]) -> None:
    """Rank 1 connects to rank 0, which listens only later."""
    new_pair(1)
    in_time, late = forming_seconds(new_pair, 1), forming_seconds(new_pair, 1, LATE_SECONDS)
    assert late - LATE_SECONDS < in_time + ALLOWANCE_SECONDS * slowness()


@pytest.mark.parametrize("links", [1, 3, LINKS])
def test_the_parts_that_links_sum_make_the_whole(new_pair: Callable[..., Pair], links: int) -> None:
    pair = new_pair(links)
    values = np.random.default_rng(0).standard_normal(WORDS).astype(np.float32)
    shared: list[np.ndarray] = []

    def work(group: ReducerGroup) -> None:
        arrays = group.share(1, lambda arrays: np.copyto(arrays["a"], values))
        assert arrays is not None
        shared.append(arrays["a"].copy())

    assert both(pair, work) == []
    assert all(np.array_equal(found, values) for found in shared)
    assert len(shared) == 2
    assert both(pair, lambda group: group.share_numbers(0, [1.5])) == [], "and what is too short to part"


def test_a_link_that_fails_ends_all_of_them(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair(LINKS)
    processes = [psutil.Process(pid_of(reducer)) for group in pair for reducer in group._reducers]
    assert len({process.pid for process in processes}) == 2 * LINKS
    processes[LINKS - 1].kill()

    def share(group: ReducerGroup) -> None:
        try:
            group.share(0, lambda arrays: None)
        except GroupError:
            for other in pair:  # as a fence does, which the first failure brings about
                other.abort()
            raise

    errors = both(pair, share)
    assert len(errors) == 2
    assert any(isinstance(error, GroupError) for error in errors)
    assert all(isinstance(error, GroupError | AbandonedError) for error in errors)
    for group in pair:
        group.close()
    assert not any(process.is_running() for process in processes)


def test_as_many_processes_wait_as_there_are_links() -> None:
    """Where reducers aren't forked."""
    standby = SpawnStandby()
    standby.prepare("ring", 2)
    waiting = {pid_of(reducer) for reducer in standby._waiting}
    taken = [standby.take("ring"), standby.take("ring")]
    assert {pid_of(reducer) for reducer in taken} == waiting
    assert len(waiting) == 2
    standby.prepare("ring", 2)
    assert len(standby._waiting) == 2
    for reducer in taken:
        reducer.close()
    standby.close()


def test_a_group_that_leaves_a_sum_out_is_none() -> None:
    """Such a rank would train on its own gradients."""

    class Forgetful(ReducerGroup):
        all_reduce = Group.all_reduce

    class Unsummed(Group):
        pass

    assert Group.__abstractmethods__ == {name for name in vars(Group) if not name.startswith("_")}
    for incomplete in (Forgetful, Unsummed):
        with pytest.raises(TypeError, match="abstract"):
            incomplete()  # type: ignore[abstract,call-arg]
