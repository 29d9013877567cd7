"""What an agent answers to a peer that greets it as a lead: every number, name, run and generation is looked at."""

import time
from collections.abc import Iterator

import pytest
import zmq
from tests.integration.conftest import until
from tests.integration.support.clusters import Cluster, on_mlx
from tests.integration.support.greeter import LEAD, Greeter
from tests.waiting import slowness

from trainctl.protocol import messages as m
from trainctl.protocol.wire import codec


@pytest.fixture
def greeter(cluster: Cluster) -> Iterator:
    context, made = zmq.Context(), []

    def make(link: str = "a" * 16) -> Greeter:
        made.append(Greeter(context, cluster["gamma"].address, link))
        return made[-1]

    yield make
    for one in made:
        one.socket.close(linger=0)
    context.term()


def test_whoever_is_not_known_or_missed_a_number_is_told_to_begin_again(greeter):
    lead = greeter()
    lead.say(m.PeerPing(link=lead.link, seq=0))
    assert lead.hear(m.PeerRefusal).code == "unknown-link"
    lead.greet()
    assert (lead.hear(m.PeerWelcome).node, lead.link) == ("gamma", "a" * 16)
    lead.say(m.PeerPing(link=lead.link, seq=0))
    assert lead.hear(m.PeerBeat).seq == 0
    lead.say(m.PeerPing(link=lead.link, seq=3))
    assert lead.hear(m.PeerRefusal).code == "unknown-link"
    lead.say(m.PeerPing(link=lead.link, seq=0))
    assert lead.hear(m.PeerRefusal).code == "unknown-link"


def test_a_newer_greeting_takes_the_place_of_an_older_one(greeter):
    first, second = greeter("a" * 16), greeter("b" * 16)
    for one in (first, second):
        one.greet()
        one.hear(m.PeerWelcome)
    first.say(m.PeerPing(link=first.link, seq=0))
    assert first.hear(m.PeerRefusal).code == "unknown-link"
    second.say(m.PeerPing(link=second.link, seq=0))
    assert second.hear(m.PeerBeat).seq == 0


def test_orders_for_what_is_not_hosted_and_of_a_generation_that_was_left_are_refused(cluster, greeter, run_config):
    lead, run = greeter(), "raw-20260101-000000-0000"
    lead.greet()
    lead.hear(m.PeerWelcome)
    lead.relay(1, m.Fence(run=run, generation=m.Generation(1, 1)))
    assert lead.hear(m.PeerRefusal).code == "busy"
    lead.say(m.PeerEnd(link=lead.link, seq=2, run=run, rank=1, state="stopping"))
    assert lead.hear(m.PeerExit).why == "is no longer known to its agent"
    config = run_config(nodes=on_mlx("alpha", "gamma"))
    for seq, (run_id, field) in enumerate((("../../etc", "run"), (run, "")), 3):
        lead.say(m.PeerHost(link=lead.link, seq=seq, run=run_id, rank=1, config=config, generation=m.Generation(1, 0)))
        assert lead.hear(m.PeerHosted).field == field
    assert cluster.run_paths("gamma", run).run_file.is_file()
    lead.relay(5, m.Fence(run=run, generation=m.Generation(1, 5)))
    lead.relay(6, m.Fence(run=run, generation=m.Generation(1, 4)))
    refused = until(lambda: _next_refusal(lead), 20, "a refusal")
    assert (refused.code, "g1.5" in refused.text) == ("older-term", True)
    older, again = greeter("b" * 16), greeter("c" * 16)
    older.greet(run, term=0)
    assert older.hear(m.PeerRefusal).code == "older-term"
    again.greet(run)
    assert [(hosted.run, hosted.rank) for hosted in again.hear(m.PeerWelcome).ranks] == [(run, 1)]
    with cluster.client("gamma") as client:
        view = client.snapshot(0).run
        assert (view.run, view.lead, view.generation) == (run, LEAD, m.Generation(1, 5))
    again.say(m.PeerEnd(link=again.link, seq=1, run=run, rank=1, state="starting"))
    until(lambda: not cluster.run_paths("gamma", run).directory.exists(), 20, "the end of a run that never began")
    with cluster.client("gamma") as client:
        assert run not in [known.run for known in client.runs().runs]


def test_a_message_lost_late_in_a_run_costs_a_greeting_and_not_the_trainer(greeter, run_config):
    """However long the run has been going, the silence that ends its trainer is counted from the lead's last word."""
    lead, again, run = greeter(), greeter("b" * 16), "raw-20260101-000000-0001"
    silence_seconds = 2.5 * slowness()  # a busy machine may keep this test from its next word for as long
    config = run_config(run__orphan_seconds=silence_seconds, nodes=on_mlx("alpha", "gamma"))
    lead.greet()
    lead.hear(m.PeerWelcome)
    lead.say(m.PeerHost(link=lead.link, seq=1, run=run, rank=1, config=config, generation=m.Generation(1, 0)))
    assert lead.hear(m.PeerHosted).problem == ""
    began = time.monotonic()
    while time.monotonic() - began < silence_seconds + 1.0:
        lead.say(m.PeerPing(link=lead.link, seq=1))
        time.sleep(0.2)
    lead.say(m.PeerPing(link=lead.link, seq=3))
    assert until(lambda: _next_refusal(lead), 20, "a refusal").code == "unknown-link"
    time.sleep(0.5)
    again.greet(run)
    (hosted,) = again.hear(m.PeerWelcome).ranks
    assert (hosted.run, hosted.pid is not None) == (run, True)
    again.say(m.PeerEnd(link=again.link, seq=1, run=run, rank=1, state="starting"))


def _next_refusal(lead: Greeter) -> m.PeerRefusal | None:
    """What the trainer says meanwhile is passed over."""
    message = codec.decode_peer(lead.socket.recv()) if lead.socket.poll(100) else None
    return message if isinstance(message, m.PeerRefusal) else None
