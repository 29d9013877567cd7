"""A run goes back to a checkpoint: by a command, or as newer ones are gone; it never starts over unasked."""

import shutil
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.asking import events_of, run_of
from tests.cluster.in_process import BlockingAgent, BlockingCluster
from tests.cluster.run_files import FOREVER, NODE, RING, on
from tests.cluster.waits import all_steps, wait_for_checkpoint, wait_for_end, wait_for_step
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record import checkpoints

G = 12
CHECKPOINT = {"every_steps": 5, "keep_last": 1000, "at_end": False}
"""No checkpoint is removed, however many steps a run makes before it is looked at."""


def stop(client: BlockingClient) -> int:
    """End the run, and return its last step."""
    assert client.send("stop", {"checkpoint": False}).state == "applied"
    view = wait_for_end(client)
    assert view.state == "stopped", view.reason
    return view.step


def test_a_run_goes_back_and_skips_the_data_that_followed(agent: BlockingAgent, run_config: Any) -> None:
    with agent.client() as client:
        config = run_config(run__steps=FOREVER, nodes=on(NODE), checkpoint=CHECKPOINT)
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        assert wait_for_checkpoint(client, begun.run or "") == 5
        wait_for_step(client, 7)
        assert client.send("defragment", {}).state == "applied"
        assert client.send("pause", {}).state == "applied"
        refused = client.send("rollback", {"step": 6})
        assert (refused.state, refused.field) == ("rejected", "step")
        reply = client.send("rollback", {"step": 5, "skip_batches": 3})
        assert reply.state == "applied", reply.reason
        assert reply.after is not None and "to step 5 and skip 3 global batches after it" in reply.after

        def is_back() -> bool:
            run = run_of(client)
            return run is not None and (run.state, run.step) == ("paused", 5)

        until(is_back, what="the run, at step 5")
        assert run_of(client).skipped == ((60, 36),)  # type: ignore[union-attr]
        assert client.send("resume", {}).state == "applied"
        wait_for_step(client, 12)
        last = stop(client)
        cursors = {step.step: step.cursor for step in all_steps(client)}
        assert cursors == {step: G * (step if step <= 5 else step + 3) for step in range(1, last + 1)}
        events = events_of(client, begun.run)
        assert not [event.text for event in events if event.severity == "error"]
        texts = [event.text for event in events]
        assert any("positions 60 to 95 are skipped: their samples aren't trained on" in text for text in texts)


def test_several_nodes_go_back_together_and_none_is_said_to_have_failed(
    cluster: BlockingCluster, run_config: Any
) -> None:
    with cluster.client("alpha") as client:
        config = run_config(run__steps=FOREVER, nodes=on("alpha", "beta"), group=RING, checkpoint=CHECKPOINT)
        begun = client.send("start-run", {"config": config}, timeout_seconds=120)
        assert begun.state == "applied", begun.reason
        assert wait_for_checkpoint(client, begun.run or "") == 5
        term = run_of(client).generation  # type: ignore[union-attr]
        assert client.send("rollback", {"step": 5, "skip_batches": 2}).state == "applied"
        until(lambda: run_of(client).generation > term, what="the run, at step 5")  # type: ignore[union-attr]
        wait_for_step(client, 12)
        last = stop(client)
        cursors = {step.step: step.cursor for step in all_steps(client)}
        assert cursors == {step: G * (step if step <= 5 else step + 2) for step in range(1, last + 1)}
        assert {rank.node: rank.state for rank in run_of(client).ranks} == {"alpha": "done", "beta": "done"}  # type: ignore[union-attr]
        assert not [event.text for event in events_of(client, begun.run) if event.severity == "error"]


KEPT = {"every_steps": 5, "at_end": False, "background": False}


class Ended:
    """A run that ended after a few checkpoints."""

    def __init__(self, agent: BlockingAgent, run: str) -> None:
        self.agent, self.run, self.folder = agent, run, agent.inner.run_paths(run).checkpoints
        self.steps = sorted(checkpoints.read_manifest(folder).step for folder in checkpoints.listed(self.folder))

    def lose(self, *steps: int) -> None:
        for step in steps:
            shutil.rmtree(self.folder / f"step-{step}")

    def resume(self, **args: int) -> m.CommandReply:
        with self.agent.client() as client:
            return client.send("start-run", {"resume": self.run, **args})

    def events(self) -> list[str]:
        with self.agent.client() as client:
            return [event.text for event in client.ask(m.EventsRequest, self.run, newest=True, limit=200).events]


@pytest.fixture
def ended(agent: BlockingAgent, run_config: Callable[..., dict]) -> Ended:
    with agent.client() as client:
        run = client.send("start-run", {"config": run_config(run__steps=FOREVER, checkpoint=KEPT)}).run
        assert run is not None
        wait_for_step(client, 22)
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
    found = Ended(agent, run)
    assert len(found.steps) > 2
    return found


def test_without_its_newest_checkpoints_a_run_goes_back_further_and_names_them(ended: Ended) -> None:
    oldest, *newer = ended.steps
    ended.lose(*newer)
    reply = ended.resume()
    assert (reply.state, reply.step) == ("applied", oldest + 1), reply.reason
    (said,) = [text for text in ended.events() if "gone, damaged or out of reach" in text]
    assert ", ".join(map(str, newer[-2:])) in said, "those that retention keeps"
    assert f"goes back to step {oldest}" in said


def test_without_any_it_is_refused_until_a_fresh_start_is_asked_for(ended: Ended) -> None:
    ended.lose(*ended.steps)
    refused = ended.resume()
    assert refused.state == "rejected", "it would have started over"
    assert str(ended.steps[-1]) in refused.reason and "--from-step 0" in refused.reason
    again = ended.resume(from_step=0)
    assert (again.state, again.step) == ("applied", 1)


def test_an_older_one_is_taken_if_asked_for_and_one_that_is_not_there_is_refused(ended: Ended) -> None:
    oldest = ended.steps[0]
    refused = ended.resume(from_step=oldest + 1)
    assert refused.state == "rejected" and f"newest before it is of step {oldest}" in refused.reason
    taken = ended.resume(from_step=oldest)
    assert (taken.state, taken.step) == ("applied", oldest + 1)


def test_a_folder_under_another_step_s_name_does_not_count(ended: Ended) -> None:
    newest = ended.folder / f"step-{ended.steps[-1]}"
    shutil.copytree(newest, ended.folder / "step-99999")
    reply = ended.resume()
    assert (reply.state, reply.step) == ("applied", ended.steps[-1] + 1)


def test_a_manifest_of_another_step_does_not_restart_the_run(ended: Ended) -> None:
    for folder in checkpoints.listed(ended.folder):
        manifest = msgspec.structs.replace(checkpoints.read_manifest(folder), step=0)
        (folder / checkpoints.MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    assert ended.resume().state == "rejected"
