"""Orders to offer, form and fence in every order, as the control thread takes them from a real socket."""

import signal
import threading

import psutil
import pytest
from tests.trainer.support.line import DEADLINE_SECONDS
from tests.trainer.support.ranks import pid_of

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import GroupTable
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout
from trainctl.trainer.common.errors import AbandonedError
from trainctl.trainer.control.orders import Joined, Joining

FIRST, SECOND, THIRD = (m.Generation(1, n) for n in (1, 2, 3))


@pytest.fixture
def peer(fork_servers):
    """Rank 1."""
    made = Membership(1, Layout({"a": (4,)}, "x"), GroupTable(), "", None, standby=fork_servers)
    yield made
    made.close()


def offer(generation, engine="ring"):
    return m.Offer(run="r", generation=generation, engine=engine)


def form(offered, peer, engine="ring"):
    """Form a group of this rank and rank 1."""
    endpoints = (offered.endpoints, peer.offer(offer(offered.generation, engine)))
    return m.Form(
        run="r", generation=offered.generation, engine=engine, ranks=(0, 1), endpoints=endpoints, layout_digest="x"
    )


def fence(generation):
    return m.Fence(run="r", generation=generation)


def next_order(line):
    return line.control.orders.get(timeout=DEADLINE_SECONDS)


def joining(line):
    order = next_order(line)
    assert isinstance(order, Joining), order
    return order


def complete(*groups):
    threads = [threading.Thread(target=group.complete) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)


def test_a_group_is_offered_formed_and_fenced(line, peer, progress):
    line.tell(offer(FIRST))
    offered = line.hear(m.Offered)
    assert len(offered.endpoints) == 1
    assert offered.endpoints[0].startswith("127.0.0.1:")
    line.tell(offer(FIRST))
    assert line.hear(m.Offered) == offered, "asked again, the same endpoints"
    order = form(offered, peer)
    other = peer.form(order)
    line.tell(order)
    joined = joining(line)
    assert progress.formed == FIRST
    complete(joined.group, other)
    line.tell(order, offer(FIRST), fence(SECOND))
    assert line.hear(m.Fenced).generation == SECOND, "what has no outcome yet is not answered, nor begun again"
    assert isinstance(next_order(line), m.Fence)
    assert joined.group._reducers[0]._reap() == -signal.SIGKILL
    joined.group.close()
    other.close()


def test_an_outcome_is_repeated_when_the_agent_asks_again(line, progress):
    line.tell(offer(FIRST))
    line.hear(m.Offered)
    line.tell(m.Form(run="r", generation=FIRST, engine="gloo", ranks=(0, 1), endpoints=(("a:1",), ("b:1",))))
    failed = line.hear(m.GroupFailed)
    assert failed.reason == "rank 0 has no gloo endpoints open for g1.1"
    line.tell(m.Form(run="r", generation=FIRST, engine="ring", ranks=(0, 1)))
    assert line.hear(m.GroupFailed) == failed
    line.control.groups.outcome = formed = line.control.groups.formed(SECOND, 0.5, 1.5)
    assert progress.form(m.Form(run="r", generation=SECOND, engine="ring", ranks=(0, 1)))
    line.tell(m.Form(run="r", generation=SECOND, engine="ring", ranks=(0, 1)))
    assert line.hear(m.Formed) == formed
    assert line.control.orders.empty()


def test_a_fence_during_a_join_ends_it_at_once(line, peer, progress):
    line.tell(offer(FIRST, "gloo"))
    line.tell(form(line.hear(m.Offered), peer, "gloo"))
    group = joining(line).group
    process = psutil.Process(pid_of(group._reducers[0]))
    line.tell(fence(SECOND))
    line.hear(m.Fenced)
    assert progress.formed is None
    with pytest.raises(AbandonedError):
        group.complete()
    group.close()
    assert not process.is_running()
    line.tell(offer(THIRD, "gloo"))
    assert line.hear(m.Offered).generation == THIRD, "the next can be offered"


def test_what_is_older_than_a_fence_is_dropped(line, peer, progress):
    line.tell(offer(FIRST))
    offered = line.hear(m.Offered)
    line.tell(fence(SECOND), form(offered, peer), offer(FIRST), fence(FIRST), offer(THIRD))
    line.hear(m.Fenced)
    assert line.hear(m.Offered).generation == THIRD
    assert (progress.formed, progress.highest) == (None, SECOND)
    assert isinstance(next_order(line), m.Fence)
    assert line.control.orders.empty()


def test_a_form_of_another_generation_than_was_offered_fails(line, peer):
    line.tell(offer(FIRST))
    order = form(line.hear(m.Offered), peer)
    line.tell(m.Form(run="r", generation=SECOND, engine="ring", ranks=(0, 1), endpoints=order.endpoints))
    assert line.hear(m.GroupFailed).reason == "rank 0 has no ring endpoints open for g1.2"
    line.tell(m.Form(run="r", generation=THIRD, engine="none", ranks=(0, 1)))
    assert line.hear(m.GroupFailed).reason == "ranks [0, 1] cannot form a group without an engine"


def test_a_rank_that_is_left_out_leaves_and_waits(line, peer, progress):
    line.tell(offer(FIRST))
    line.tell(form(line.hear(m.Offered), peer))
    group = joining(line).group
    line.tell(m.Form(run="r", generation=SECOND, engine="none", ranks=(1,)))
    left = next_order(line)
    assert isinstance(left, Joined)
    assert left.generation == SECOND
    assert (progress.formed, progress.highest) == (None, SECOND)
    with pytest.raises(AbandonedError):
        group.complete()
    group.close()
    line.tell(fence(THIRD))
    assert line.hear(m.Fenced).last_step == 0, "it answers as others do"


def test_leaving_ends_the_wait_for_other_ranks(line, peer):
    line.tell(offer(FIRST))
    line.tell(form(line.hear(m.Offered), peer))
    group = joining(line).group
    line.control.leave(m.Leave(run="r", reason="ended by a signal"))
    with pytest.raises(AbandonedError):
        group.complete()
    group.close()
    assert isinstance(next_order(line), m.Leave)


@pytest.mark.parametrize("links", [1, 3])
def test_a_ring_has_as_many_endpoints_as_links(line, links):
    membership = line.control.groups.membership
    membership._table = GroupTable(links_per_peer=links)
    line.tell(offer(FIRST), offer(SECOND, "gloo"))
    assert len(set(line.hear(m.Offered).endpoints)) == links
    assert len(line.hear(m.Offered).endpoints) == 1
