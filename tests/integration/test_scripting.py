"""A script that steers a real run; tests/tui/cli/test_scripting.py has the other examples, and the page."""

import re
import subprocess
import sys
from pathlib import Path

from tests.asking import run_of
from tests.cluster.run_files import FOREVER, RING, on_mlx
from tests.cluster.waits import wait_for_step
from tests.tui.support.cli_calls import ENVIRONMENT
from tests.waiting import HANG_SECONDS

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
