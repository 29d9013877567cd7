"""A rank whose main thread hangs while its heartbeats go on: named, ended and replaced, and no step is lost by it. With
its node unreachable the run goes back without it."""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.asking import newest_events, run_of
from tests.cluster.run_files import FOREVER, on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster, have_back, kill_trainer
from tests.integration.support.exactness import check_ledger
from tests.waiting import slowness, until

from trainctl.protocol.client.blocking import BlockingClient

NODES = ("alpha", "beta")
EVERY = 5
"""Steps between checkpoints."""


@contextlib.contextmanager
def unreadable(folder: Path) -> Iterator[None]:
    """In the place of a checkpoint that is to be written there is one whose manifest is a FIFO that nobody writes to:
    a process that looks into it waits for ever, as for a disk across a network that doesn't answer."""
    folder.mkdir(parents=True)
    os.mkfifo(folder / "manifest.json")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(os.open(folder / "manifest.json", os.O_WRONLY | os.O_NONBLOCK))
        shutil.rmtree(folder, ignore_errors=True)


def texts_of(client: BlockingClient) -> list[str]:
    return [event.text for event in newest_events(client)]


@pytest.mark.timeout(300)
def test_a_rank_that_hangs_in_its_checkpoint_is_replaced_and_without_its_node_the_run_goes_back(cluster, run_config):
    config = run_config(
        run__steps=FOREVER, nodes=on(*NODES), batch__micro=2,
        checkpoint={"every_steps": EVERY, "at_end": False, "background": False},
        group={"hung_seconds": round(slowness(), 1), "first_shares": "even"},  # no rank that only waits for a core
    )  # fmt: skip
    with cluster.client() as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        hang(cluster, client, begun.run)
        lose_all(cluster, client)
        wait_for_step(client, run_of(client).step + 3)
        client.send("stop", {"checkpoint": False})
        last = wait_for_end(client).step
        assert [step.step for step in all_steps(client, begun.run)] == list(range(1, last + 1))


def hang(cluster: Cluster, client: BlockingClient, run: str) -> None:
    at = client.send("pause", {}).step
    step = (at // EVERY + 1) * EVERY
    with unreadable(cluster.run_paths("beta", run).checkpoints / f"step-{step}"):
        client.send("resume", {})
        lost = until(lambda: [text for text in texts_of(client) if "beta is lost" in text], 120, "its loss")
        assert lost[0].startswith(f"beta is lost: hung, no progress in checkpoint of step {step} for "), lost
    have_back(client)
    assert_stacks(cluster.run_paths("beta", run).log(1).read_text(encoding="utf-8"))
    assert any("beta rejoins" in text for text in texts_of(client))
    wait_for_step(client, run_of(client).step + 3)
    last = client.send("pause", {}).step
    check_ledger(cluster, run, last, was_lost={"beta"})
    client.send("resume", {})


def assert_stacks(log: str) -> None:
    """It was killed in its checkpoint, and its log says so line by line, of the main thread and of the others."""
    after = log.partition("the agent ends this trainer; its threads:\n")[2]
    threads = [part for part in after.split("\n\n") if "most recent call first" in part]
    main = next(part for part in threads if re.search(r"__main__\.py\", line \d+ in main", part))
    assert len(threads) > 1
    assert "checkpoints/files.py" in main and "manifest" in main, main


def lose_all(cluster: Cluster, client: BlockingClient) -> None:
    """First a node that is unreachable from then on, and then the only rank that is left."""
    cluster["beta"].kill()
    for pid in cluster["beta"].trainer_pids():  # none, if it was taken for hung just before
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: run_of(client).ranks[1].state == "lost", 30, "beta's loss")
    kill_trainer(cluster, "alpha")
    back = "going back to the newest checkpoint"
    until(lambda: any(back in text for text in texts_of(client)), 30, "its going back")
    alone = {"alpha": "run", "beta": "lost"}
    until(lambda: {r.node: r.state for r in run_of(client).ranks} == alone, 60, "its going on alone")
    cluster.start("beta")
    have_back(client)
