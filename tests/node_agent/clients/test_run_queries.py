"""The list of runs: what a run's folder says of one that has ended."""

from pathlib import Path

import tomli_w
from tests.protocol.support.run_files import good

from trainctl.node_agent.clients.run_queries import _summary
from trainctl.node_agent.records.agent_db import KnownRun


def test_an_ended_run_without_a_view_has_the_steps_and_the_batch_of_its_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(good()).encode())
    found = _summary(KnownRun("r", "sft-1b", tmp_path, 0.0, "failed", ""))
    assert (found.step, found.steps, found.global_batch) == (0, 100, 24)
    nothing = _summary(KnownRun("r", "sft-1b", tmp_path / "none", 0.0, "failed", ""))
    assert (nothing.steps, nothing.global_batch, nothing.cost) == (None, None, None)
