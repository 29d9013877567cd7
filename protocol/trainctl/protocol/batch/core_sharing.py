"""How the ranks of one machine divide its cores: each library would start a thread for every core, and threads that
wait for each other spin. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from trainctl.protocol.config.run_tables import RunFile


class Machine(NamedTuple):
    """Where a node's ranks run."""

    boot: str  # equal for nodes of one machine; empty: not known
    cores: float  # that its ranks may use


def share_cores(config: RunFile, machines: Mapping[str, Machine]) -> tuple[RunFile, tuple[str, ...]]:
    """Return the run file with `threads` for nodes that share a machine and don't set them, by `threads` or
    OMP_NUM_THREADS, and a line on each such machine."""
    tables, lines = dict(config.nodes), []
    for boot in dict.fromkeys(machines[node].boot for node in config.nodes if node in machines):
        nodes = [node for node in config.nodes if node in machines and machines[node].boot == boot]
        free = [node for node in nodes if not tables[node].threads and "OMP_NUM_THREADS" not in tables[node].env]
        if not boot or len(nodes) < 2 or not free:
            continue
        cores = min(machines[node].cores for node in nodes)
        threads = max(1, int(cores - sum(tables[node].threads for node in nodes)) // len(free))
        tables |= {node: msgspec.structs.replace(tables[node], threads=threads) for node in free}
        each = "1 thread" if threads == 1 else f"{threads} threads"
        lines.append(f"{', '.join(nodes)} share {cores:g} cores: {each} for {'each' if len(free) > 1 else free[0]}")
    return msgspec.structs.replace(config, nodes=tables), tuple(lines)
