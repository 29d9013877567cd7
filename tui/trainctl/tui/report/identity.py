"""What a run was trained with, from the checkpoints in its directory: versions, digests of data and model."""

import contextlib
from collections.abc import Iterator

import msgspec

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.checkpoint_metadata import Environment, ParentCheckpoint
from trainctl.protocol.record.checkpoints import Manifest, listed, read_manifest
from trainctl.protocol.record.paths import RunPaths
from trainctl.tui.report.run_facts import DataFacts


class _LoopState(msgspec.Struct, frozen=True):
    """The part of a checkpoint's state.json that says what was trained, and on what."""

    samples: int
    data_digest: str
    layout_digest: str = ""
    base_digest: str = ""


def manifests(paths: RunPaths) -> Iterator[Manifest]:
    """Of the checkpoints that can be read, newest first."""
    for folder in listed(paths.checkpoints):
        with contextlib.suppress(InvalidInputError):
            yield read_manifest(folder)


def environments(paths: RunPaths) -> tuple[Environment, ...]:
    """What wrote the newest checkpoint of each node."""
    found: dict[str, Environment] = {}
    for manifest in manifests(paths):
        if manifest.metadata is not None:
            found.setdefault(manifest.metadata.environment.node, manifest.metadata.environment)
    return tuple(found[node] for node in sorted(found))


def parent(paths: RunPaths) -> ParentCheckpoint | None:
    """What the run branched off, by the newest of its own checkpoints that says it."""
    own = (manifest for manifest in manifests(paths) if manifest.run == paths.directory.name)
    found = (manifest.metadata.lineage.parent for manifest in own if manifest.metadata is not None)
    return next((one for one in found if one is not None), None)


def data_of(paths: RunPaths) -> DataFacts:
    """By the newest checkpoint that says it."""
    for folder in listed(paths.checkpoints):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            loop = msgspec.json.decode((folder / "state.json").read_bytes(), type=_LoopState)
            return DataFacts(loop.data_digest, loop.samples, loop.layout_digest, loop.base_digest)
    return DataFacts()
