"""Checkpoint metadata in the manifest: how the run was configured, how well it did, and what it continues."""

from typing import Any

import msgspec

from trainctl.protocol.messages import Count, Generation


class Performance(msgspec.Struct, frozen=True, kw_only=True):
    """How well the run did up to the checkpoint; None: unknown to the writer."""

    loss: float | None = None  # mean training loss of the checkpoint's step
    step_seconds: float | None = None  # duration of that step
    tokens_per_second: float | None = None  # of all ranks, in that step
    eval_loss: float | None = None  # newest held-out loss in the node's record
    eval_step: Count | None = None  # step of that evaluation


class ParentCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint of another run that a branch started from."""

    run: str
    step: Count


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint continues."""

    run: str
    resumed_from: Count | None = None  # step of the checkpoint that the writer loaded; None: it loaded none
    generation: Generation | None = None  # generation that committed the step; None: the writer was given the state
    parent: ParentCheckpoint | None = None  # of a branch; None: the run started at step 0, or 0.2.0 wrote it


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What wrote the checkpoint."""

    node: str
    program: str  # version of trainctl
    python: str
    library: str  # array library and its version, for example torch 2.13.0
    device: str
    system: str  # operating system and processor, for example Linux x86_64


class CheckpointMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    recipe: dict[str, Any]  # the run file with its defaults, without [nodes.NAME] env
    performance: Performance
    lineage: Lineage
    environment: Environment
