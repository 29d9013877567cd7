"""An agent that stood still for a while, as by SIGSTOP: its trainer, which lives, comes back to it once."""

import signal
import time

import pytest
from tests.asking import events_of, run_of
from tests.cluster.run_files import FOREVER, on_mlx
from tests.cluster.waits import wait_for_step

from trainctl.protocol.messages import events as e

pytestmark = pytest.mark.timeout(900)
FROZEN_SECONDS = 13.0
"""Longer than a trainer takes to give up its connection, several times over."""


def test_a_frozen_agent_records_one_return_of_its_trainer_and_one_regroup(agent, run_config):
    config = run_config(run__steps=FOREVER, nodes=on_mlx("box"))
    with agent.client() as client:
        run = client.send("start-run", {"config": config}).run
        wait_for_step(client, 3)
        agent.process.send_signal(signal.SIGSTOP)
        time.sleep(FROZEN_SECONDS)  # that is what is tested
        agent.process.send_signal(signal.SIGCONT)
        wait_for_step(client, run_of(client).step + 20)
        said = [event.data for event in events_of(client, run)]
        client.send("stop", {"checkpoint": False})
    back = [data for data in said if isinstance(data, e.NodeState) and data.state == "trainer-back"]
    assert len(back) == 1, said
    assert len([data for data in said if isinstance(data, e.GenerationFormed)]) == 2, said
