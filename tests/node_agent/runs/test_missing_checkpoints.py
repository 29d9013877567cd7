"""Checkpoints that are gone: a run goes back to an older one and says so, and never starts over unasked."""

import shutil
from collections.abc import Callable

import msgspec
import pytest
from tests.cluster.in_process import BlockingAgent
from tests.cluster.run_files import FOREVER
from tests.cluster.waits import wait_for_end, wait_for_step

from trainctl.protocol import messages as m
from trainctl.protocol.record import checkpoints

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
