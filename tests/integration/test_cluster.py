"""A lead and its followers: who hosts what, who refuses what, and what clients see of all of them."""

import os
import signal

import pytest
import zmq
from tests.cluster.greeter import Greeter
from tests.cluster.run_files import FOREVER, on, on_mlx
from tests.cluster.waits import all_steps, plans_of, wait_for_end, wait_for_step
from tests.integration.support.resumed import newest_step, resumed
from tests.waiting import until

from trainctl.protocol import messages as m


def test_a_rank_on_another_node_is_hosted_there_and_conducted_from_here(cluster, run_config):
    with cluster.client("alpha") as client, cluster.client("beta") as follower:
        begun = client.send("start-run", {"config": run_config(run__steps=25, nodes=on_mlx("beta"))})
        assert (begun.state, begun.step) == ("applied", 1)
        seen = follower.snapshot(0).run
        view = wait_for_end(client)
        log = client.log(view.run, 0)
        steps = all_steps(client, view.run)
        until(lambda: follower.runs().runs[0].state == "finished", 10, "the follower's word that it is over")
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
        events = client.events(begun.run, limit=500).events
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


@pytest.fixture(scope="module")
def nothing_left(three_agents):
    """Whether a run that was refused has left anything anywhere."""

    def check(reply: m.CommandReply) -> bool:
        folders = [agent.directory / "runs" for agent in three_agents.agents.values()]
        runs = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
        return not [run for run in runs if run.startswith("refused-")]

    return check


def test_a_refusal_names_node_and_field_and_leaves_nothing_anywhere(cluster, run_config, nothing_left, tmp_path):
    missing, empty = str(tmp_path / "nowhere"), tmp_path / "empty.txt"
    empty.write_text("")
    for nodes, field, words in (
        (on("beta", "gamma", gamma={"data_path": missing}), "config: nodes.gamma.data_path", ("gamma", missing)),
        (on("alpha", "beta", beta={"model_path": missing}), "config: nodes.beta.model_path", ("beta", missing)),
        (on("alpha", "beta", alpha={"data_path": str(empty)}), "config: nodes.alpha.data_path", (str(empty),)),
        (on("alpha", "beta", beta={"interface": "wire9"}), "config: nodes.beta.interface", ("beta", "wire9")),
        (on("alpha", "delta"), "config: nodes.delta", ("alpha, beta, gamma",)),
    ):
        with cluster.client("alpha") as client:
            reply = client.send("start-run", {"config": run_config(run__name="refused", nodes=nodes)})
            assert (reply.state, reply.field) == ("rejected", field)
            assert all(word in reply.reason for word in words), reply.reason
            until(lambda reply=reply: nothing_left(reply), 20, "a clean sheet")
            assert client.snapshot(0).run is None or client.snapshot(0).run.name != "refused"
    until(lambda: not any(cluster.trainers().values()), 20, "the end of trainers called off")


@pytest.mark.timeout(240)
def test_one_run_per_cluster_and_its_only_rank_is_on_another_node_than_its_lead(cluster, run_config):
    """Steered through a follower; begun again when its trainer dies, taken up from its checkpoint, which is there too,
    and once more when its lead has been away for long."""
    config = run_config(run__steps=FOREVER, run__orphan_seconds=2, nodes=on_mlx("beta"))
    with cluster.client("alpha") as client, cluster.client("beta") as follower, cluster.client("gamma") as third:
        client.send("start-run", {"config": config}, wait="accepted")
        run = wait_for_step(client, 2).run.run
        other = third.send("start-run", {"config": run_config(run__name="refused", nodes=on("gamma", "beta"))})
        assert (other.state, other.field) == ("rejected", "run")
        assert "beta" in other.reason and run in other.reason
        again = third.send("start-run", {"config": run_config(run__name="refused", nodes=on("alpha"))})
        assert "alpha" in again.reason and "leads" in again.reason
        resized = follower.send("resize-batch", {"micro": 2})
        assert resized.state == "applied" and resized.step > 1
        machines_are_in_the_record(client, run)
        busy = follower.send("start-run", {"config": run_config()})
        assert (busy.state, busy.field) == ("rejected", "run")
        begin_again(cluster, client, run)
        assert follower.send("stop", {}).state == "applied"
        ended = wait_for_end(client)
        assert ended.state == "stopped"
        refused = follower.send("start-run", {"resume": "nobody"})
        assert (refused.state, refused.field) == ("rejected", "resume")
        take_up_from_there(cluster, client, run, ended.step)
        stay_away(cluster, client, follower, run)


def machines_are_in_the_record(client, run: str) -> None:
    """The lead's has readings of all machines by time, and by step those of the rank's."""

    def by_step() -> bool:
        found = client.history(run, ("memory_used_bytes", "round_trip_seconds")).series
        return [one.rank for one in found] == [0, 0] and all(one.steps and min(one.minimum) > 0 for one in found)

    until(by_step, 30, "readings of the follower's machine by step")
    until(lambda: {one.node for one in client.hosts(run).readings} >= {"alpha", "beta"}, 30, "both machines' readings")
    timed = {one.node for one in client.hosts(run).readings if "round_trip_seconds" in one.values}
    assert timed <= {"beta"}, "the lead has no way to itself"
    first = client.hosts(run, limit=1)
    assert (len(first.readings), first.more) == (1, True)
    assert first.readings[0] not in client.hosts(run, after_row=first.last_row).readings


def begin_again(cluster, client, run: str) -> None:
    """Kill the only trainer, and see the run taken up again with another."""
    (pid,) = cluster["beta"].trainer_pids()
    os.kill(pid, signal.SIGKILL)
    until(lambda: cluster["beta"].trainer_pids() not in ([], [pid]), 30, "another trainer")
    view = until(lambda: (v := client.snapshot(0).run).state == "running" and v.step >= 2 and v, 60, "its steps")
    assert view.run == run
    texts = [event.text for event in client.events(newest=True).events]
    assert any(text.startswith("rank 0 (beta) was ended by signal 9") and "going back" in text for text in texts)
    assert any(text.startswith("resumed from step 0") for text in texts)


def take_up_from_there(cluster, client, run: str, at: int) -> None:
    """Refused by name while the checkpoint isn't to be had."""
    assert (newest_step(cluster, "alpha", run), newest_step(cluster, "beta", run)) == (0, at)
    until(lambda: not any(cluster.trainers().values()), 20, "the trainers' end")
    newest, aside = cluster.run_paths("beta", run).checkpoints / f"step-{at}", cluster.run_paths("beta", run).logs
    newest.rename(aside / newest.name)
    refused = client.send("start-run", {"resume": run})
    assert (refused.state, refused.field) == ("rejected", "resume")
    assert "beta" in refused.reason and f"step-{at}" in refused.reason
    (aside / newest.name).rename(newest)
    resumed(cluster, run, at)


def stay_away(cluster, client, follower, run: str) -> None:
    """The follower ends its trainer and says why; the lead goes on from its checkpoint when it is back."""
    assert len(cluster["beta"].trainer_pids()) == 1
    cluster["alpha"].kill()
    gone = until(
        lambda: next((r for r in follower.runs().runs if r.run == run and r.state == "failed"), None), 20, "its end"
    )
    assert gone.step >= 1
    until(lambda: not cluster["beta"].trainer_pids(), 20, "the trainer's end")
    assert "alpha" in follower.snapshot(0, run).run.reason
    cluster.start("alpha")
    until(lambda: client.snapshot(0).run.state == "running", 60, "the run from its checkpoint")
    texts = [event.text for event in client.events(newest=True).events]
    assert any("beta" in text and "silent" in text and "going back" in text for text in texts)


def test_a_node_that_cannot_be_reached_is_named(cluster, run_config):
    cluster["gamma"].terminate()
    with cluster.client("alpha") as client:
        until(lambda: {peer.node: peer.state for peer in client.snapshot(0).peers}["gamma"] == "silent", 20, "silence")
        reply = client.send("start-run", {"config": run_config(run__name="refused", nodes=on("alpha", "gamma"))})
        assert (reply.state, reply.field) == ("rejected", "config: nodes.gamma")
        assert "gamma is unreachable" in reply.reason


def test_a_rank_hosted_for_a_lead_made_by_hand_obeys_no_generation_that_was_left(cluster, run_config):
    """What else a peer is answered is tested in tests/node_agent/roles/test_peer_answers.py."""
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
