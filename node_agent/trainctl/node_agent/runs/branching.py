"""Branches: a new run that starts from a checkpoint of another one, with its own record."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from trainctl.node_agent.planning.durable import Branch, Durable, Settings, Skipped
from trainctl.node_agent.planning.setups import Resumed
from trainctl.node_agent.records.keys import DURABLE_KEY, settings_key
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs import checkpoint_source
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import events as e
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

T = TypeVar("T")


class Fork(NamedTuple):
    """A checkpoint of a run, with what the run's record says of its step."""

    parent: RunPaths
    step: int
    cursor: int  # first position after the step
    folder: Path
    settings: Settings | None  # that the step was planned with; None: an older version kept none
    skipped: tuple[Skipped, ...]  # up to the step
    config: RunFile  # of the parent
    setups: Resumed | None = None  # what its ranks computed with; None: not known

    @property
    def run(self) -> str:
        """The parent's ID."""
        return self.parent.directory.name

    def start(self, config: RunFile, first: Callable[[RunFile, int], Durable], term: int) -> Durable:
        """What the branch begins with. What commands had changed up to the step stays, unless `config` has other values
        than the parent's file in the tables that it belongs to. `first`: what a run without a parent begins with.
        Raises InvalidInputError."""
        if self.step >= config.run.steps:
            problem = f"{config.run.steps}, but the branch starts at step {self.step}: give a larger number"
            raise InvalidInputError("config: run.steps", problem)
        then, begun = self.settings, first(self._with_batch(config), term)
        settings = begun.settings
        if then is not None and config.optimizer == self.config.optimizer:
            settings = msgspec.structs.replace(settings, lr=then.lr)
        if then is not None and self._same_ranks(config, then):
            settings = msgspec.structs.replace(settings, ranks=then.ranks)
        return msgspec.structs.replace(
            begun, settings=settings, skipped=self.skipped, checkpoints=(self.step,), written=self.step,
            branch=Branch(self.run, self.step, self.cursor), resumed=self.setups,
            timed=settings.ranks is not begun.settings.ranks,
        )  # fmt: skip

    def _with_batch(self, config: RunFile) -> RunFile:
        if self.settings is None or config.batch != self.config.batch:
            return config
        batch: Any = msgspec.structs.replace(config.batch, global_=self.settings.global_batch)
        return msgspec.structs.replace(config, batch=batch)

    def _same_ranks(self, config: RunFile, then: Settings) -> bool:
        """Whether shares and micro-batches of the parent's ranks suit the branch's."""
        nodes = [setting.node for _, setting in sorted(then.ranks.items())]
        same = (config.batch, config.nodes) == (self.config.batch, self.config.nodes or config.nodes)
        return same and nodes == list(config.nodes) and len(then.live) == len(then.ranks)

    def take(self, paths: RunPaths, recorder: RunDb, node: str, by: str) -> tuple[Path, m.Event]:
        """Copy the checkpoint to the branch, where it can start again from it; its folder, and the event in its record.
        Raises RefusedError."""
        folder = paths.checkpoint(self.step)
        try:
            shutil.copytree(self.folder, folder, copy_function=_link)
        except (OSError, shutil.Error) as error:
            raise RefusedError(f"cannot copy the checkpoint of step {self.step}: {error}") from None
        return folder, recorder.event(time.time(), self._event(paths, node), "info", by, step=self.step)

    def note(self, paths: RunPaths, node: str, by: str) -> m.Event | None:
        """Have the parent's record say it too; None if it can't be written."""
        with contextlib.suppress(InvalidInputError), RunDb(self.parent, resumable=False) as recorder:
            return recorder.event(time.time(), self._event(paths, node), "info", by, step=self.step)
        return None

    def _event(self, paths: RunPaths, node: str) -> e.RunBranched:
        return e.RunBranched(self.run, self.step, paths.directory.name, node)


def find(paths: RunPaths, step: int | None, node: str) -> Fork:
    """The checkpoint of `step`, None: the newest, in a run's directory on this `node`. Raises InvalidInputError."""
    run, there = paths.directory.name, checkpoints.listed(paths.checkpoints)
    folder = checkpoints.newest_complete(paths.checkpoints) if step is None else paths.checkpoint(step)
    if folder is None or folder not in there:
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        kept = ", ".join(path.name.removeprefix("step-") for path in reversed(there))
        has = f"it has those of steps {kept}" if kept else "choose a node that has one with --node"
        raise InvalidInputError("branch", f"{run} has no {which} on {node}; {has}")
    try:
        step = checkpoints.verify(folder).step
    except InvalidInputError as error:
        raise InvalidInputError("branch", str(error)) from None
    with RecordReader(paths) as reader:
        rows, _ = reader.steps(step - 1, 1)
        cursor = rows[0].cursor if rows and rows[0].step == step else None
        if cursor is None:
            raise InvalidInputError("branch", f"{run}: the record on {node} lacks step {step}; choose another node")
        settings = reader.meta(settings_key(rows[0].plan_version))
        durable = reader.meta(DURABLE_KEY)
    known = _decoded(durable, Durable, paths) if durable is not None else None
    return Fork(
        paths, step, cursor, folder, _decoded(settings, Settings, paths) if settings is not None else None,
        tuple(skip for skip in known.skipped if skip.step <= step) if known is not None else (),
        run_file.read(paths.run_file), checkpoint_source.setups_of(paths, known, step) if known is not None else None,
    )  # fmt: skip


def _decoded(text: str, kind: type[T], paths: RunPaths) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidInputError("branch", f"{paths.record}: its saved state cannot be read: {error}") from None


def _link(source: str, target: str) -> None:
    """A second name of the same file, which no writer changes in place; a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
