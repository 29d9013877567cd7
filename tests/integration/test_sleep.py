"""A node whose machine sleeps: this is named as sleep, its rank rejoins by itself, and the loss curve is unchanged."""

import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from tests.asking import events_of, run_of
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster
from tests.integration.support.exactness import check_ledger, worst_deviation
from tests.integration.support.moved_clock import MovedClock
from tests.integration.support.reference import one_rank_curve
from tests.integration.support.transfer import family
from tests.waiting import until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import events as e

pytestmark = pytest.mark.timeout(900)
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
