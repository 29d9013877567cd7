"""Shares of a real run: the first ones by a measurement, and those that a script moves."""

import re
import subprocess
import sys
from pathlib import Path

from tests.asking import events_of, run_of
from tests.cluster.run_files import FOREVER, RING, on, on_mlx
from tests.cluster.waits import plans_of, wait_for_end, wait_for_step
from tests.tui.support.cli_calls import ENVIRONMENT
from tests.waiting import HANG_SECONDS


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


STEER = Path(__file__).parents[2] / "examples" / "python" / "steer.py"


def test_it_shows_the_run_and_moves_samples_at_a_step_that_it_names(cluster, run_config):
    with cluster.client("alpha") as client:
        config = run_config(run__steps=FOREVER, nodes=on_mlx("alpha", "beta"), group=RING)
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        wait_for_step(client, 3)
        done = subprocess.run(
            [sys.executable, str(STEER), "alpha=8", "beta=4"], capture_output=True, text=True, check=False,
            env={**ENVIRONMENT, "TRAINCTL_CONNECT": cluster["alpha"].address}, timeout=HANG_SECONDS,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(r"^rebalance applied at step \d+: .* -> alpha=8 beta=4$", done.stdout, re.MULTILINE), (
            done.stdout
        )
        assert {rank.node: rank.share for rank in run_of(client).ranks} == {"alpha": 8, "beta": 4}
