"""Real runs with a planted cause: the live Diagnosis screen names it, and so does the record without an agent."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import AgentProcess, wait_for_end
from tests.integration.support.planted import BUSY, QuotaGroup, Screen, causes, wait_until_judged
from tests.tui.support.cli_calls import call, call_json
from tests.waiting import until

from trainctl.protocol.analysis.diagnosis.of_record import of_record
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer import demo_assets

FOREVER = 100_000
QUOTA = 0.1
"""Part of a processor that a held-back trainer gets."""
RunConfig = Callable[..., dict[str, Any]]


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """A model and text with which a step takes a tenth of a second or so."""
    shape = demo_assets.llama_config(hidden=64, layers=2, heads=2, intermediate=128)
    demo_assets.make_model(tmp_path / "model", shape, seed=1)
    demo_assets.make_text(tmp_path / "text")
    return tmp_path


@pytest.fixture
def group() -> Iterator[QuotaGroup]:
    made = QuotaGroup(f"tc{os.getpid()}-quota")
    yield made
    made.close()


def config_of(run_config: RunConfig, assets: Path, **changes: Any) -> dict[str, Any]:
    return run_config(**{
        "run__steps": FOREVER, "model__path": str(assets / "model"), "data__path": str(assets / "text"),
        "data__sequence_length": 256, "batch": {"global": 16, "micro": 8}, **changes,
    })  # fmt: skip


def started(client: BlockingClient, config: dict[str, Any]) -> str:
    begun = client.send("start-run", {"config": config})
    assert begun.state == "applied", begun.reason
    assert begun.run is not None
    wait_until_judged(client)
    return begun.run


def stopped(client: BlockingClient) -> None:
    client.send("stop", {"checkpoint": False})
    wait_for_end(client)


def recorded(paths: RunPaths) -> set[str]:
    return {finding.cause for finding in of_record(paths).findings}


@pytest.mark.needs("cpu-quota", "tmux")
@pytest.mark.timeout(300)
def test_a_healthy_run_has_no_finding_and_a_quota_is_shown_while_it_trains_and_by_its_record(
    agent: AgentProcess, tmp_path: Path, assets: Path, run_config: RunConfig, group: QuotaGroup
) -> None:
    with agent.client() as client:
        run = started(client, config_of(run_config, assets))
        assert causes(client) <= BUSY
        trainers = agent.trainer_pids()
        group.take(trainers)
        with Screen(tmp_path, agent.address) as screen:
            taken = screen.shows("box is held back by its CPU quota", lambda: group.limit(QUOTA))
            print(f"throttled: on screen after {taken:.0f} s")
        until(lambda: "throttled" in recorded(agent.run_paths(run)), 60, "the quota in the record")
        group.limit(10)
        stopped(client)
    done = call("diagnose", str(agent.run_paths(run).directory))
    assert done.returncode == 0 and done.stdout.startswith(f"{run}, step ")
    told = call_json("diagnose", run, "--connect", agent.address)
    assert (told["run"], told["live"]) == (run, False)
    assert json.dumps(told["findings"])
