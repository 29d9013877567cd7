"""Whether this node hosts a rank for another one: not while it has a run of its own, or is about to."""

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.node_agent.support.simulation import config

from trainctl.node_agent.records.keys import HANDED_OVER_KEY
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.roles.rank_hosting import RankHosting
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import preflight, unstarted
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record.paths import RunPaths, runs_directory

ORDER = m.PeerHost(
    link="l", seq=1, run="run-1", rank=1, config=run_file.to_dict(config(nodes={"a": {}, "b": {}})),
    generation=m.Generation(1, 0),
)  # fmt: skip


@pytest.mark.parametrize("run", [None, "run-0"])
async def test_not_while_a_run_is_being_started(run: str | None) -> None:
    context: Any = SimpleNamespace(node="a", db=None)
    role = AgentRole()
    role.start(run)
    field, problem = await RankHosting(context, role).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", f"leads {run or 'a run that is starting'}; one run at a time")


async def test_nor_if_one_is_started_while_the_rank_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = SimpleNamespace(node="a", db=None, placement=None)
    role, loop = AgentRole(), asyncio.get_running_loop()

    def check(*_: object, **__: object) -> None:
        """An operator is quicker."""
        loop.call_soon_threadsafe(role.start)

    monkeypatch.setattr(preflight, "check_on", check)
    field, problem = await RankHosting(context, role).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", "leads a run that is starting; one run at a time")


async def test_a_directory_that_an_agent_was_making_as_it_died_is_removed_by_the_next(tmp_path, monkeypatch):
    """The disk is as it was at two moments: while the directory is made, and while it is removed again."""
    runs, left = runs_directory(tmp_path / "node"), []

    def killed(*_: object) -> None:
        left.append(shutil.copytree(runs, tmp_path / f"left-{len(left)}"))

    def full(*given: object) -> None:
        killed()
        raise RefusedError("the disk is full")

    db = empty_db()
    db.add_run, db.forget_run = full, killed
    context: Any = SimpleNamespace(node="a", db=db, placement=None, directory=tmp_path / "node")
    monkeypatch.setattr(preflight, "check_on", lambda *_, **__: None)
    field, problem = await RankHosting(context, AgentRole()).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", "the disk is full")
    assert [*runs.iterdir()] == []
    assert [(folder / "run-1" / "record.db").exists() for folder in left] == [True, True]
    for folder in left:
        unstarted.remove_left(folder, lambda run: False)
        assert [*folder.iterdir()] == []


def empty_db() -> Any:
    """An agent's database that knows no run."""
    return SimpleNamespace(
        known_run=lambda run: None, followed=lambda run: None, consented_term=lambda run: 0, saw=lambda seen: None,
        forget_run=lambda run: None,
    )  # fmt: skip


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_record_that_cannot_be_read_is_a_refusal_that_removes_only_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Checkpoints may be there without a row: a folder was copied, or the agent's database was lost."""
    opened: list[RunDb] = []

    read = RunDb.meta

    def malformed(recorder: RunDb, key: str) -> str | None:
        if key != HANDED_OVER_KEY:
            return read(recorder, key)
        opened.append(recorder)
        raise InvalidInputError("record.db", "cannot be read: database disk image is malformed")

    weights = RunPaths(runs_directory(tmp_path / "node") / "run-1").checkpoint(100) / "model.safetensors"
    if is_there:
        weights.parent.mkdir(parents=True)
        weights.touch()
    context: Any = SimpleNamespace(node="a", db=empty_db(), placement=None, directory=tmp_path / "node")
    monkeypatch.setattr(preflight, "check_on", lambda *_, **__: None)
    with monkeypatch.context() as patched:
        patched.setattr(RunDb, "meta", malformed)
        field, problem = await RankHosting(context, AgentRole()).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", "record.db: cannot be read: database disk image is malformed")
    with pytest.raises(InvalidInputError, match="closed"):
        opened[0].meta("handed-over")
    assert weights.exists() == is_there
    assert {path.name for path in runs_directory(tmp_path / "node").iterdir()} == ({"run-1"} if is_there else set())
