"""Cluster and run files of simulated runs, and what their records say."""

from pathlib import Path
from typing import Any

import tomli_w

from trainctl.node_agent.simulate import scenario
from trainctl.node_agent.simulate.simulation import SimulatedRun, Simulation
from trainctl.protocol import messages as m
from trainctl.protocol.record.reader import RecordReader

PARAMETERS = 1_000_000


def files(
    folder: Path, nodes: dict[str, dict[str, Any]], steps: int, batch: int, micro: int | str = 2, **tables: Any
) -> tuple[Path, Path]:
    """A cluster file and a run file."""
    cluster, run = folder / "cluster.toml", folder / "run.toml"
    cluster.write_bytes(
        tomli_w.dumps({"nodes": {name: {"simulated": table} for name, table in nodes.items()}}).encode()
    )
    run.write_bytes(tomli_w.dumps({
        "run": {"name": "try", "steps": steps}, "model": {"path": "/model"}, "data": {"path": "/data.txt"},
        "batch": {"global": batch, "micro": micro}, "optimizer": {"learning_rate": 1e-3}, **tables,
    }).encode())  # fmt: skip
    return cluster, run


def simulate(
    folder: Path, nodes: dict[str, dict[str, Any]], *, steps: int = 60, batch: int = 12, seed: int = 0,
    name: str = "try-simulated", parameters: int = PARAMETERS, **tables: Any,
) -> tuple[Simulation, SimulatedRun]:  # fmt: skip
    """A whole run; its record is in the simulation's `paths`."""
    cluster, run = files(folder, nodes, steps, batch, **tables)
    found = scenario.read(cluster, run, seed=seed, steps=None, parameters=parameters)
    simulation = Simulation(found, folder / name)
    return simulation, simulation.play()


def steps_of(simulation: Simulation) -> tuple[m.StepCommitted, ...]:
    """All that stand."""
    with RecordReader(simulation.paths) as reader:
        return reader.steps(0, 100_000)[0]


def events_of(simulation: Simulation) -> list[m.Event]:
    """All of them."""
    with RecordReader(simulation.paths) as reader:
        return [*reader.events(0, 10_000)[0]]
