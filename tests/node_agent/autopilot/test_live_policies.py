"""Policies of a live run of two nodes: their modes in the run file, by the verb, undone, and over a kill."""

import json
from typing import Any

import pytest
from tests.asking import events_of, run_of
from tests.cluster.in_process import BlockingCluster
from tests.cluster.run_files import FOREVER, RING, on
from tests.cluster.waits import plans_of, wait_for_end, wait_for_step
from tests.tui.support.cli_calls import call
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages.events import PolicyAdvised, PolicyModeChanged
from trainctl.tui.commands import undo

FIRST_SHARES = "first-shares"


def started(client: BlockingClient, run_config: Any, steps: int, mode: str) -> str:
    policy = {FIRST_SHARES: {"mode": mode}}
    config = run_config(run__steps=steps, nodes=on("alpha", "beta"), group=RING, policy=policy)
    begun = client.send("start-run", {"config": config}, timeout_seconds=120)
    assert begun.state == "applied", begun.reason
    assert begun.run is not None
    return begun.run


def by_policy(client: BlockingClient, run: str) -> list[m.Event]:
    return [event for event in events_of(client, run) if event.by.startswith("auto:")]


def trainctl(cluster: BlockingCluster, *words: str) -> str:
    """A command line to its end."""
    ended = call(*words, TRAINCTL_CONNECT=cluster["alpha"].address)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def modes(client: BlockingClient) -> dict[str, str]:
    run = run_of(client)
    assert run is not None
    return {policy.name: policy.mode for policy in run.policies}


def test_off_in_the_run_file_then_changed_undone_and_kept_over_a_kill(
    cluster: BlockingCluster, run_config: Any
) -> None:
    with cluster.client("alpha") as client:
        run = started(client, run_config, FOREVER, "off")
        wait_for_step(client, 3)
        assert not by_policy(client, run)
        assert "measure" not in {plan.kind for plan in plans_of(cluster.run_paths("alpha", run))}
        trainctl(cluster, "send", "autopilot", f"name={FIRST_SHARES}", "mode=on")
        assert f"{FIRST_SHARES} on" in trainctl(cluster, "status")
        told = json.loads(trainctl(cluster, "status", "--json"))
        assert {"name": FIRST_SHARES, "mode": "on"} in told["run"]["policies"]
        seen = {one["name"]: one for one in json.loads(trainctl(cluster, "policies", "--json"))["policies"]}
        assert (seen[FIRST_SHARES]["mode"], seen["rebalance"]["figures"]) == ("on", [])
        assert seen["non-finite"]["figures"][0]["value"] == 0
        with cluster.client("beta") as follower:
            assert (
                follower.ask(m.PoliciesRequest, run).policies[0].name
                == client.ask(m.PoliciesRequest, run).policies[0].name
            )
            told = follower.ask(m.DiagnosisRequest)  # the lead answers, which knows more than the record
            assert (told.run, told.live, told.diagnosis.step > 2) == (run, True, True)
            assert follower.ask(m.DiagnosisRequest, run, 2).diagnosis.step == 2
        cluster["alpha"].kill()
    cluster["alpha"].start()
    with cluster.client("alpha") as client:
        until(lambda: run_of(client), what="the run, by the next agent")
        assert modes(client)[FIRST_SHARES] == "on"
        events = events_of(client, run)
        (changed,) = [event for event in events if isinstance(event.data, PolicyModeChanged)]
        assert changed.text == f"policy {FIRST_SHARES}: off → on"
        inverse = undo.of(changed, run_of(client), events).order
        reply = client.send(inverse.verb, dict(inverse.args), undoes=inverse.undoes)
        assert (reply.state, reply.after) == ("applied", f"{FIRST_SHARES} off")
        assert modes(client)[FIRST_SHARES] == "off"
        events = events_of(client, run)
        assert changed.id in undo.undone_by(events)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        assert wait_for_end(client).state == "stopped"
        with pytest.raises(RefusedError, match="isn't active: its policies see nothing"):
            client.ask(m.PoliciesRequest, run)
        assert not client.ask(m.DiagnosisRequest, run).live


def test_advising_it_measures_and_names_the_command(cluster: BlockingCluster, run_config: Any) -> None:
    with cluster.client("alpha") as client:
        run = started(client, run_config, 5, "advise")
        assert wait_for_end(client).state == "finished"
        (advice,) = by_policy(client, run)
    assert isinstance(advice.data, PolicyAdvised)
    assert (advice.by, advice.step, advice.data.name) == (f"auto:{FIRST_SHARES}", 0, FIRST_SHARES)
    assert advice.data.command.startswith("rebalance alpha=")
    assert advice.data.reason.startswith("initial shares by measured samples per second: alpha ")
    first = next(plan for plan in plans_of(cluster.run_paths("alpha", run)) if plan.kind == "train")
    assert [sum(piece.count for piece in work.ranges) for work in first.work] == [6, 6]
