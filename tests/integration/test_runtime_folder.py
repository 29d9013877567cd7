"""A node's runtime folder that is deleted under a running agent, as logouts and clean-ups of /tmp do."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.asking import run_of
from tests.cluster.run_files import NODE, on_mlx
from tests.cluster.waits import wait_for_step
from tests.integration.conftest import AgentProcess
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import EventsRequest, FactsRequest
from trainctl.protocol.messages.events import RunStateChanged


@pytest.fixture
def base() -> Iterator[Path]:
    """Stand for /run/user/UID: short, and the parent of the agent's folder."""
    folder = Path(tempfile.mkdtemp(prefix="a", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def agent(base: Path, tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path / "state", environment={"XDG_RUNTIME_DIR": str(base)}).start()
    yield process
    process.clean_up()


def moves_on(client: BlockingClient, steps: int = 20) -> None:
    run = run_of(client)
    assert run is not None
    wait_for_step(client, run.step + steps)


def start_run(client: BlockingClient, config: dict[str, Any]) -> str:
    client.send("start-run", {"config": config}, wait="accepted")
    run = wait_for_step(client, 3).run
    assert run is not None
    return run.run


def test_a_run_goes_on_without_the_folder_and_its_rank_is_started_again(
    agent: AgentProcess, base: Path, run_config: Any
) -> None:
    with agent.client() as client:
        start_run(client, run_config(run__steps=100_000, nodes=on_mlx(NODE)))
        (socket,) = base.rglob("trainers.sock")
        shutil.rmtree(base)
        moves_on(client)
        assert until(lambda: client.ask(FactsRequest).lost_sockets, what="the agent to notice") == (str(socket),)
        (pid,) = agent.trainer_pids()
        os.kill(pid, signal.SIGKILL)
        until(lambda: [other for other in agent.trainer_pids() if other != pid], what="the rank's next trainer")
        moves_on(client)
        base.mkdir(mode=0o700)
        until(socket.exists, what="the socket")
        until(lambda: client.ask(FactsRequest).lost_sockets == (), what="the agent to notice")
        agent.kill()
        agent.start()  # its trainer looks for it in the folder that stood in
        moves_on(client)
        client.send("stop", {"checkpoint": False})


def test_a_run_shows_the_last_words_of_a_trainer_that_its_agent_left(agent: AgentProcess, run_config: Any) -> None:
    with agent.client() as client:
        run = start_run(client, run_config(run__steps=100_000, run__orphan_seconds=2, nodes=on_mlx(NODE)))
        agent.kill()
        until(lambda: not agent.trainer_pids(), what="the trainer to leave")
        agent.start()
        moves_on(client)
        events = [event.data for event in client.ask(EventsRequest, run, limit=50).events]
        (why,) = [data.reason for data in events if isinstance(data, RunStateChanged) and data.after == "going back"]
        assert why.startswith("rank 0 (box) exited with 0: leaving: the agent has been gone for")
        client.send("stop", {"checkpoint": False})


def test_a_run_goes_on_under_the_agent_that_took_its_node_s_folder(
    agent: AgentProcess, base: Path, run_config: Any
) -> None:
    """The first agent stands still while its lock is deleted and the second one starts, with its sockets elsewhere."""
    other = AgentProcess(agent.state, environment={"XDG_RUNTIME_DIR": str(base / "other")})
    (base / "other").mkdir(mode=0o700)
    with agent.client() as client:
        run = start_run(client, run_config(run__steps=100_000, nodes=on_mlx(NODE)))
    assert agent.process is not None and agent.process.stderr is not None
    agent.process.send_signal(signal.SIGSTOP)
    (agent.directory / "agent.lock").unlink()
    try:
        other.start()
    finally:
        agent.process.send_signal(signal.SIGCONT)
    assert agent.process.wait(HANG_SECONDS) == 2
    assert "another agent of this node is running" in agent.process.stderr.read()
    agent.process.stderr.close()
    with other.client() as client:
        moves_on(client)
        assert run_of(client).run == run  # type: ignore[union-attr]
        client.send("stop", {"checkpoint": False})
    other.clean_up()
