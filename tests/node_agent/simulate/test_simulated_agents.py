"""The end of agents that share a process."""

import asyncio
import os
import signal

from tests.waiting import HANG_SECONDS

from trainctl.node_agent.simulate.simulated_agents import SimulatedAgents

CLUSTER = "[nodes.a.simulated]\nsamples_per_second = 10\n[nodes.b.simulated]\nsamples_per_second = 10\n"


async def test_a_signal_before_they_serve_ends_all_of_them(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    async with SimulatedAgents(tmp_path / "cluster.toml", tmp_path / "state") as simulated:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(HANG_SECONDS):
            await simulated.serve()
