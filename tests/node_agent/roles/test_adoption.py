"""Which checkpoint a run that another node led must have in reach before this node takes it up."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from tests.node_agent.support.simulation import config

from trainctl.node_agent.planning.durable import Durable, RankSetting, Rollback, Settings
from trainctl.node_agent.roles.transfer import Adoption
from trainctl.node_agent.runs import restore
from trainctl.node_agent.runs.launch import Launch
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Generation
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.protocol.record.paths import RunPaths


def recorded(
    paths: RunPaths, *written: tuple[str, int], rollback: int | None = None, out: Literal["", "drained"] = ""
) -> None:
    """The record of a run of ranks on b and c, with checkpoints by node and step; `out`: why b's takes no part."""
    settings = Settings(1, 24, {0: RankSetting("b", 0 if out else 12, 4, out), 1: RankSetting("c", 12, 4)})
    nodes = {"b": {"backend": "torch"}, "c": {"backend": "torch"}}
    with restore.make_directory(paths, config(100, 24, nodes=nodes)) as recorder:
        for node, step in written:
            recorder.event(float(step), CheckpointWritten(step), "good", node, step=step)
        back = None if rollback is None else Rollback(rollback)
        restore._keep(recorder, Durable(settings, Generation(1, 1), 40, rollback=back))


def adoption(**leaving: str) -> Adoption:
    """Of an agent a that is in touch with b and c; `leaving`: why they are."""
    context: Any = SimpleNamespace(node="a", db=None)
    line = SimpleNamespace(open=True)
    links = {node: SimpleNamespace(line=line, leaving=leaving.get(node, "")) for node in ("b", "c")}
    peers: Any = SimpleNamespace(links=links, is_open=lambda node: node == "c")
    return Adoption(context, context, peers, Launch(context, peers, lambda run: None))


def test_a_run_that_is_to_go_back_needs_no_later_checkpoint(tmp_path: Path) -> None:
    """The newest one is on an unreachable node, that of the rollback isn't."""
    paths = RunPaths(tmp_path / "run-1")
    recorded(paths, ("c", 20), ("b", 30), rollback=20)
    row: Any = SimpleNamespace(run="run-1", directory=paths.directory)
    assert asyncio.run(adoption()._check_reach(row, {"b"}, old_lead_is_off=False)) == ""


def test_a_run_resumes_without_nodes_that_are_leaving(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run-1")
    recorded(paths, ("b", 30), ("c", 30))
    assert asyncio.run(adoption()._leaving(paths)) == {}
    assert asyncio.run(adoption(c="a spot notice")._leaving(paths)) == {"c": "a spot notice"}


@pytest.mark.parametrize(
    ("leaving", "out", "problem"),
    [
        (
            {"b": "a spot notice"}, set(),
            "b has the newest checkpoint, step-30, and is leaving (a spot notice); resume when b is back",
        ),
        (
            {"b": "a spot notice", "c": "SIGTERM"}, set(),
            "b is leaving: a spot notice, c is leaving: SIGTERM; no other node has a rank that trains",
        ),
        ({"b": "a spot notice"}, {"c"}, "b is leaving: a spot notice; no other node has a rank that trains"),
    ],
)  # fmt: skip
def test_a_run_waits_for_nodes_that_only_they_can_continue(tmp_path, leaving, out, problem):
    paths = RunPaths(tmp_path / "run-1")
    recorded(paths, ("c", 20), ("b", 30))
    with pytest.raises(InvalidInputError) as refusal:
        asyncio.run(adoption(**leaving)._leaving(paths, out))
    assert str(refusal.value) == f"resume: {problem}"
