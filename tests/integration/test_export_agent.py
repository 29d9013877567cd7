"""What a run brought itself comes through an agent as it is in the run's directory, in pages that fit into a frame."""

import csv
import io
from collections.abc import Iterator

import msgspec
import pytest
from tests.integration.conftest import AgentProcess, keep_processes
from tests.node_agent.support.records import part, step
from tests.tui.support.recorded import run_view

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.records.run_db import RunDb
from trainctl.tui.cli import main
from trainctl.tui.export.mirror.run_source import AgentSource, DirectorySource, Evaluated

STEPS, RANKS, METRICS = 1_234, 3, 20
NUMBERS = [*range(1, 801), *range(10**9, 10**9 + (STEPS - 800) * 2048, 2048)]
"""The steps' own: from the 801st on, those of an environment."""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """It has one run, which ended, with more metrics than one request may name."""
    found = AgentProcess(tmp_path_factory.mktemp("state"), "studio")
    paths = found.run_paths("run-1")
    paths.directory.mkdir(parents=True)
    view = msgspec.structs.replace(
        run_view(RANKS, step=NUMBERS[-1], steps=NUMBERS[-1]), run="run-1", state="finished",
        eval_values=(("eval/kl", 0.25), ("eval/entropy", 3.5)),
    )  # fmt: skip
    with AgentDb(found.directory / "agent.db") as db:
        db.add_run("run-1", "demo", paths.directory, 1000.0, "finished")
    with RunDb(paths) as recorder:
        recorder.set_meta("view", msgspec.json.encode(view).decode())
        for number in NUMBERS:
            parts = [
                msgspec.structs.replace(part(number, rank), values=own_values(number, rank)) for rank in range(RANKS)
            ]
            whole = msgspec.structs.replace(step(number), values={"user:whole": 1.0 * number})
            recorder.commit(whole, parts, 1000.0)
        recorder.evaluation(NUMBERS[-2], 2000.0, 1.25, 10.0, 1.0, {"eval/kl": 0.25, "eval/entropy": 3.5})
    found.start()
    keep_processes()
    yield found
    found.clean_up()


def own_values(number: int, rank: int) -> dict[str, float]:
    """One of them comes only now and then."""
    every = {f"user:metric_{place}": number + rank / 10 + place / 1000 for place in range(METRICS)}
    return every if number % 50 == 0 else {name: value for name, value in every.items() if name != "user:metric_7"}


def test_metrics_of_a_run_s_own_are_the_same_through_its_agent(
    agent: AgentProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["export", str(agent.run_paths("run-1").directory), "--what", "metrics"]) == 0
    local = table(capfd)
    assert main.main(["export", "run-1", "--what", "metrics", "--connect", agent.address]) == 0
    through = table(capfd)
    assert main.main(["export", "another", "--what", "metrics", "--connect", agent.address]) == 3
    assert capfd.readouterr().err.count("\n") == 1
    with agent.client() as client:
        assert client.history("run-1", ()).own_metrics == (*sorted(own_values(50, 0)), "user:whole")
    assert len(local) == RANKS * ((METRICS - 1) * STEPS + sum(number % 50 == 0 for number in NUMBERS)) + STEPS
    assert through == local
    assert [row["rank"] for row in local[:2]] == ["", "0"]


def test_ranks_and_what_a_mirror_reads_are_the_same_through_its_agent(
    agent: AgentProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = agent.run_paths("run-1").directory
    pages = [NUMBERS[start : start + 500] for start in range(0, STEPS, 500)]
    assert main.main(["export", str(directory), "--what", "ranks"]) == 0
    local = table(capfd)
    assert main.main(["export", "run-1", "--what", "ranks", "--connect", agent.address]) == 0
    through = table(capfd)
    assert main.main(["export", "run-1", "--what", "evaluations", "--connect", agent.address]) == 0
    (evaluated,) = table(capfd)
    with agent.client() as client:
        source = AgentSource(client, "run-1")
        parts = [part for page in pages for part in source.parts(page)]
        assert source.evaluations(0, NUMBERS[-1]) == {
            NUMBERS[-2]: Evaluated(1.25, None, {"eval/kl": 0.25, "eval/entropy": 3.5})
        }
    assert [evaluated[name] for name in ("step", "loss", "at", "eval/kl")] == [str(NUMBERS[-2]), "1.25", "", "0.25"]
    timed = ("step", "rank", "step_seconds", "sync_seconds")
    assert [[row[name] for name in timed] for row in through] == [[row[name] for name in timed] for row in local]
    kept = DirectorySource(directory)
    of_directory = [part for page in pages for part in kept.parts(page)]
    kept.close()
    assert [(part.step, part.rank) for part in parts] == [(part.step, part.rank) for part in of_directory]
    for told, other in zip(parts, of_directory, strict=True):
        assert {**other.values, **told.values} == other.values
        assert own_values(told.step, told.rank).items() <= told.values.items()


def table(capfd: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
