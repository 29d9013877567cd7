"""The micro-batch of a node by its run file, which may leave it to the node's profile."""

from typing import Final

from trainctl.protocol.config.run_tables import NodeTable, RunFile

AUTO: Final = "auto"
"""As `micro`: the fastest micro-batch of the node's profile."""
UNMEASURED: Final = 8
"""Micro-batch of a node without a profile, if the global batch and its share allow it."""


def is_auto(config: RunFile, table: NodeTable) -> bool:
    """Whether the profile of the node with this table decides."""
    return (config.batch.micro if table.micro is None else table.micro) == AUTO


def micro_of(config: RunFile, table: NodeTable) -> int:
    """Samples per forward and backward pass of the node with this table, as long as no profile is known."""
    wanted = config.batch.micro if table.micro is None else table.micro
    return wanted if isinstance(wanted, int) else min(UNMEASURED, config.batch.global_, table.share or UNMEASURED)
