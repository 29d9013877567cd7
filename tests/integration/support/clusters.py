"""Three agents of one cluster on loopback, each with a state of its own, and what tests ask of them together."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from tests.asking import run_of
from tests.cluster.run_files import NODES
from tests.cluster.waits import wait_for_end
from tests.conftest import SHARED_PIDS
from tests.integration.conftest import AgentProcess
from tests.integration.support.ports import free_addresses
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record.paths import RunPaths


class Cluster:
    """The agents by node; they outlive the test that asked for them first."""

    def __init__(
        self, folder: Path, *, quorum: bool = False, environment: dict[str, dict[str, str]] | None = None,
        options: Sequence[str] = (), python: str = sys.executable, supervised: bool = False,
    ) -> None:  # fmt: skip
        """`environment`: variables by node, beside the test's own. `options`: the agents', beside the usual ones.
        `python`: the interpreter that has their program. `supervised`: each agent has a supervisor."""
        self.file = folder / "cluster.toml"
        addresses = dict(zip(NODES, free_addresses(len(NODES)), strict=True))
        tables = "".join(f'[nodes.{node}]\naddress = "{at}"\n' for node, at in addresses.items())
        self.file.write_text(f"quorum = {str(quorum).lower()}\n{tables}")
        self.agents = {
            node: AgentProcess(
                folder / "state",
                node,
                self.file,
                environment=(environment or {}).get(node),
                options=options,
                supervised=supervised,
            )
            for node in NODES
        }
        for node in NODES:
            self.agents[node].python = python
            self.start(node)

    def __getitem__(self, node: str) -> AgentProcess:
        return self.agents[node]

    def start(self, node: str) -> None:
        """Start an agent, or start it again where it was."""
        process = self.agents[node].start().process
        assert process is not None
        SHARED_PIDS.add(process.pid)

    def restart_agents(self) -> None:
        """Every agent runs, those too that a failed test left dead or stopped by a signal."""
        for node, agent in self.agents.items():
            if agent.process is None or agent.process.poll() is not None:
                self.start(node)
            else:
                agent.process.send_signal(signal.SIGCONT)

    def client(self, node: str = NODES[0], **options: Any) -> BlockingClient:
        return self.agents[node].client(**options)

    def in_touch(self) -> None:
        """Every agent has reached every other one."""
        for node in NODES:
            with self.client(node) as client:
                until(
                    lambda c=client: all(peer.state == "connected" for peer in c.ask(m.SnapshotRequest, 0).peers),
                    20,
                    "the peers",
                )

    def run_paths(self, node: str, run: str) -> RunPaths:
        return self.agents[node].run_paths(run)

    def trainers(self) -> dict[str, list[int]]:
        return {node: agent.trainer_pids() for node, agent in self.agents.items()}

    def stop(self) -> None:
        """End all agents; what trainers are left is a failure."""
        for agent in self.agents.values():
            agent.clean_up()

    def settle(self) -> None:
        """Stop the run that a test left, so that the next test finds the cluster idle."""
        for node in NODES:
            self.agents[node].check()
        self.restart_agents()
        for node in NODES:
            with self.client(node) as client:
                run = run_of(client)
                if run is not None and run.state in m.ACTIVE_RUN_STATES and run.lead == node:
                    client.send("stop", {"checkpoint": False})
                    wait_for_end(client)
        until(lambda: not any(self.trainers().values()), 30, "the trainers' end")
        until(lambda: not any(self._follows(node) for node in NODES), 30, "the followers' end")

    def _follows(self, node: str) -> bool:
        with self.client(node) as client:
            run = run_of(client)
            return run is not None and run.state in m.ACTIVE_RUN_STATES


def have_back(client: BlockingClient, *nodes: str) -> m.RunView:
    """The run once the ranks of these nodes, or all, take part again. It is paused until their trainers have loaded,
    for its steps would take the CPU from that, and might be done before they return. A trainer that has just been
    killed may still be in the view as it was: it doesn't count."""
    wanted = nodes or NODES

    def view_if(condition: Callable[[m.RankView], object]) -> m.RunView | None:
        run = run_of(client)
        assert run is not None
        there = (condition(rank) and _is_alive(rank.pid) for rank in run.ranks if rank.node in wanted)
        return run if all(there) else None

    assert client.send("pause", {}).state in ("applied", "rejected")
    until(lambda: view_if(lambda rank: rank.backend), what="the trainers that are to return")
    assert client.send("resume", {}).state == "applied"
    found: m.RunView = until(lambda: view_if(lambda rank: rank.state == "run"), what="the return")
    return found


def kill_trainer(cluster: Cluster, node: str) -> None:
    """End a node's only trainer, once it has one, and wait until its process is gone."""
    (pid,) = until(lambda: len(pids := cluster[node].trainer_pids()) == 1 and pids, what=f"{node}'s trainer")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not _is_alive(pid), 30, "the trainer's end")


def _is_alive(pid: int | None) -> bool:
    """Return whether a trainer's process runs. Its number is unknown while it starts, and once it is gone."""
    try:
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
