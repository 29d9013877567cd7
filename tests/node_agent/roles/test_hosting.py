"""A lead and its followers: who hosts what, who refuses what, and a majority that must be in reach."""

import signal

from tests.asking import newest_events, run_of
from tests.cluster.in_process import BlockingCluster, blocking_cluster
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import newest_step, plans_of, resumed, wait_for_end, wait_for_step
from tests.integration.support.ports import free_addresses
from tests.waiting import until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import cluster_file
from trainctl.protocol.messages import EventsRequest, HistoryRequest, HostsRequest, RunsRequest, SnapshotRequest


def refused_runs(cluster: BlockingCluster) -> list[str]:
    """Return what is left of these runs on any node."""
    return [path.name for node in NODES for path in cluster[node].directory.glob("runs/refused-*")]


def test_a_refusal_names_node_and_field_and_leaves_nothing_anywhere(cluster, run_config, tmp_path):
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
            until(lambda: not refused_runs(cluster), 20, "a clean sheet")
            assert run_of(client) is None or run_of(client).name != "refused"
    until(lambda: not any(cluster[node].trainers for node in NODES), 20, "the end of trainers called off")


def test_one_run_per_cluster_and_its_only_rank_is_on_another_node_than_its_lead(cluster, run_config):
    """Steered through a follower; begun again when its trainer dies, taken up from its checkpoint, which is there too,
    and once more when its lead has been away for long."""
    config = run_config(run__steps=FOREVER, run__orphan_seconds=2, nodes=on("beta"))
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
        found = client.ask(HistoryRequest, run, ("memory_used_bytes", "round_trip_seconds")).series
        return [one.rank for one in found] == [0, 0] and all(one.steps and min(one.minimum) > 0 for one in found)

    until(by_step, 30, "readings of the follower's machine by step")
    until(
        lambda: {one.node for one in client.ask(HostsRequest, run).readings} >= {"alpha", "beta"},
        30,
        "both machines' readings",
    )
    timed = {one.node for one in client.ask(HostsRequest, run).readings if "round_trip_seconds" in one.values}
    assert timed <= {"beta"}, "the lead has no way to itself"
    first = client.ask(HostsRequest, run, limit=1)
    assert (len(first.readings), first.more) == (1, True)
    assert first.readings[0] not in client.ask(HostsRequest, run, after_row=first.last_row).readings


def begin_again(cluster, client, run: str) -> None:
    """Kill the only trainer, and see the run taken up again with another."""
    (trainer,) = cluster["beta"].trainers
    cluster.call(trainer.die, -signal.SIGKILL)
    until(lambda: cluster["beta"].trainers not in ([], [trainer]), 30, "another trainer")
    view = until(lambda: (v := run_of(client)).state == "running" and v.step >= 2 and v, 60, "its steps")
    assert view.run == run
    texts = [event.text for event in newest_events(client)]
    assert any(text.startswith("rank 0 (beta) was ended by signal 9") and "going back" in text for text in texts)
    assert any(text.startswith("resumed from step 0") for text in texts)


def take_up_from_there(cluster, client, run: str, at: int) -> None:
    """Refused by name while the checkpoint isn't to be had."""
    assert (newest_step(cluster, "alpha", run), newest_step(cluster, "beta", run)) == (0, at)
    until(lambda: not cluster["beta"].trainers, 20, "the trainer's end")
    newest, aside = cluster.run_paths("beta", run).checkpoints / f"step-{at}", cluster.run_paths("beta", run).logs
    newest.rename(aside / newest.name)
    refused = client.send("start-run", {"resume": run})
    assert (refused.state, refused.field) == ("rejected", "resume")
    assert "beta" in refused.reason and f"step-{at}" in refused.reason
    (aside / newest.name).rename(newest)
    resumed(cluster, run, at)


def stay_away(cluster, client, follower, run: str) -> None:
    """The follower has its trainer write a checkpoint and end, and says why; the lead goes on from there when it is
    back."""
    assert len(cluster["beta"].trainers) == 1
    wait_for_step(client, newest_step(cluster, "beta", run) + 5)
    cluster["alpha"].kill()
    gone = until(
        lambda: next((r for r in follower.ask(RunsRequest).runs if r.run == run and r.state == "failed"), None),
        20,
        "its end",
    )
    until(lambda: not cluster["beta"].trainers, 20, "the trainer's end")
    written = newest_step(cluster, "beta", run)
    assert written >= gone.step >= 1, "no step is lost"
    assert "alpha" in follower.ask(SnapshotRequest, 0, run).run.reason
    cluster["alpha"].start()
    until(lambda: run_of(client).state == "running", 60, "the run from its checkpoint")
    texts = [event.text for event in newest_events(client)]
    assert any("beta" in text and "silent" in text and "going back" in text for text in texts)
    assert any(text.startswith(f"resumed from step {written}") for text in texts), texts


def test_a_node_that_cannot_be_reached_is_named(cluster, run_config):
    cluster["gamma"].stop()
    with cluster.client("alpha") as client:
        until(
            lambda: {peer.node: peer.state for peer in client.ask(SnapshotRequest, 0).peers}["gamma"] == "silent",
            20,
            "silence",
        )
        reply = client.send("start-run", {"config": run_config(run__name="refused", nodes=on("alpha", "gamma"))})
        assert (reply.state, reply.field) == ("rejected", "config: nodes.gamma")
        assert "gamma is unreachable" in reply.reason


def still(cluster: BlockingCluster, client: BlockingClient) -> int:
    """The step that the run stands at, 0 as long as a step that was planned before is still to come."""
    view = run_of(client)
    planned = plans_of(cluster.run_paths("alpha", view.run))
    return view.step if view.step == max(plan.step for plan in planned if plan.kind == "train") else 0


def test_no_step_is_made_without_a_majority_and_a_node_at_another_address_is_found(run_config, tmp_path):
    with blocking_cluster(tmp_path, quorum=True) as strict, strict.client("alpha") as client:
        assert (
            client.send("start-run", {"config": run_config(run__steps=FOREVER, nodes=on("alpha"))}).state == "applied"
        )
        wait_for_step(client, 3)
        strict["beta"].kill()
        until(
            lambda: {peer.node: peer.state for peer in client.ask(SnapshotRequest, 0).peers}["beta"] == "silent",
            what="silence",
        )
        went_on = wait_for_step(client, run_of(client).step + 5).run
        assert (went_on.state, went_on.reason) == ("running", "")
        strict["gamma"].kill()
        stands = until(lambda: (v := run_of(client)).state == "starting" and v, 20, "the standstill")
        assert "1 of 3 nodes reachable, a majority is 2; missing: beta, gamma" in stands.reason
        step = until(lambda: still(strict, client), what="the end of the last step")
        # What is not for a step is still done.
        assert client.send("checkpoint", {}).state == "applied"
        assert run_of(client).step == step
        beta = strict["beta"].inner
        (moved,) = free_addresses(1)
        strict.file.write_text(strict.file.read_text().replace(beta.address, moved))
        beta.cluster, beta.address = cluster_file.read(strict.file), moved  # the others don't know of it
        strict["beta"].start()
        wait_for_step(client, step + 5)
        peers = {peer.node: (peer.address, peer.state) for peer in client.ask(SnapshotRequest, 0).peers}
        assert peers["beta"] == (moved, "connected")
        texts = [event.text for event in client.ask(EventsRequest, limit=100).events]
        assert any(text.startswith("training is waiting: 1 of 3 nodes reachable") for text in texts)
        assert any("enough nodes are reachable" in text for text in texts)
        assert any(f"beta's agent is now at {moved}" in text for text in texts)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        assert wait_for_end(client).state == "stopped"
