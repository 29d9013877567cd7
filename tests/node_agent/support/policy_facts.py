"""Facts that have a policy propose something."""

from typing import Any

from tests.node_agent.support.simulation import Simulation, config, durable


def starved(mode: str) -> Simulation:
    """One that the kernel killed for memory, and that is back."""
    policy = {"out-of-memory": {"mode": mode}}
    simulation = Simulation(config(200, 12, policy=policy), durable(("a", "b"), 12)).begin().until_step(3)
    simulation.starve(simulation.ranks[1])
    simulation.until(lambda: simulation.conductor.durable.settings.ranks[1].out == "lost")
    simulation.tick(1.1)
    return simulation.until(lambda: not simulation.conductor.durable.settings.ranks[1].out)


def full(nodes: tuple[str, ...] = ("a", "b"), part: float = 0.95, **tables: Any) -> Simulation:
    """Ranks whose peaks take this part of their caps."""
    made = Simulation(config(200, 12, **tables), durable(nodes, 12))
    for rank in made.ranks.values():
        rank.says = {"values": {"memory_peak_bytes": part * 1e9, "memory_cap_bytes": 1e9}}
    return made.begin()
