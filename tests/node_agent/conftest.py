"""Runs that tests of the agent share."""

import pytest


@pytest.fixture
def live(agent, run_config):
    """An agent in this process whose run goes on and on."""
    from tests.cluster.run_files import FOREVER
    from tests.cluster.waits import wait_for_step

    with agent.client() as client:
        client.send("start-run", {"config": run_config(run__steps=FOREVER)})
        wait_for_step(client, 3)
    return agent
