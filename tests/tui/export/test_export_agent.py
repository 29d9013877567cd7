"""What a run brought itself comes through an agent as it is in the run's directory, in pages that fit into a frame."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.cluster.in_process import BlockingAgent, blocking_cluster
from tests.cluster.run_files import NODE
from tests.node_agent.support.records import part, step
from tests.tui.support.recorded import run_view

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.messages import HistoryRequest
from trainctl.protocol.record.paths import RunPaths
from trainctl.tui.cli import main, runs
from trainctl.tui.export.mirror.run_source import AgentSource, DirectorySource, Evaluated

pytestmark = pytest.mark.tier("all")  # each step is written to the disk
STEPS, RANKS, METRICS = 620, 3, 20
NUMBERS = [*range(1, 401), *range(10**9, 10**9 + (STEPS - 400) * 2048, 2048)]
"""The steps' own: from the 401st on, those of an environment."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[BlockingAgent]:
    """It has one run, which ended, with more metrics than one request may name."""
    paths = RunPaths(tmp_path / "state" / NODE / "runs" / "run-1")
    paths.directory.mkdir(parents=True)
    view = msgspec.structs.replace(
        run_view(RANKS, step=NUMBERS[-1], steps=NUMBERS[-1]), run="run-1", state="finished",
        eval_values=(("eval/kl", 0.25), ("eval/entropy", 3.5)),
    )  # fmt: skip
    with AgentDb(tmp_path / "state" / NODE / "agent.db") as db:
        db.add_run("run-1", "demo", 1000.0, "finished")
    with RunDb(paths) as recorder:
        recorder.set_meta("view", msgspec.json.encode(view).decode())
        for number in NUMBERS:
            parts = [
                msgspec.structs.replace(part(number, rank), values=own_values(number, rank)) for rank in range(RANKS)
            ]
            whole = msgspec.structs.replace(step(number), values={"user:whole": 1.0 * number})
            recorder.commit(whole, parts, 1000.0)
        recorder.evaluation(NUMBERS[-2], 2000.0, 1.25, 10.0, 1.0, {"eval/kl": 0.25, "eval/entropy": 3.5})
    with blocking_cluster(tmp_path, (NODE,)) as cluster:
        yield cluster[NODE]


def own_values(number: int, rank: int) -> dict[str, float]:
    """One of them comes only now and then."""
    every = {f"user:metric_{place}": number + rank / 10 + place / 1000 for place in range(METRICS)}
    return every if number % 50 == 0 else {name: value for name, value in every.items() if name != "user:metric_7"}


def test_a_run_is_the_same_through_its_agent(
    agent: BlockingAgent, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "directory_of", lambda row: None)  # as if the agent were on another machine
    directory = agent.run_paths("run-1").directory
    for what in ("steps", "ranks", "metrics", "evaluations", "events", "samples", "hosts"):
        assert main.main(["export", str(directory), "--what", what]) == 0
        local = table(capfd)
        assert main.main(["export", "run-1", "--what", what, "--connect", agent.address]) == 0
        assert table(capfd) == local, what
        if what == "metrics":
            every_50th = sum(number % 50 == 0 for number in NUMBERS)
            assert len(local) == RANKS * ((METRICS - 1) * STEPS + every_50th) + STEPS
            assert [row["rank"] for row in local[:2]] == ["", "0"]
    assert main.main(["export", "another", "--what", "steps", "--connect", agent.address]) == 3
    assert capfd.readouterr().err.count("\n") == 1
    assert main.main(["report", "run-1", "--connect", agent.address]) == 0
    assert main.main(["diff", "run-1", "run-1", "--connect", agent.address]) == 0
    check_followed(agent)


def check_followed(agent: BlockingAgent) -> None:
    """Check what a mirror that follows a run shows."""
    pages = [NUMBERS[start : start + 500] for start in range(0, STEPS, 500)]
    with agent.client() as client:
        assert client.ask(HistoryRequest, "run-1", ()).own_metrics == (*sorted(own_values(50, 0)), "user:whole")
        source = AgentSource(client, "run-1")
        parts = [part for page in pages for part in source.parts(page)]
        assert source.evaluations(0, NUMBERS[-1]) == {
            NUMBERS[-2]: Evaluated(1.25, None, {"eval/kl": 0.25, "eval/entropy": 3.5})
        }
    kept = DirectorySource(agent.run_paths("run-1").directory)
    of_directory = [part for page in pages for part in kept.parts(page)]
    kept.close()
    assert [(part.step, part.rank) for part in parts] == [(part.step, part.rank) for part in of_directory]
    for told, other in zip(parts, of_directory, strict=True):
        assert {**other.values, **told.values} == other.values
        assert own_values(told.step, told.rank).items() <= told.values.items()


def table(capfd: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
