"""Which checkpoint a run that another node led must have in reach before this node takes it up."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.node_agent.support.simulation import config

from trainctl.node_agent.planning.durable import Durable, RankSetting, Rollback, Settings
from trainctl.node_agent.roles.adoption import Adoption
from trainctl.node_agent.runs import restore
from trainctl.node_agent.runs.launch import Launch
from trainctl.protocol.messages import Generation
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.protocol.record.paths import RunPaths


def test_a_run_that_is_to_go_back_needs_no_later_checkpoint(tmp_path: Path) -> None:
    """The newest one is on an unreachable node, that of the rollback isn't."""
    paths = RunPaths(tmp_path / "run-1")
    settings = Settings(1, 24, {0: RankSetting("b", 12, 4), 1: RankSetting("c", 12, 4)})
    nodes = {"b": {"backend": "torch"}, "c": {"backend": "torch"}}
    with restore.make_directory(paths, config(100, 24, nodes=nodes)) as recorder:
        for node, step in (("c", 20), ("b", 30)):
            recorder.event(float(step), CheckpointWritten(step), "good", node, step=step)
        restore._keep(recorder, Durable(settings, Generation(1, 1), 40, rollback=Rollback(20)))
    context: Any = SimpleNamespace(node="a", db=None)
    peers: Any = SimpleNamespace(links={"b": None, "c": None}, is_open=lambda node: node == "c")
    adoption = Adoption(context, context, peers, Launch(context, peers, lambda run: None))
    row: Any = SimpleNamespace(run="run-1", directory=paths.directory)
    assert asyncio.run(adoption._check_reach(row, {"b"}, old_lead_is_off=False)) == ""
