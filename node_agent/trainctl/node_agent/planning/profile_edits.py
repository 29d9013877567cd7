"""Micro-batches that the run file leaves to the nodes' profiles."""

import msgspec

from trainctl.node_agent.planning.durable import Settings
from trainctl.node_agent.planning.share_edits import Edit
from trainctl.protocol.calibration.peak import fastest_within_cap
from trainctl.protocol.config.micro_batches import is_auto, micro_of
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
    if not is_auto(config, table) or setting.halved_to or setting.micro_batch != micro_of(config, table):
        return None
    chosen = fastest_within_cap(ready.profile.passes, config.batch.global_, ready.memory_cap_bytes)
    if chosen.micro == setting.micro_batch:
        return None
    after = msgspec.structs.replace(setting, micro_batch=chosen.micro)
    cause = f'micro = "auto": {chosen.rate:.4g} samples/s by {setting.node}\'s calibration'
    change = e.MicroBatchChanged(
        ((setting.node, setting.micro_in_force),), ((setting.node, after.micro_in_force),), cause
    )
    return Edit(settings.edited(ranks={**settings.ranks, ready.rank: after}), change)
