"""Micro-batches that the run file leaves to the nodes' profiles, or to their first steps."""

from collections.abc import Sequence

import msgspec

from trainctl.node_agent.planning.durable import Settings
from trainctl.node_agent.planning.share_edits import Edit
from trainctl.protocol.calibration.peak import fastest_within_cap
from trainctl.protocol.config.micro_batches import first_micro, is_auto
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.messages import Ready
from trainctl.protocol.messages import events as e


def fastest_micro(settings: Settings, config: RunFile, ready: Ready) -> Edit | None:
    """The micro-batch of a rank's profile, for its first step; None if the run file, a person or a lack of memory has
    decided, or nothing changes. A smaller share limits it, as any micro-batch."""
    setting = settings.ranks.get(ready.rank)
    if setting is None or ready.profile is None:
        return None
    table = config.nodes.get(setting.node, NodeTable())
    if not is_auto(config, table) or setting.halved_to or setting.micro_batch != first_micro(config, table):
        return None
    chosen = fastest_within_cap(ready.profile.passes, config.batch.global_, ready.memory_cap_bytes)
    if chosen.micro == setting.micro_batch:
        return None
    cause = f'micro = "auto": {chosen.rate:.4g} samples/s by {setting.node}\'s calibration'
    return resized(settings, [ready.rank], chosen.micro, cause)


def resized(settings: Settings, ranks: Sequence[int], micro: int, cause: str = "") -> Edit:
    """Return another micro-batch for the ranks of a node, which the run file leaves to be chosen."""
    after = {rank: msgspec.structs.replace(settings.ranks[rank], micro_batch=micro) for rank in ranks}
    first = min(ranks)
    node, before = settings.ranks[first].node, settings.ranks[first].micro_in_force
    change = e.MicroBatchChanged(((node, before),), ((node, after[first].micro_in_force),), cause)
    return Edit(settings.edited(ranks={**settings.ranks, **after}), change)
