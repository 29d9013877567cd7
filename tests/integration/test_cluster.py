"""A lead and its followers: who hosts what, who refuses what, and what clients see of all of them."""

import zmq
from tests.asking import events_of, run_of
from tests.cluster.greeter import Greeter
from tests.cluster.run_files import on, on_mlx
from tests.cluster.waits import all_steps, plans_of, wait_for_end
from tests.waiting import until

from trainctl.protocol import messages as m


def test_a_rank_on_another_node_is_hosted_there_and_conducted_from_here(cluster, run_config):
    with cluster.client("alpha") as client, cluster.client("beta") as follower:
        begun = client.send("start-run", {"config": run_config(run__steps=25, nodes=on_mlx("beta"))})
        assert (begun.state, begun.step) == ("applied", 1)
        seen = run_of(follower)
        view = wait_for_end(client)
        log = client.ask(m.LogRequest, view.run, 0)
        steps = all_steps(client, view.run)
        until(
            lambda: follower.ask(m.RunsRequest).runs[0].state == "finished", 10, "the follower's word that it is over"
        )
    assert (view.state, view.lead, [(rank.rank, rank.node) for rank in view.ranks]) == (
        "finished",
        "alpha",
        [(0, "beta")],
    )
    assert [step.step for step in steps] == list(range(1, 26))
    assert (seen.run, seen.lead, [rank.node for rank in seen.ranks]) == (view.run, "alpha", ["beta"])
    assert log.text == cluster.run_paths("beta", view.run).log(0).read_text()
    assert plans_of(cluster.run_paths("alpha", view.run)) == plans_of(cluster.run_paths("beta", view.run))
    assert not cluster.run_paths("alpha", view.run).log(0).exists()


def test_unlike_ranks_without_shares_begin_with_those_that_a_measurement_gives(cluster, run_config):
    nodes = on("alpha", "beta", beta={"backend": "mlx"})  # on a CPU MLX takes many times as long
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": run_config(run__steps=5, nodes=nodes)}, timeout_seconds=120)
        assert begun.state == "applied", begun.reason
        assert wait_for_end(client).state == "finished"
        events = events_of(client, begun.run)
    plans = plans_of(cluster.run_paths("alpha", begun.run))
    first = next(plan for plan in plans if plan.kind == "train")
    before = [(plan.kind, plan.step) for plan in plans[: plans.index(first)]]
    assert [*dict.fromkeys(before)] == [("probe", 0), ("measure", 0)], "each again if the group is formed again"
    assert first.step == 1
    (timed,) = [event for event in events if "initial shares by measured samples per second" in event.text]
    alpha, beta = (sum(piece.count for piece in work.ranges) for work in first.work)
    assert timed.after == f"alpha={alpha} beta={beta}"
    assert timed.before == "alpha=6 beta=6"
    assert (timed.step, alpha + beta) == (0, 12)


def test_a_rank_hosted_for_a_lead_made_by_hand_obeys_no_generation_that_was_left(cluster, run_config):
    """Other answers to peers are tested in tests/node_agent/roles/test_peer_answers.py."""
    run, config = "raw-20260101-000000-0000", run_config(nodes=on_mlx("alpha", "gamma"))
    with zmq.Context() as context:
        lead = Greeter(context, cluster["gamma"].address, "a" * 16)
        lead.greet()
        lead.hear(m.PeerWelcome)
        lead.say(m.PeerHost(link=lead.link, seq=1, run=run, rank=1, config=config, generation=m.Generation(1, 0)))
        assert lead.hear(m.PeerHosted).problem == ""
        lead.relay(2, m.Fence(run=run, generation=m.Generation(1, 5)))
        lead.relay(3, m.Fence(run=run, generation=m.Generation(1, 4)))
        assert until(lead.next_refusal, 20, "a refusal").code == "older-term"
        lead.say(m.PeerEnd(link=lead.link, seq=4, run=run, rank=1, state="starting"))
        until(lambda: not cluster.run_paths("gamma", run).directory.exists(), 20, "the end of a run that never began")
        lead.socket.close(linger=0)
