"""A run of one rank whose trainer dies, has to leave or can't be started, and what it refuses."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.asking import events_of, newest_events, run_of
from tests.cluster.in_process import BlockingAgent, blocking_cluster
from tests.cluster.run_files import FOREVER, NODE
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.tui.support.cli_calls import call
from tests.waiting import until

from trainctl.node_agent.agent import Options
from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages import EventsRequest, LogRequest, StepsRequest
from trainctl.protocol.record import checkpoints

CHECKPOINTS = {"every_steps": 5, "at_end": False, "background": False}


def started(client: BlockingClient, config: dict) -> str:
    begun = client.send("start-run", {"config": config})
    assert begun.state == "applied", begun.reason
    wait_for_step(client, 3)
    return begun.run


def texts_of(client: BlockingClient) -> list[str]:
    return [event.text for event in newest_events(client)]


@pytest.mark.parametrize(("status", "words"), [(-signal.SIGKILL, "was ended by signal 9"), (1, "exited with 1")])
def test_a_run_whose_only_trainer_dies_goes_back_to_its_checkpoint(agent, run_config, status, words):
    """The newest one; what had been committed after it is marked, and made again to the same losses."""
    with agent.client() as client:
        run = started(client, run_config(run__steps=FOREVER, checkpoint=CHECKPOINTS))
        wait_for_step(client, 12)
        (trainer,) = agent.trainers
        agent.call(trainer.die, status)
        before = {step.step: step for step in all_steps(client, run)}
        last = before[max(before)]
        until(lambda: run_of(client).generation > last.generation, what="the run from its checkpoint")
        wait_for_step(client, last.step + 10)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        view = wait_for_end(client)
        assert (view.state, view.run) == ("stopped", run)
        after = all_steps(client, run)
        assert [step.step for step in after] == list(range(1, view.step + 1))
        assert all(step.loss == before[step.step].loss for step in after if step.step in before)
        texts = texts_of(client)
        assert any(words in text and "going back to the newest checkpoint" in text for text in texts), texts
        (taken,) = [text for text in texts if text.startswith("resumed from step ")]
        assert int(re.findall(r"\d+", taken)[0]) % 5 == 0


def test_commands_are_applied_though_the_trainer_is_killed_while_the_resume_starts(agent, run_config):
    """The run goes back and runs then: the resume has succeeded, and so has what was asked for meanwhile."""
    with agent.client() as client, agent.client() as other, ThreadPoolExecutor(2) as asking:
        run = started(client, run_config(run__steps=FOREVER, checkpoint=CHECKPOINTS))
        wait_for_step(client, 12)
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
        agent.inner.supervisor.starts_with[NODE] = {"work": lambda: None}  # it makes no step
        resumed = asking.submit(client.send, "start-run", {"resume": run})
        (trainer,) = until(lambda: agent.trainers, what="its trainer")
        until(lambda: trainer.sim.loaded, what="its loading")
        resized = asking.submit(other.send, "resize-batch", {"micro": 3}, node=NODE)
        with agent.client() as third:
            until(lambda: "resize-batch" in open_verbs(agent), what="the other command")
            agent.inner.supervisor.starts_with.clear()
            agent.call(trainer.die)
            for asked in (resumed, resized):
                reply = asked.result()
                assert (reply.state, reply.reason) == ("applied", ""), reply
            assert run_of(third).ranks[0].micro_batch == 3


def open_verbs(agent: BlockingAgent) -> set[str]:
    return {row.verb for row in agent.call(agent.inner.agent._db.open_commands)}


def test_a_trainer_that_cannot_be_started_refuses_the_run_and_leaves_nothing(agent: BlockingAgent, run_config):
    agent.call(agent.inner.supervisor.refuses.add, NODE)
    with agent.client() as client:
        reply = client.send("start-run", {"config": run_config()})
        assert reply.state in ("rejected", "failed") and "cannot be started: no memory" in reply.reason


def test_requests_about_unknown_runs_are_refused_by_name(agent):
    with agent.client() as client:
        for request in (EventsRequest, StepsRequest, LogRequest):
            with pytest.raises(RefusedError, match="nope"):
                client.ask(request, "nope")


def test_a_spot_notice_has_the_run_leave_and_its_withdrawal_takes_runs_again(run_config, tmp_path):
    """The last node leaves a checkpoint, and its agent stays until the machine is taken."""
    notice = tmp_path / "notice"
    options = Options(spot_notice=("test", "-e", str(notice)))
    with blocking_cluster(tmp_path, (NODE,), options=options) as cluster, cluster.client(NODE) as client:
        run = started(client, run_config(run__steps=FOREVER))
        notice.touch()
        view = wait_for_end(client)
        newest = checkpoints.newest_complete(cluster.run_paths(NODE, run).checkpoints)
        assert (view.state, newest and newest.name) == ("stopped", f"step-{view.step}")
        refused = client.send("start-run", {"resume": run})
        assert (refused.state, refused.reason) == ("rejected", "this node takes no rank: a spot notice")
        notice.unlink()
        until(lambda: client.send("start-run", {"resume": run}).state == "applied", what="the resumed run")
        wait_for_step(client, view.step + 2)
        said = [event.text for event in events_of(client, run)]
        assert any("the run stops with a checkpoint and can be resumed" in text for text in said)


def test_a_verb_that_the_run_does_not_take_is_refused_with_the_same_words_everywhere(agent, run_config):
    why = "there are no held-out samples: data.held_out = 0 comes to none; start a run with a larger one"
    with agent.client() as client:
        config = run_config(run__steps=FOREVER, data__held_out=0)
        client.send("start-run", {"config": config}, wait="accepted")
        run = wait_for_step(client, 1).run
        assert (run.kind, run.verbs) == ("hosted", (("evaluate", why),))
        assert client.ask(m.RunsRequest).runs[0].kind == "hosted"
        (live,) = client.ask(m.SnapshotRequest, 0).runs
        assert (live.run, live.state, live.kind, live.nodes) == (run.run, "running", "hosted", ("box",))
        reply = client.send("evaluate", {})
        assert (reply.state, reply.field, reply.reason) == ("rejected", "verb", why)
        for wait in ("applied", "none"):
            done = call("send", "evaluate", "--wait", wait, "--connect", agent.address)
            assert done.returncode == 3 and f"evaluate rejected: {why}" in done.stderr.replace("verb: ", ""), done
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        wait_for_end(client)
        until(
            lambda: client.ask(m.SnapshotRequest, 0).runs == (), what="a list of live runs without one that has ended"
        )
