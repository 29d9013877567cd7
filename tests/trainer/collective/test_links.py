"""Several links to a neighbour: they join at once, each sums a part, and they end together."""

import threading

import numpy as np
import psutil
import pytest
from tests.trainer.support.ranks import DEADLINE_SECONDS, form_of, pid_of

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.trainer.collective.group import Group, ReducerGroup
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout
from trainctl.trainer.collective.standby import SpawnStandby
from trainctl.trainer.common.errors import AbandonedError, GroupError

LINKS = 4
WORDS = LINKS * (1 << 18) + 1001


@pytest.fixture
def new_pair(fork_servers):
    """Ranks 0 and 1 in a ring with so many links, formed."""
    made: list[Membership | Group] = []

    def make(links):
        layout, table = Layout({"a": (WORDS,)}, "x"), GroupTable(links_per_peer=links)
        memberships = [Membership(rank, layout, table, "", "ring", standby=fork_servers) for rank in (0, 1)]
        offer = m.Offer(run="r", generation=m.Generation(1, 1), engine="ring")
        endpoints = tuple(membership.offer(offer) for membership in memberships)
        form = form_of(offer, endpoints)
        second = memberships[1].form(form)
        first = memberships[0].form(form)
        made.extend([*memberships, first, second])
        assert both((first, second), ReducerGroup.complete) == []
        for group in (first, second):
            group.formed()
        return first, second

    yield make
    for one in made:
        one.close()


def both(pair, work):
    """Do it on both ranks at once; what went wrong."""
    errors: list[Exception] = []

    def run(group):
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


@pytest.mark.parametrize("links", [1, LINKS])
def test_the_parts_that_links_sum_make_the_whole(new_pair, links):
    pair = new_pair(links)
    values = np.random.default_rng(0).standard_normal(WORDS).astype(np.float32)
    shared: list[np.ndarray] = []

    def work(group):
        arrays = group.share(1, lambda arrays: np.copyto(arrays["a"], values))
        shared.append(arrays["a"].copy())

    assert both(pair, work) == []
    assert all(np.array_equal(found, values) for found in shared)
    assert len(shared) == 2
    assert both(pair, lambda group: group.share_numbers(0, [1.5])) == [], "and what is too short to part"


def test_a_link_that_fails_ends_all_of_them(new_pair):
    pair = new_pair(LINKS)
    processes = [psutil.Process(pid_of(reducer)) for group in pair for reducer in group._reducers]
    assert len({process.pid for process in processes}) == 2 * LINKS
    processes[LINKS - 1].kill()

    def share(group):
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


def test_as_many_processes_wait_as_there_are_links():
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
