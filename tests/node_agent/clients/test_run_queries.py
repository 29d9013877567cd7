"""The list of runs: what a run's folder says of one that has ended."""

from pathlib import Path

import tomli_w
from tests.protocol.support.run_files import good

from trainctl.node_agent.clients.run_queries import _summary


def test_an_ended_run_without_a_view_has_the_steps_and_the_batch_of_its_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(good()).encode())
    found = _summary("r", "sft-1b", str(tmp_path), "failed", 0.0)
    assert (found.step, found.steps, found.global_batch) == (0, 100, 24)
    nothing = _summary("r", "sft-1b", str(tmp_path / "none"), "failed", 0.0)
    assert (nothing.steps, nothing.global_batch, nothing.cost) == (None, None, None)
