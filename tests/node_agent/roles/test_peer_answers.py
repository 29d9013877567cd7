"""An agent's answers to a peer that greets it as a lead: every number, name, run and generation is looked at."""

import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from tests.cluster.greeter import LEAD, Greeter
from tests.cluster.in_process import BlockingCluster
from tests.cluster.run_files import on
from tests.waiting import until

from trainctl.protocol import messages as m

RUN = "raw-20260101-000000-0000"


@pytest.fixture
def greeter(cluster: BlockingCluster) -> Iterator[Callable[[str], Greeter]]:
    context, made = zmq.Context(), []

    def make(link: str) -> Greeter:
        made.append(Greeter(context, cluster["gamma"].address, link * 16))
        return made[-1]

    yield make
    for one in made:
        one.socket.close(linger=0)
    context.term()


def test_whoever_is_not_known_or_missed_a_number_is_told_to_begin_again(greeter):
    lead = greeter("a")
    lead.say(m.PeerPing(link=lead.link, seq=0))
    assert lead.hear(m.PeerRefusal).code == "unknown-link"
    lead.greet()
    assert lead.hear(m.PeerWelcome).node == "gamma"
    lead.say(m.PeerPing(link=lead.link, seq=0))
    assert lead.hear(m.PeerBeat).seq == 0
    for seq in (3, 0):
        lead.say(m.PeerPing(link=lead.link, seq=seq))
        assert lead.hear(m.PeerRefusal).code == "unknown-link"


def test_a_newer_greeting_takes_the_place_of_an_older_one(greeter):
    first, second = greeter("a"), greeter("b")
    for one in (first, second):
        one.greet()
        one.hear(m.PeerWelcome)
    first.say(m.PeerPing(link=first.link, seq=0))
    assert first.hear(m.PeerRefusal).code == "unknown-link"
    second.say(m.PeerPing(link=second.link, seq=0))
    assert second.hear(m.PeerBeat).seq == 0


def test_orders_for_what_is_not_hosted_and_of_a_generation_that_was_left_are_refused(cluster, greeter, run_config):
    lead = greeter("a")
    lead.greet()
    lead.hear(m.PeerWelcome)
    lead.relay(1, m.Fence(run=RUN, generation=m.Generation(1, 1)))
    assert lead.hear(m.PeerRefusal).code == "busy"
    lead.say(m.PeerEnd(link=lead.link, seq=2, run=RUN, rank=1, state="stopping"))
    assert lead.hear(m.PeerExit).why == "is no longer known to its agent"
    config = run_config(nodes=on("alpha", "gamma"))
    for seq, (run, field) in enumerate((("../../etc", "run"), (RUN, "")), 3):
        lead.say(m.PeerHost(link=lead.link, seq=seq, run=run, rank=1, config=config, generation=m.Generation(1, 0)))
        assert lead.hear(m.PeerHosted).field == field
    assert cluster.run_paths("gamma", RUN).run_file.is_file()
    lead.relay(5, m.Fence(run=RUN, generation=m.Generation(1, 5)))
    lead.relay(6, m.Fence(run=RUN, generation=m.Generation(1, 4)))
    refused = until(lead.next_refusal, 20, "a refusal")
    assert (refused.code, "g1.5" in refused.text) == ("older-term", True)
    older, again = greeter("b"), greeter("c")
    older.greet(RUN, term=0)
    assert older.hear(m.PeerRefusal).code == "older-term"
    again.greet(RUN)
    assert [(hosted.run, hosted.rank) for hosted in again.hear(m.PeerWelcome).ranks] == [(RUN, 1)]
    view = cluster.view("gamma")
    assert (view.run, view.lead, view.generation) == (RUN, LEAD, m.Generation(1, 5))
    again.say(m.PeerEnd(link=again.link, seq=1, run=RUN, rank=1, state="starting"))
    until(lambda: not cluster.run_paths("gamma", RUN).directory.exists(), 20, "the end of a run that never began")
    with cluster.client("gamma") as client:
        assert RUN not in [known.run for known in client.ask(m.RunsRequest).runs]


def test_a_message_lost_late_in_a_run_costs_a_greeting_and_not_the_trainer(cluster, greeter, run_config):
    """However long the run has been going, the silence that ends its trainer is counted from the lead's last word."""
    lead, again = greeter("a"), greeter("b")
    silence_seconds = 2.0
    config = run_config(run__orphan_seconds=silence_seconds, nodes=on("alpha", "gamma"))
    lead.greet()
    lead.hear(m.PeerWelcome)
    lead.say(m.PeerHost(link=lead.link, seq=1, run=RUN, rank=1, config=config, generation=m.Generation(1, 0)))
    assert lead.hear(m.PeerHosted).problem == ""
    (trainer,) = cluster["gamma"].trainers
    until(lambda: pinged(lead) and time.time() - trainer.started_at > silence_seconds, what="an old run")
    lead.say(m.PeerPing(link=lead.link, seq=3))
    assert until(lead.next_refusal, 20, "a refusal").code == "unknown-link"
    again.greet(RUN)
    (hosted,) = again.hear(m.PeerWelcome).ranks
    assert (hosted.run, hosted.pid) == (RUN, trainer.pid)
    again.say(m.PeerEnd(link=again.link, seq=1, run=RUN, rank=1, state="starting"))
    until(lambda: not trainer.is_alive, what="the trainer's end")


def pinged(lead: Greeter) -> bool:
    lead.say(m.PeerPing(link=lead.link, seq=1))
    return True
