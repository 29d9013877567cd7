"""Links and the buffer that is summed, and what an engine's error says to a person."""

import math
import threading

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.support.ranks import DEADLINE_SECONDS, form_of, pid_of

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.trainer.collective.engines import lost_peer, plain_error
from trainctl.trainer.collective.group import Group, ReducerGroup
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout, read_tail, tail_words, write_tail
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


FINITE = st.floats(min_value=-3e38, max_value=3e38).filter(lambda value: value == 0 or abs(value) > 1e-20)


@given(st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=2, max_size=16))
def test_every_rank_reads_every_ranks_doubles(ranks):
    total = np.zeros(tail_words(len(ranks), 3), np.float32)
    for index, values in enumerate(ranks):
        tail = np.full_like(total, 9.0)
        write_tail(tail, index, values)
        total += tail
    assert read_tail(total, 3) == [list(values) for values in ranks]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_bad_number_stays_in_its_slot_and_stays_bad(bad):
    tail = np.zeros(tail_words(2, 2), np.float32)
    write_tail(tail, 1, (bad, 3.0))
    found = read_tail(tail, 2)
    assert found[0] == [0.0, 0.0]
    assert not math.isfinite(found[1][0])
    assert found[1][1] == 3.0


PAIR = "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:"
CRASHED = (
    "This is typically caused by a remote worker crashing. "
    "Check the logs of the remote worker before reporting an error. GLHF! 🏖️"
)
HUNG = CRASHED.replace("crashing", "hanging or bugs in the application")
RESET = (
    f"{PAIR}537] Read error [127.0.0.1]:36246: Connection reset by peer. {HUNG}"  # 36246 is 38541 with swapped bytes
)
CLOSED = f"{PAIR}553] Connection closed by peer [127.0.0.1]:48831. {CRASHED}"
STORE_GONE = (
    "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. "
    "Did the remote server shutdown or crash?"
)
STORE_ABSENT = (
    "DistNetworkError: The client socket has timed out after 8000ms while trying to connect to (127.0.0.1, 53533)."
)
RING = "RuntimeError: [ring] connection to a peer was lost"
HERE = (("127.0.0.1:35797",), ("127.0.0.1:39625",), ("127.0.0.1:38389",))
APART = (("10.0.0.1:35797",), ("127.0.0.1:39625",), ("10.0.0.3:38389",))


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        (RESET, "connection to c was reset"),
        (CLOSED, "connection to c was closed"),
        (STORE_GONE, "connection to c was closed"),
        (STORE_ABSENT, "c did not answer in time"),
        (RING, "connection to c was lost"),
        ("RuntimeError: [ring] Couldn't connect (error: 111)", "could not connect to c"),
        ("RuntimeError: something new. GLHF!", "the sum failed (details in the log of b)"),
    ],
)
def test_an_engines_error_in_plain_words(text, meaning):
    assert plain_error(text, "c", "b", "the sum") == meaning
    if " c " in meaning:
        assert plain_error(text, None, "b", "the sum") == meaning.replace(" c ", " a peer ")


@pytest.mark.parametrize("text", [RESET, CLOSED, RING, STORE_GONE])
def test_of_two_ranks_the_peer_is_the_other(text):
    assert lost_peer(text, 0, HERE[:2], {}) == 1
    assert lost_peer(text, 1, HERE[:2], {}) == 0


def test_a_peer_is_known_by_the_port_of_its_process_in_either_order_of_bytes():
    ports = {0: [45999], 1: [38983, 60096], 2: [38541, 36414]}
    assert lost_peer(RESET, 0, HERE, ports) == 2
    assert lost_peer(RESET.replace("36246", "38541"), 0, HERE, ports) == 2
    assert lost_peer(CLOSED, 0, HERE, ports) is None, "a port of nobody's"
    assert lost_peer(RESET, 0, HERE, {}) is None
    assert lost_peer(RESET, 2, HERE, {**ports, 2: ports[1], 1: ports[2]}) == 1


def test_a_peer_on_a_machine_of_its_own_is_known_by_its_address():
    assert lost_peer(CLOSED, 0, APART, {}) == 1
    assert lost_peer(CLOSED.replace("127.0.0.1", "10.0.0.3"), 0, APART, {}) == 2
    assert lost_peer(CLOSED.replace("127.0.0.1", "10.0.0.9"), 0, APART, {}) is None


def test_the_store_is_the_first_ranks():
    assert lost_peer(STORE_GONE, 2, HERE, {}) == 0
    assert lost_peer(STORE_ABSENT, 1, HERE, {}) == 0
    assert lost_peer(RING, 1, HERE, {}) is None
