"""Ranks that hang and machines that sleep: named, replaced or waited for, and no step is lost by it."""

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.asking import events_of, newest_events, run_of
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster, have_back, kill_trainer
from tests.integration.support.exactness import check_ledger, worst_deviation
from tests.integration.support.moved_clock import MovedClock
from tests.integration.support.reference import one_rank_curve
from tests.integration.support.transfer import family
from tests.waiting import slowness, until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import events as e

PAIR = ("alpha", "beta")
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
        run__steps=FOREVER, nodes=on(*PAIR), batch__micro=2,
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


STOPPED_SECONDS, MOVED_SECONDS = 5.0, 600.0


@pytest.fixture
def clocks(tmp_path) -> dict[str, MovedClock]:
    return {node: MovedClock(tmp_path / f"clock-{node}") for node in NODES[:2]}


@pytest.fixture
def sleepers(tmp_path, clocks) -> Iterator[Cluster]:
    """Three agents; the wall clocks of the lead and of a follower can be moved."""
    made = Cluster(tmp_path, environment={node: clock.environment for node, clock in clocks.items()})
    made.in_touch()
    yield made
    made.stop()


@pytest.mark.timeout(900)
def test_a_node_that_sleeps_is_said_to_and_rejoins_on_the_undisturbed_curve(sleepers, clocks, run_config):
    """A follower, and then the lead: all processes of a node stand still for 5 s, and its wall clock moves on by
    10 minutes."""
    rate = {"optimizer__schedule": "constant", "optimizer__learning_rate": 1e-4}
    config = run_config(run__steps=FOREVER, nodes=on(*NODES[:2]), group={"first_shares": "even"}, **rate)
    with sleepers.client("alpha") as client:
        run = client.send("start-run", {"config": config}).run
        wait_for_step(client, 3)
        for node in ("beta", "alpha"):
            _sleep(sleepers, clocks[node], node)
            events = until(lambda at=node: _after_sleep(client, at), 60, f"the word of {node}'s sleep")
            until(lambda: {rank.state for rank in run_of(client).ranks} == {"run"}, 120, "all ranks")
            wait_for_step(client, run_of(client).step + 3)
        events = events_of(client, run)
        client.send("stop", {"checkpoint": False})
        view = wait_for_end(client)
        steps = all_steps(client, run)
    said = [event.data for event in events]
    slept = [(data.node, data.detail.partition(" min")[0]) for data in said if _is_sleep(data)]
    assert slept == [("beta", "10"), ("alpha", "10")]
    assert not [data for data in said if isinstance(data, e.RankChanged) and data.state in ("failed", "restarted")]
    left = {data.lost for data in said if isinstance(data, e.SharesChanged) and data.lost}
    given = {node for data in said if isinstance(data, e.GenerationFormed) for node in data.behind}
    check_ledger(sleepers, run, view.step, was_lost=left | given)
    alone = config | {"nodes": on("alpha", alpha={"micro": 6})}
    assert worst_deviation(steps, one_rank_curve(alone, view.step)) <= 1e-5


def _sleep(cluster: Cluster, clock: MovedClock, node: str) -> None:
    process = cluster[node].process
    assert process is not None
    ours = [p for pid in cluster[node].trainer_pids() for p in (psutil.Process(pid), *family(pid))]
    stopped = [psutil.Process(process.pid), *ours]
    for one in stopped:
        one.send_signal(signal.SIGSTOP)
    clock.move(MOVED_SECONDS)
    time.sleep(STOPPED_SECONDS)  # that is what is tested
    for one in reversed(stopped):
        one.send_signal(signal.SIGCONT)


def _after_sleep(client: BlockingClient, node: str) -> bool:
    return any(_is_sleep(event.data) and event.data.node == node for event in events_of(client, None))


def _is_sleep(data: e.AnyEvent) -> bool:
    return isinstance(data, e.NodeState) and data.state == "slept"
