"""A lead of real processes that stands without a majority; tests/node_agent/roles/test_quorum.py has the rest."""

from pathlib import Path

from tests.asking import run_of
from tests.cluster.run_files import FOREVER, on_mlx
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster
from tests.waiting import until


def test_no_step_is_made_while_a_majority_of_the_agents_is_gone(run_config, tmp_path: Path):
    strict = Cluster(tmp_path, quorum=True)
    strict.in_touch()
    with strict.client("alpha") as client:
        begun = client.send("start-run", {"config": run_config(run__steps=FOREVER, nodes=on_mlx("alpha"))})
        assert begun.state == "applied"
        for node in ("beta", "gamma"):
            strict[node].kill()
        stands = until(lambda: (v := run_of(client)).state == "starting" and v, 20, "the standstill")
        assert "1 of 3 nodes reachable, a majority is 2" in stands.reason
        strict.start("beta")
        wait_for_step(client, stands.step + 10)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        assert wait_for_end(client).state == "stopped"
    strict.stop()
