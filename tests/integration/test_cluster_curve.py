"""One loss curve through the whole stack: three unlike ranks, edited and with a reducer killed, beside one rank."""

import contextlib

import psutil
import pytest
from tests.integration.clusters import NODES, Cluster, on
from tests.integration.conftest import all_steps, until, wait_for_end, wait_for_step
from tests.integration.folding import check_edits, check_steps
from tests.integration.reference import one_rank_curve

from trainctl.protocol import messages as m
from trainctl.protocol.blocking import BlockingClient

STEPS = 30
SHARES = {"alpha": {"share": 11, "micro": 4}, "beta": {"share": 9}, "gamma": {"share": 4}}


@pytest.fixture
def curve_config(run_config):
    """Samples long enough that a command or two ends before the run does."""

    def make(**changes):
        return run_config(run__steps=STEPS, batch={"global": 24, "micro": 1}, data__sequence_length=64, **changes)

    return make


def test_three_ranks_edited_and_with_a_reducer_killed_train_as_one_does(cluster, curve_config):
    config = curve_config(nodes=on(*NODES, **SHARES))
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": config}, timeout_seconds=120)
        assert begun.state == "applied", begun.reason
        for verb, args, node in (
            ("rebalance", {"shares": {"alpha": 5, "beta": 8, "gamma": 11}}, None),
            ("resize-batch", {"micro": 3}, "gamma"),
        ):
            reply = client.send(verb, args, node=node)
            assert reply.state == "applied" and reply.step < STEPS - 8, reply
        kill_active_reducer(cluster, client)
        view = wait_for_end(client)
        assert view.state == "finished", view.reason
        grouped = all_steps(client, begun.run)
    check_steps(cluster, begun.run, 1, STEPS)
    check_edits(cluster, begun.run, config)
    alone = one_rank_curve(curve_config(nodes=on("alpha", alpha={"micro": 6})))
    assert [step.step for step in grouped] == [step.step for step in alone] == list(range(1, STEPS + 1))
    for one, other in zip(grouped, alone, strict=True):
        assert (one.weight, one.cursor, one.learning_rate) == (other.weight, other.cursor, other.learning_rate)
        assert one.loss == pytest.approx(other.loss, rel=1e-5), one.step
    assert grouped[-1].generation > grouped[0].generation


def kill_active_reducer(cluster: Cluster, client: BlockingClient) -> None:
    """One that is in the group, of a node that doesn't conduct; the run goes on in another generation."""
    (trainer,) = cluster["beta"].trainer_pids()
    before = client.snapshot(0).run
    assert before.state == "running" and before.step < STEPS - 4, before
    (active,) = [child for child in psutil.Process(trainer).children(recursive=True) if is_joined(child)]
    active.kill()
    after = until(lambda: _newer(client.snapshot(0).run, before), what="another generation")
    assert after.state != "failed", after.reason
    wait_for_step(client, before.step + 2)


def is_joined(process: psutil.Process) -> bool:
    """Whether it is a reducer that is connected to others; what makes the next one is not."""
    with contextlib.suppress(psutil.Error):
        return any(line.status == psutil.CONN_ESTABLISHED for line in process.net_connections("tcp"))
    return False


def _newer(run: m.RunView, before: m.RunView) -> m.RunView | None:
    return run if run.generation > before.generation or run.state not in m.ACTIVE_RUN_STATES else None
