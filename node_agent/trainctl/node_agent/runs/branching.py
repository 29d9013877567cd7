"""Branches: a new run that starts from a checkpoint of another one, with its own record."""

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.planning.compatibility import Resumed
from trainctl.node_agent.planning.durable import Durable, Settings, Skipped
from trainctl.node_agent.records.keys import DURABLE_KEY, decoded, settings_key
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs import checkpoint_source
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.files.durable_files import make_folder, rename, sync_all
from trainctl.protocol.messages import BranchPoint, Event, LateEvent
from trainctl.protocol.messages.events import RunBranched
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader


class Fork(NamedTuple):
    """A checkpoint of a run, with what the run's record says about its step."""

    parent: RunPaths
    step: int
    cursor: int  # first position after the step
    folder: Path
    settings: Settings | None  # that the step was planned with; None: the record has lost them
    skipped: tuple[Skipped, ...]  # up to the step
    config: RunFile  # of the parent
    setups: Resumed | None = None  # what its ranks computed with; None: not known

    @property
    def run(self) -> str:
        """The parent's ID."""
        return self.parent.directory.name

    def start(self, config: RunFile, begun: Durable) -> Durable:
        """Return what the branch begins with. What commands had changed up to the step stays, unless `config` has other
        values than the parent's file in the tables that it belongs to. `begun`: what a run without a parent begins
        with. Raises InvalidInputError."""
        if self.step >= config.run.steps:
            problem = f"{config.run.steps}, but the branch starts at step {self.step}: give a larger number"
            raise InvalidInputError("config: run.steps", problem)
        settings, keeps_ranks = self._settings(config, begun.settings)
        return msgspec.structs.replace(
            begun,
            settings=settings,
            skipped=self.skipped,
            checkpoints=(self.step,),
            written=self.step,
            branch=BranchPoint(self.run, self.step, self.cursor),
            resumed=self.setups,
            timed=keeps_ranks,
        )

    def _settings(self, config: RunFile, first: Settings) -> tuple[Settings, bool]:
        """Return what the branch's first plan is made from, and whether its ranks have their shares of the parent's."""
        then = self.settings
        if then is None:
            return first, False
        lr = then.lr if config.optimizer == self.config.optimizer else first.lr
        if self._same_ranks(config, then):
            return Settings(1, then.global_batch, then.ranks, lr), True
        if config.batch != self.config.batch:
            return msgspec.structs.replace(first, lr=lr), False
        weights = {rank: float(share) for rank, share in first.shares.items()}
        ranks = share_edits.with_shares(first, apportion(then.global_batch, weights))
        return Settings(1, then.global_batch, ranks, lr), False

    def _same_ranks(self, config: RunFile, then: Settings) -> bool:
        """Return whether shares and micro-batches of the parent's ranks suit the branch's."""
        nodes = [setting.node for _, setting in sorted(then.ranks.items())]
        same = (config.batch, config.nodes) == (self.config.batch, self.config.nodes or config.nodes)
        return same and nodes == list(config.nodes) and len(then.live) == len(then.ranks)

    def take(self, paths: RunPaths, recorder: RunDb, node: str, by: str) -> tuple[Path, Event]:
        """Copy the checkpoint to the branch, where it can start again from it; its folder, and the event in its record.
        Raises RefusedError."""
        folder = paths.checkpoint(self.step)
        part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        try:
            make_folder(folder.parent)
            shutil.copytree(self.folder, part, copy_function=_link)
            sync_all(part)
            rename(part, folder)
        except (OSError, shutil.Error) as error:
            raise RefusedError(f"cannot copy the checkpoint of step {self.step}: {error}") from None
        return folder, recorder.event(time.time(), self._event(paths, node), "info", by, step=self.step)

    def note(self, paths: RunPaths, node: str, by: str) -> Event | None:
        """Have the parent's record say it too; None if it can't be written."""
        with contextlib.suppress(InvalidInputError), RunDb(self.parent, resumable=False) as recorder:
            return recorder.event(time.time(), self._event(paths, node), "info", by, step=self.step)
        return None

    def late_event(self, paths: RunPaths, node: str, by: str) -> LateEvent:
        """For the parent's record on the node that led it."""
        return LateEvent(self.run, time.time(), by, "info", self.step, self._event(paths, node))

    def _event(self, paths: RunPaths, node: str) -> RunBranched:
        return RunBranched(self.run, self.step, paths.directory.name, node)


def find(paths: RunPaths, step: int | None, node: str) -> Fork:
    """The checkpoint of `step`, None: the newest, in a run's directory on this `node`. Raises InvalidInputError."""
    run, there = paths.directory.name, checkpoints.listed(paths.checkpoints)
    newest = checkpoints.newest_complete(paths.checkpoints, hashes=False) if step is None else None
    folder = newest if step is None else paths.checkpoint(step)
    if folder is None or folder not in there:
        which = "checkpoint" if step is None else f"checkpoint of step {step}"
        kept = ", ".join(path.name.removeprefix("step-") for path in reversed(there))
        has = f"it has those of steps {kept}" if kept else "choose a node that has one with --node"
        raise InvalidInputError("branch", f"{run} has no {which} on {node}; {has}")
    try:
        manifest = checkpoints.verify(folder, hashes=False)  # the trainer reads all of it
    except InvalidInputError as error:
        raise InvalidInputError("branch", str(error)) from None
    step = manifest.step
    if not checkpoint_source.stands(paths, manifest):
        problem = f"the checkpoint of step {step} on {node} is of a step that was retracted; choose another node"
        raise InvalidInputError("branch", f"{run}: {problem}")
    with RecordReader(paths) as reader:
        rows, _ = reader.steps(step - 1, 1)
        durable = reader.meta(DURABLE_KEY)
        known = decoded(durable, Durable, paths.record) if durable is not None else None
        cursor, version = (rows[0].cursor, rows[0].plan_version) if rows and rows[0].step == step else (None, 1)
        if cursor is None and known is not None and known.branch is not None and known.branch.step == step:
            cursor = known.branch.cursor  # of a branch, the checkpoint that it started from
        if cursor is None:
            cursor = checkpoints.read_cursor(folder)  # the record has lost the step
        settings = reader.meta(settings_key(version))
    return Fork(
        paths,
        step,
        cursor,
        folder,
        decoded(settings, Settings, paths.record) if settings is not None else None,
        tuple(skip for skip in known.skipped if skip.step <= step) if known is not None else (),
        run_file.read(paths.run_file),
        checkpoint_source.setups_of(paths, known, step) if known is not None else None,
    )


def _link(source: str, target: str) -> None:
    """A second name of the same file, which no writer changes in place; a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
