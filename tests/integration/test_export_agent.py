"""What a run brought itself comes through an agent as it is in the run's directory, in pages that fit into a frame."""

import csv
import io
from pathlib import Path

import msgspec
import pytest
from tests.integration.conftest import AgentProcess
from tests.node_agent.support.records import part, step
from tests.tui.support.recorded import run_view

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.records.run_db import RunDb
from trainctl.tui.cli import main

STEPS, RANKS, METRICS = 1_234, 3, 20


@pytest.fixture
def agent(tmp_path: Path) -> AgentProcess:
    """It has one run, which ended, with more metrics than one request may name."""
    found = AgentProcess(tmp_path, "studio")
    paths = found.run_paths("run-1")
    paths.directory.mkdir(parents=True)
    view = msgspec.structs.replace(run_view(RANKS, step=STEPS, steps=STEPS), run="run-1", state="finished")
    with AgentDb(found.directory / "agent.db") as db:
        db.add_run("run-1", "demo", paths.directory, 1000.0, "finished")
    with RunDb(paths) as recorder:
        recorder.set_meta("view", msgspec.json.encode(view).decode())
        for number in range(1, STEPS + 1):
            parts = [
                msgspec.structs.replace(part(number, rank), values=own_values(number, rank)) for rank in range(RANKS)
            ]
            recorder.commit(step(number), parts, 1000.0)
    return found.start()


def own_values(number: int, rank: int) -> dict[str, float]:
    """One of them comes only now and then."""
    every = {f"user:metric_{place}": number + rank / 10 + place / 1000 for place in range(METRICS)}
    return every if number % 50 == 0 else {name: value for name, value in every.items() if name != "user:metric_7"}


def test_metrics_of_a_run_s_own_are_the_same_through_its_agent(
    agent: AgentProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main.main(["export", str(agent.run_paths("run-1").directory), "--what", "metrics"]) == 0
        local = table(capfd)
        assert main.main(["export", "run-1", "--what", "metrics", "--connect", agent.address]) == 0
        through = table(capfd)
        assert main.main(["export", "another", "--what", "metrics", "--connect", agent.address]) == 3
        assert capfd.readouterr().err.count("\n") == 1
        with agent.client() as client:
            assert client.history("run-1", ()).own_metrics == tuple(sorted(own_values(50, 0)))
    finally:
        agent.terminate()
    assert len(local) == RANKS * ((METRICS - 1) * STEPS + STEPS // 50)
    assert through == local


def table(capfd: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
