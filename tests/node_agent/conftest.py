"""Runs that tests of the agent share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def validated_conductors() -> Iterator[None]:
    """All conductors in this process check the promises of their state after every event."""
    from tests.node_agent.support import validated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validated.Conductor, "handle", validated.handle)
        yield


@pytest.fixture
def live(agent, run_config):
    """An agent in this process whose run goes on and on."""
    from tests.cluster.run_files import FOREVER
    from tests.cluster.waits import wait_for_step

    with agent.client() as client:
        client.send("start-run", {"config": run_config(run__steps=FOREVER)})
        wait_for_step(client, 3)
    return agent
