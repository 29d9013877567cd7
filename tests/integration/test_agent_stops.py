"""SIGTERM to an agent in the middle of long work: it ends within three seconds, and nothing is left half-done."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.cluster.run_files import FOREVER
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.tui.support.cli_calls import started
from tests.waiting import slowness, until

from trainctl.protocol import messages
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import CalibrateRequest, DigestsRequest, EventsRequest
from trainctl.protocol.record.checkpoints import MANIFEST_NAME, read_manifest

STOP_SECONDS = 3.0
LONG_BYTES = 60 * 10**9
"""Size of a file that takes minutes to read, nearly all of it a hole."""


def make_long(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(LONG_BYTES)


def reads(agent: AgentProcess, path: Path) -> bool:
    """Return whether the agent has the file open."""
    assert agent.process is not None
    return any(file.path == str(path) for file in psutil.Process(agent.process.pid).open_files())


def ends_in_time(agent: AgentProcess) -> None:
    at = time.monotonic()
    assert agent.terminate() == 0
    seconds = time.monotonic() - at
    print(f"\n{seconds:.2f} s at a load of {slowness():.1f} per core")
    assert seconds <= STOP_SECONDS * slowness()


@pytest.fixture
def trained(agent: AgentProcess, run_config: Callable[..., dict[str, Any]]) -> str:
    """The id of a run with a checkpoint of its last step."""
    with agent.client() as client:
        run = client.send("start-run", {"config": run_config(run__steps=4, checkpoint={"at_end": True})}).run
        assert run is not None and wait_for_end(client).state == "finished"
    until(lambda: not agent.trainer_pids(), what="the trainer's end")
    return run


@pytest.fixture
def asking(agent: AgentProcess) -> Iterator[Callable[[Callable[[BlockingClient], object]], None]]:
    """Ask the agent something in a thread: it ends before it answers."""
    threads: list[threading.Thread] = []

    def ask(question: Callable[[BlockingClient], object]) -> None:
        with contextlib.suppress(TrainctlError), agent.client(timeout_seconds=10) as client:
            question(client)

    def start(question: Callable[[BlockingClient], object]) -> None:
        threads.append(threading.Thread(target=ask, args=[question]))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join()


def test_while_it_checks_a_checkpoint(agent: AgentProcess, trained: str, asking: Any) -> None:
    folder = agent.run_paths(trained).checkpoint(4)
    name = next(iter(read_manifest(folder).files))
    make_long(folder / name)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"][name]["size_bytes"] = LONG_BYTES
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    asking(lambda client: client.send("start-run", {"resume": trained}))
    until(lambda: reads(agent, folder / name), what="the check")
    ends_in_time(agent)
    agent.start()
    assert [path.name for path in (agent.directory / "runs").iterdir()] == [trained]


def test_while_it_hashes_data(agent: AgentProcess, trained: str, run_config: Any, asking: Any) -> None:
    data = Path(run_config()["data"]["path"])
    file = data if data.is_file() else next(path for path in sorted(data.rglob("*")) if path.is_file())
    size = file.stat().st_size
    make_long(file)
    try:
        asking(lambda client: client._run(client._client.ask(DigestsRequest, "data", str(data))))
        until(lambda: reads(agent, file), what="the hash")
        ends_in_time(agent)
    finally:
        os.truncate(file, size)


def test_while_it_calibrates(agent: AgentProcess, run_config: Any) -> None:
    with agent.client() as client:
        client._run(client._client.ask(CalibrateRequest, "calibration-abcd", run_config()))
    assert agent.process is not None
    children = until(lambda: psutil.Process(agent.process.pid).children(recursive=True), what="the measuring process")  # type: ignore[union-attr]
    ends_in_time(agent)
    assert not psutil.wait_procs(children, timeout=10 * slowness())[1]
    assert not [*agent.directory.glob("calibration-*")]


def test_while_it_scores(agent: AgentProcess, trained: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} is", "completion": " a number"}) + "\n" for n in range(20_000)))
    with started("score", trained, str(rows), "--connect", agent.address, "--output", str(tmp_path / "out")) as scoring:
        until(agent.trainer_pids, what="the worker")
        ends_in_time(agent)
        scoring.terminate()
    until(lambda: not agent.trainer_pids(), what="the worker's end")
    assert not (tmp_path / "out").exists()


def test_while_it_exports(agent: AgentProcess, tmp_path: Path) -> None:
    rank = messages.GuestRank(0)
    steps = [
        messages.GuestStep(step=step, committed_at=1e9 + step, step_seconds=1.0, loss=2.0, values={"user:reward": 1.0})
        for step in range(1, 40_001)
    ]
    with agent.client() as client:
        client.attach_run("long-1", "long", (rank,))
        for first in range(0, len(steps), 1000):
            client.run_steps("long-1", steps[first : first + 1000])
    with (tmp_path / "table.csv").open("w+") as table:
        words = ("export", "long-1", "--what", "metrics", "--connect", agent.address)
        with started(*words, stdout=table) as exporting:
            until(lambda: os.fstat(table.fileno()).st_size, what="the first rows")
            ends_in_time(agent)
            exporting.wait()
        table.seek(0)
        last = list(table)[-1]
    assert exporting.returncode == 0, "it has the whole record before its first row"
    assert last == f"{len(steps)},,user:reward,1.0\n"
    agent.start()
    with agent.client() as client:
        assert client.run_steps("long-1", steps[-1:]).step == len(steps)


@pytest.fixture
def copying_agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """An agent whose trainers copy checkpoints by a command that waits until the file `go` is there."""
    script = tmp_path / "copy.sh"
    script.write_text(
        f"touch {tmp_path}/begun; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; touch {tmp_path}/done"
    )
    environment = {"TRAINCTL_COPY_COMMAND": f"sh {script}"}
    process = AgentProcess(tmp_path / "state", environment=environment).start()
    yield process
    (tmp_path / "go").touch()
    process.clean_up()


def test_while_a_checkpoint_is_copied(copying_agent: AgentProcess, tmp_path: Path, run_config: Any) -> None:
    agent, config = copying_agent, run_config(run__steps=FOREVER, checkpoint={"copy_to": "command"})
    with agent.client() as client:
        client.send("start-run", {"config": config})
        wait_for_step(client, 1)
        assert client.send("checkpoint", {}).state == "applied"
        until((tmp_path / "begun").exists, what="the copy")
        ends_in_time(agent)
    assert not (tmp_path / "done").exists()
    (tmp_path / "go").touch()
    until((tmp_path / "done").exists, what="the copy's end, without the agent")
    agent.start()
    with agent.client() as client:
        until(
            lambda: any("copied" in event.text for event in client.ask(EventsRequest, limit=100).events),
            what="its event",
        )
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
    until(lambda: not agent.trainer_pids(), what="the trainer's end")
