"""The micro-batch of a node by its run file, which may leave it to the node's profile or its first steps."""

from typing import Final, Literal

from trainctl.protocol.config.run_tables import NodeTable, RunFile

Wanted = int | Literal["auto"]
"""A micro-batch as the run file sets it."""

AUTO: Final = "auto"
"""Value of `micro` for the fastest micro-batch of the node's profile; without one, the first steps look for it."""
FIRST: Final = 2
"""Micro-batch of the first step of a node without a profile: one that fits wherever the model does."""
UNMEASURED: Final = 8
"""Micro-batch that other passes and estimates take for a node without a profile."""


def is_auto(config: RunFile, table: NodeTable) -> bool:
    """Return whether the profile or the first steps of the node with this table decide."""
    return wanted_micro(config, table) == AUTO


def wanted_micro(config: RunFile, table: NodeTable) -> Wanted:
    """Return the setting of the node with this table, or else the run's."""
    return config.batch.micro if table.micro is None else table.micro


def unmeasured_micro(wanted: Wanted, global_batch: int, share: int | None) -> int:
    """Return the micro-batch of a node that no profile is known of. `share`: as the run file sets it."""
    return wanted if isinstance(wanted, int) else min(UNMEASURED, global_batch, share or UNMEASURED)


def micro_of(config: RunFile, table: NodeTable) -> int:
    """Samples per forward and backward pass of the node with this table, as long as no profile is known."""
    return unmeasured_micro(wanted_micro(config, table), config.batch.global_, table.share)


def micro_tokens_of(config: RunFile, table: NodeTable) -> int:
    """Return the most padded tokens of a pass of the node with this table; 0: no limit."""
    return config.batch.micro_tokens if table.micro_tokens is None else table.micro_tokens


def first_micro(config: RunFile, table: NodeTable) -> int:
    """Return the samples per pass of the first step of the node with this table, as long as no profile is known."""
    micro = micro_of(config, table)
    return min(FIRST, micro) if is_auto(config, table) else micro
