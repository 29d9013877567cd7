"""Checkpoints that runs begin with: a resumed run's newest whole one, on whichever node it is, and that of another run
from which a branch, a new run with its own record, starts."""

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.planning.compatibility import Resumed
from trainctl.node_agent.planning.durable import Durable, Settings, Skipped
from trainctl.node_agent.records.keys import DURABLE_KEY, decoded, settings_key
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.files.durable_files import make_folder, rename, sync_all
from trainctl.protocol.messages import BranchPoint, Event, Generation, LateEvent, PeerConsent
from trainctl.protocol.messages.events import RunBranched, RunStateChanged, StepRetracted
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

_PAGE = 500


@dataclass(frozen=True)
class Source:
    """A checkpoint to begin with; step 0 and no node: there is none."""

    step: int = 0
    node: str = ""
    folder: Path | None = None  # None where another node has it
    cursor: int | None = None  # the first position after its step, as that node says

    def step_for(self, node: str) -> int | None:
        """The step of the checkpoint that this other node is to load, None for a node that loads none."""
        return self.step if node == self.node and self.folder is None else None


def find(paths: RunPaths, node: str, out: Collection[str] = (), *, at_most: int | None = None) -> Source:
    """The newest checkpoint by the run's events, which name every node that wrote it; none that only the nodes `out`
    have, and none after the step `at_most`.

    Where this node's own copy of it is gone or torn another's counts, and without one the newest that is whole here.
    """
    own = _own(paths, node, at_most)
    step, holders = _written(paths, out, at_most)
    elsewhere = sorted(holders - {node})
    return Source(step, elsewhere[0]) if elsewhere and own.step < step else own


def missing(paths: RunPaths, source: Source, at_most: int | None = None) -> str:
    """Return a text that names the checkpoints which the record has after that of `source` and which are gone or
    damaged; empty if none is. Raises InvalidInputError if none at all is left: the run would start over unasked."""
    newest, holders = _written(paths, (), at_most)
    if source.step >= newest:
        return ""
    with RecordReader(paths) as reader:
        text = reader.meta(DURABLE_KEY)
    kept = decoded(text, Durable, paths.record).checkpoints if text is not None else ()
    gone = sorted({newest, *(step for step in kept if source.step < step < newest)})
    what = f"checkpoints of {'steps' if len(gone) > 1 else 'step'} {', '.join(map(str, gone))}"
    what += f" (the newest on {', '.join(sorted(holders))}) are gone, damaged or out of reach"
    if source.step:
        return f"{what}: the run goes back to step {source.step}"
    problem = f"{what}, and no other is left in {paths.checkpoints}"
    raise InvalidInputError("resume", f"{problem}; put one back, or start over with --from-step 0")


def newest_here(paths: RunPaths) -> tuple[int, Generation | None, int | None]:
    """The step of the newest complete checkpoint on this node, the generation that committed it, and the first position
    after it; step 0 without one, or where the disk fails."""
    try:
        folder = checkpoints.newest_complete(paths.checkpoints, hashes=False)
        if folder is not None:
            manifest, cursor = checkpoints.read_manifest(folder), checkpoints.read_cursor(folder)
            return manifest.step, _generation(manifest), cursor
    except (OSError, InvalidInputError):
        pass
    return 0, None, None


def newer(paths: RunPaths, source: Source, answers: Mapping[str, PeerConsent]) -> Source | None:
    """The newest checkpoint that another node has by its answer, if it is newer than `source` and of a step that stands
    in this record or that this has lost: its writer's message may have been lost with this node's power."""
    found: Source | None = None
    with RecordReader(paths) as reader:
        for node, said in sorted(answers.items()):
            is_newer = said.checkpoint > (found or source).step
            if is_newer and _stands(reader, said.checkpoint, said.checkpoint_generation):
                found = Source(said.checkpoint, node, cursor=said.checkpoint_cursor)
    return found


def _own(paths: RunPaths, node: str, at_most: int | None) -> Source:
    """The newest whole one here whose state is that of its step in the record."""
    while (folder := checkpoints.newest_complete(paths.checkpoints, at_most=at_most)) is not None:
        manifest = checkpoints.read_manifest(folder)
        if stands(paths, manifest):
            return Source(manifest.step, node, folder)
        at_most = manifest.step - 1
    return Source()


def stands(paths: RunPaths, manifest: checkpoints.Manifest) -> bool:
    """Return whether the step that it is of was made in the generation that the record has: a rank that was cut off may
    have completed one of a step that was retracted and made again. Where that isn't known it counts."""
    with RecordReader(paths) as reader:
        return _stands(reader, manifest.step, _generation(manifest))


def _stands(reader: RecordReader, step: int, generation: Generation | None) -> bool:
    rows, _ = reader.steps(step - 1, 1)
    row = rows[0] if rows and rows[0].step == step else None
    if generation is None or row is not None:
        return generation is None or row is None or row.generation == generation
    return not reader.is_retracted(step, generation)  # else the record has lost the step


def _generation(manifest: checkpoints.Manifest) -> Generation | None:
    return manifest.metadata.lineage.generation if manifest.metadata is not None else None


def setups_of(paths: RunPaths, durable: Durable, step: int) -> Resumed | None:
    """Return what the ranks that made `step` computed with; None without a step, or where a version that kept none
    led."""
    with RecordReader(paths) as reader:
        ranks = [part.rank for part in reader.rank_steps(step)] if step else []
    found = {rank: durable.setups[rank] for rank in ranks if rank in durable.setups}
    return Resumed(step, found) if found and len(found) == len(ranks) else None


def whole(paths: RunPaths, step: int) -> Path:
    """This node's checkpoint of `step`. Raises InvalidInputError if it is gone or torn."""
    folder = paths.checkpoints / f"step-{step}"
    try:
        checkpoints.verify(folder)
    except InvalidInputError as error:
        raise InvalidInputError("resume", str(error)) from None
    return folder


def _written(paths: RunPaths, out: Collection[str], at_most: int | None) -> tuple[int, set[str]]:
    """The step of the last checkpoint that was written by others than `out`, and the nodes whose last one it is. Those
    after `at_most`, and those that the run has gone back behind, don't count."""
    by_node: dict[str, list[int]] = {}  # steps in the order of writing
    with RecordReader(paths) as reader:
        after, more = 0, True
        while more:
            events, more = reader.events(after, _PAGE)
            for event in events:
                is_written = (event.kind, event.severity) == ("checkpoint", "good")
                goes_back = isinstance(event.data, RunStateChanged) and event.data.after == "resumed"
                if isinstance(event.data, RunBranched) and event.data.branch == paths.directory.name:
                    by_node.setdefault(event.data.node, []).append(event.data.step)
                if isinstance(event.data, StepRetracted):
                    undone = event.data.step
                    by_node = {node: [at for at in steps if at < undone] for node, steps in by_node.items()}
                if event.step is None or not (is_written or goes_back):
                    continue
                # One of a later step was written before the run had gone back behind it.
                by_node = {node: [at for at in steps if at <= event.step] for node, steps in by_node.items()}
                if is_written:
                    by_node.setdefault(event.by, []).append(event.step)
            after = events[-1].id if events else after
    counted = {
        node: max((at for at in steps if at_most is None or at <= at_most), default=0)
        for node, steps in by_node.items()
        if node not in out
    }
    step = max(counted.values(), default=0)
    return step, {node for node, newest in counted.items() if newest == step and step}


@dataclass(frozen=True)
class Fork:
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


def find_fork(paths: RunPaths, step: int | None, node: str) -> Fork:
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
    if not stands(paths, manifest):
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
        setups_of(paths, known, step) if known is not None else None,
    )


def _link(source: str, target: str) -> None:
    """A second name of the same file, which no writer changes in place; a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
