"""The source of a resumed run's state: the newest whole checkpoint, on whichever node it is."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from trainctl.node_agent.planning.compatibility import Resumed
from trainctl.node_agent.planning.durable import Durable
from trainctl.node_agent.records.keys import DURABLE_KEY, decoded
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Generation, PeerConsent
from trainctl.protocol.messages.events import RunBranched, RunStateChanged, StepRetracted
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

_PAGE = 500


class Source(NamedTuple):
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
