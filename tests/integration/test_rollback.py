"""A real run goes back to a checkpoint by a command, and doesn't train on the data that followed."""

from typing import Any

from tests.cluster.rollbacks import go_back_together
from tests.cluster.run_files import on_mlx
from tests.integration.support.clusters import Cluster


def test_several_nodes_go_back_together_and_none_is_said_to_have_failed(cluster: Cluster, run_config: Any) -> None:
    with cluster.client("alpha") as client:
        go_back_together(client, run_config, on_mlx("alpha", "beta"))
