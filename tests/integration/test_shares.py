"""The first shares of a real run of unlike ranks, by a measurement."""

from tests.asking import events_of
from tests.cluster.run_files import on
from tests.cluster.waits import plans_of, wait_for_end


def test_unlike_ranks_without_shares_begin_with_those_that_a_measurement_gives(cluster, run_config):
    nodes = on("alpha", "beta", beta={"backend": "mlx"})  # on a CPU MLX takes many times as long
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": run_config(run__steps=5, nodes=nodes)}, timeout_seconds=120)
        assert begun.state == "applied", begun.reason
        assert wait_for_end(client).state == "finished"
        events = events_of(client, begun.run)
    plans = plans_of(cluster.run_paths("alpha", begun.run))
    first = next(plan for plan in plans if plan.kind == "train")
    before = [(plan.kind, plan.step) for plan in plans[: plans.index(first)]]
    assert [*dict.fromkeys(before)] == [("probe", 0), ("measure", 0)], "each again if the group is formed again"
    assert first.step == 1
    (timed,) = [event for event in events if "initial shares by measured samples per second" in event.text]
    alpha, beta = (sum(piece.count for piece in work.ranges) for work in first.work)
    assert timed.after == f"alpha={alpha} beta={beta}"
    assert timed.before == "alpha=6 beta=6"
    assert (timed.step, alpha + beta) == (0, 12)
