"""A simulated cluster of real agents in a process of its own, with a run that is under way."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.tui.demo import agents
from trainctl.tui.demo.folder import Session

START_SECONDS = 120.0


@contextmanager
def simulated_cluster(nodes: int, steps: int = 100_000, to_step: int = 10) -> Iterator[str]:
    """Yield the address of the first agent once the run has reached a step."""
    with tempfile.TemporaryDirectory() as passing:
        session = Session(Path(passing))
        agents.write_files(session, nodes, faults=False)
        command = [sys.executable, "-m", "trainctl.node_agent.cli", "simulate", str(session.cluster_file), "--leash"]
        with subprocess.Popen(
            [*command, "--state", str(session.state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                address = json.loads(process.stdout.readline())["listen"]
                config = agents.run_config(session, [*agents.nodes(nodes)], steps)
                with BlockingClient(address, by="benchmark", timeout_seconds=START_SECONDS) as client:
                    client.send("start-run", {"config": config})
                    for item in client.attach(0):
                        if getattr(item, "step", 0) >= to_step:
                            break
                yield address
            finally:
                process.stdin.close()
