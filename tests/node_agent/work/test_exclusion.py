"""Separate work and runs need the machine alone: each is refused during the other."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.work.work_lead import WorkLead
from trainctl.node_agent.work.worker_host import WorkerHost
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError

OPEN = m.OpenWork(rid="r", work="abcd", kind="answers", run="run-1", rows=1, size_bytes=1, digest="")
HOST = m.HostWork(
    rid="r", work="abcd", kind="answers", run="run-1", lead="mbp", config={}, checkpoint=1, files={},
)  # fmt: skip


def test_work_is_refused_during_a_run(tmp_path: Path) -> None:
    role, context = AgentRole(), SimpleNamespace(directory=tmp_path, node="studio")
    role.start()
    made: Any = context
    host = WorkerHost(made, role, lambda node: None)
    lead = WorkLead(made, role, host, lambda node: None)
    with pytest.raises(RefusedError, match="studio takes part in a run"):
        asyncio.run(lead.reply(OPEN))
    hosted: Any = asyncio.run(lead.reply(HOST))
    assert hosted.problem == "studio takes part in a run"
    assert (role.work, role.worker, [*tmp_path.iterdir()]) == ("", "", [])


@pytest.mark.parametrize("part", ["work", "worker"])
def test_a_run_is_refused_during_work(part: str) -> None:
    role = AgentRole()
    role.check_no_work()
    setattr(role, part, "abcd")
    with pytest.raises(InvalidInputError, match="separate work abcd is in progress"):
        role.check_no_work()
