"""Checkpoints in the background under faults: every writer killed, and the run stopped, during a write."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.asking import newest_events, run_of
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster, have_back
from tests.integration.support.exactness import check_ledger
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record import checkpoints

WRITERS = NODES[:2]
"""The nodes that write checkpoints while all take part."""


class HeldWrites:
    """A write of `step` on these nodes is complete but for its name, and stands still: a folder is there already, and
    its manifest is a FIFO, which the writer compares with its own."""

    def __init__(self, cluster: Cluster, run: str, step: int, nodes: Sequence[str] = WRITERS) -> None:
        self.step, self._cluster, self._run, self._nodes = step, cluster, run, nodes

    def folders(self) -> list[Path]:
        return [self._cluster.run_paths(node, self._run).checkpoints / f"step-{self.step}" for node in self._nodes]

    def __enter__(self) -> "HeldWrites":
        for folder in self.folders():
            folder.mkdir(parents=True)
            os.mkfifo(folder / checkpoints.MANIFEST_NAME)
        return self

    def are_reached(self, nodes: Sequence[str]) -> bool:
        """Return whether the writers on these nodes have sealed all files."""
        places = (self._cluster.run_paths(node, self._run).checkpoints for node in nodes)
        pattern = f".step-{self.step}.*.part/{checkpoints.MANIFEST_NAME}"
        return all([*place.glob(pattern)] for place in places)

    def release(self) -> None:
        """Each writer finds an empty manifest, and puts its checkpoint in the place of what is there."""
        for folder in self.folders():
            until(lambda at=folder / checkpoints.MANIFEST_NAME: let_go(at), what="a writer that waits")

    def remove(self) -> None:
        """Where no writer is left."""
        for folder in self.folders():
            manifest = folder / checkpoints.MANIFEST_NAME
            if manifest.is_fifo():
                manifest.unlink()
                folder.rmdir()

    def __exit__(self, *_: object) -> None:
        for folder in self.folders():
            let_go(folder / checkpoints.MANIFEST_NAME)


def let_go(fifo: Path) -> bool:
    """Return whether a reader waited for this FIFO; it waits no more."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.fixture
def run(cluster: Cluster, run_config: Any) -> Iterator[tuple[BlockingClient, str]]:
    """A client of the lead, and a run over three nodes that writes a checkpoint when a command asks for it."""
    with cluster.client() as client:
        config = run_config(run__steps=FOREVER, nodes=on(*NODES), group={"first_shares": "even"})
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        yield client, begun.run or ""


def begin_writing(client: BlockingClient, held: HeldWrites) -> str:
    """Ask for a checkpoint, until both writers stand still in it. Gives the command's ID."""
    reply = client.send("checkpoint", {}, wait="accepted")
    assert reply.state == "accepted", reply.reason
    until(lambda: held.are_reached(WRITERS) and is_writing(client, held.step), what="both writes")
    return reply.id


def outcome(client: BlockingClient, id: str) -> m.Event | None:
    found = (event for event in newest_events(client) if event.command == id and event.outcome)
    return next((event for event in found if event.outcome in ("applied", "failed")), None)


def is_writing(client: BlockingClient, step: int) -> bool:
    ranks = run_of(client).ranks  # type: ignore[union-attr]
    return any(rank.why.startswith(f"{m.WRITING} of step {step}") for rank in ranks)


def assert_whole(cluster: Cluster, run: str) -> None:
    """No node has half a checkpoint, nor what a writer that died left."""
    for node in NODES:
        folder = cluster.run_paths(node, run).checkpoints
        for path in folder.iterdir() if folder.is_dir() else ():
            assert path.name.startswith("step-"), f"{node} has {path.name}"
            checkpoints.verify(path)


def test_writers_killed_during_a_write_cost_no_step_and_it_is_planned_again(
    cluster: Cluster, run: tuple[BlockingClient, str]
) -> None:
    client, name = run
    step = client.send("pause", {}).step
    assert step is not None
    with HeldWrites(cluster, name, step) as held:
        id = begin_writing(client, held)
        assert client.send("resume", {}).state == "applied"
        wait_for_step(client, step + 2)
        assert is_writing(client, step)
        assert outcome(client, id) is None
        for pid in [pid for node in WRITERS for pid in cluster[node].trainer_pids()]:
            os.kill(pid, signal.SIGKILL)
        held.remove()
    done = until(
        lambda: outcome(client, id),
        what="the checkpoint's outcome",
        progress=lambda: run_of(client),
    )
    assert done.outcome == "applied", done.text
    assert done.step > step, "it is of a step that was made after the loss"
    have_back(client)
    assert_whole(cluster, name)
    assert cluster.run_paths(NODES[2], name).checkpoint(done.step).is_dir()
    assert not [node for node in NODES if cluster.run_paths(node, name).checkpoint(step).exists()]
    last = client.send("pause", {}).step
    assert last is not None
    check_ledger(cluster, name, last, was_lost=set(WRITERS))
    stop_during_a_write(cluster, client, name, last)


def stop_during_a_write(cluster: Cluster, client: BlockingClient, name: str, step: int) -> None:
    """The stop waits for it, and then writes its own checkpoint."""
    with HeldWrites(cluster, name, step) as held:
        id = begin_writing(client, held)
        assert client.send("resume", {}).state == "applied"
        wait_for_step(client, step + 2)
        assert client.send("stop", {"checkpoint": True}, wait="accepted").state == "accepted"
        until(lambda: run_of(client).state == "stopping", what="the stop")  # type: ignore[union-attr]
        assert is_writing(client, step)
        held.release()
        view = wait_for_end(client)
    assert (view.state, view.reason) == ("stopped", "")
    done = outcome(client, id)
    assert done is not None
    assert (done.outcome, done.step) == ("applied", step)
    assert_whole(cluster, name)
    for node in WRITERS:
        names = [path.name for path in checkpoints.listed(cluster.run_paths(node, name).checkpoints)]
        assert names[:2] == [f"step-{view.step}", f"step-{step}"], f"{node} has {names}"
