"""A simulated cluster of real agents in a process of its own, with a run that is under way."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.asking import run_of
from tests.waiting import HANG_SECONDS

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.tui.demo import agents
from trainctl.tui.demo.folder import Session


class SimulatedCluster(NamedTuple):
    """The first agent's address, and its run."""

    address: str
    metrics: str | None
    pid: int
    run: str
    directory: Path


@contextlib.contextmanager
def simulated_cluster(folder: Path, nodes: int, steps: int, *options: str) -> Iterator[SimulatedCluster]:
    """Start the agents and the demo's run, with `options` of `trainctl-agent simulate`; end them afterwards."""
    folder.mkdir(exist_ok=True)
    session = Session(folder)
    agents.write_files(session, nodes)
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "simulate", str(session.cluster_file), "--leash"]
    with subprocess.Popen(
        [*command, "--state", str(session.state), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            bound = json.loads(process.stdout.readline())
            config = agents.run_config(session, [*agents.nodes(nodes)], steps)
            with BlockingClient(bound["listen"], by="tester", timeout_seconds=HANG_SECONDS) as client:
                reply = client.send("start-run", {"config": config}, wait="accepted")
                view = run_of(client)
            assert view is not None, reply
            yield SimulatedCluster(bound["listen"], bound.get("metrics"), process.pid, view.run, Path(view.directory))
        finally:
            process.stdin.close()
        assert process.wait(HANG_SECONDS) == 0
