"""Where the state of a run that is taken up again comes from: the newest whole checkpoint, on whichever node it is."""

from pathlib import Path
from typing import NamedTuple

from trainctl.protocol import checkpoints
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.paths import RunPaths
from trainctl.protocol.reader import RecordReader

_PAGE = 500


class Source(NamedTuple):
    """A checkpoint to begin with; step 0 and no node: there is none."""

    step: int = 0
    node: str = ""
    folder: Path | None = None  # None where another node has it

    def step_for(self, node: str) -> int | None:
        """The step of the checkpoint that this other node is to load, None for a node that loads none."""
        return self.step if node == self.node and self.folder is None else None


def find(paths: RunPaths, node: str) -> Source:
    """The newest checkpoint by the run's events, which name every node that wrote it.

    Where this node's own copy of it is gone or torn another's counts, and without one the newest that is whole here.
    """
    folder = checkpoints.newest_complete(paths.checkpoints)
    own = Source(checkpoints.read_manifest(folder).step, node, folder) if folder is not None else Source()
    step, holders = _written(paths)
    elsewhere = sorted(holders - {node})
    return Source(step, elsewhere[0]) if elsewhere and own.step < step else own


def whole(paths: RunPaths, step: int) -> Path:
    """This node's checkpoint of `step`. Raises InvalidInputError if it is gone or torn."""
    folder = paths.checkpoints / f"step-{step}"
    try:
        checkpoints.verify(folder)
    except InvalidInputError as error:
        raise InvalidInputError("resume", str(error)) from None
    return folder


def _written(paths: RunPaths) -> tuple[int, set[str]]:
    """The step of the last checkpoint that was written, and the nodes whose last one it is."""
    step, last = 0, dict[str, int]()
    with RecordReader(paths) as reader:
        after, more = 0, True
        while more:
            events, more = reader.events(after, _PAGE)
            for event in events:
                if (event.kind, event.severity) == ("checkpoint", "good") and event.step is not None:
                    step = last[event.by] = event.step
            after = events[-1].id if events else after
    return step, {node for node, written in last.items() if written == step}
