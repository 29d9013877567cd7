"""Sharing a machine's cores among its ranks: each library would start a thread for every core, and threads that
wait for each other spin. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from trainctl.protocol.config.env_policy import omp_threads
from trainctl.protocol.config.run_tables import NodeTable, RunFile


@dataclass(frozen=True)
class Machine:
    """The cores that a node's ranks run on."""

    pool: str  # equal for nodes whose ranks use the same cores; empty: not known
    cores: float  # that its ranks may use; 0: its agent's version doesn't say, and knows no `shared_threads`
    threads: int = 0  # that its agent's environment sets; 0: any number


def set_threads(table: NodeTable, agent_threads: int = 0) -> int:
    """Return the threads that a node's rank has without a part of shared cores: by its table, or by the OMP_NUM_THREADS
    of the table or of its agent; 0 if none sets them."""
    return table.threads or omp_threads(table.env) or agent_threads


def share_cores(config: RunFile, machines: Mapping[str, Machine]) -> tuple[RunFile, tuple[str, ...]]:
    """Return the run file with `shared_threads` for nodes that share cores and whose threads nothing else sets, and a
    line on each such group of nodes. No part that the run file had before stays."""
    tables, lines = {node: msgspec.structs.replace(table, shared_threads=0) for node, table in config.nodes.items()}, []
    can_read = all(machine.cores for machine in machines.values())
    for pool in dict.fromkeys(machines[node].pool for node in config.nodes if node in machines and can_read):
        nodes = [node for node in config.nodes if node in machines and machines[node].pool == pool]
        threads_set = {node: set_threads(tables[node], machines[node].threads) for node in nodes}
        free = [node for node in nodes if not threads_set[node]]
        if not pool or len(nodes) < 2 or not free:
            continue
        cores = min(machines[node].cores for node in nodes)
        threads = max(1, int(cores - sum(threads_set.values())) // len(free))
        tables |= {node: msgspec.structs.replace(tables[node], shared_threads=threads) for node in free}
        each = "1 thread" if threads == 1 else f"{threads} threads"
        lines.append(f"{', '.join(nodes)} share {cores:g} cores: {each} for {'each' if len(free) > 1 else free[0]}")
    return msgspec.structs.replace(config, nodes=tables), tuple(lines)
