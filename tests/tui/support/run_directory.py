"""A run directory as a finished run of three nodes leaves it: what was simulated once, written by the agent's own
recorder at fixed times, with a hole in its curve."""

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
from tests.node_agent.support import scenarios

from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.simulate.simulation import STARTED_AT
from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import RunStateChanged
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

STEPS, NODES = 160, 3
BEGAN_AT = STARTED_AT
AWAY = range(100, 103)
"""Steps that are missing."""
NAMES = ("torch-a", "torch-b", "mlx-c")


class Simulated(NamedTuple):
    """Return the directory that a simulated run has left."""

    view: m.RunView
    steps: list[tuple[m.StepCommitted, tuple[m.RankStep, ...]]]
    events: tuple[m.Event, ...]
    evaluations: dict[int, float]


@functools.cache
def simulated(nodes: int = NODES, steps: int = STEPS, *, faults: bool = False) -> Simulated:
    """Simulate a run whose shares change; with `faults`, its last node dies once."""
    tables = {
        name: {
            "samples_per_second": 24.0 - 4 * rank,
            "link_gbit": 10.0,
            "load_seconds": 1.0,
            "memory_gb": 24.0,
            "model_gb": 4.0,
            "sample_gb": 0.5,
        }
        for rank, name in enumerate((*NAMES, *(f"torch-{number}" for number in range(nodes)))[:nodes])
    }
    tables[NAMES[0]]["speeds"] = [{"step": 92, "speed": 0.5}]
    if faults:
        [*tables.values()][-1]["fails_at"] = [60]
    with tempfile.TemporaryDirectory() as passing:
        simulation, _ = scenarios.simulate(
            Path(passing), tables, steps=steps, batch=8 * nodes, data={"path": "/data.txt", "held_out": 0.001},
            evaluate={"every_steps": 20},
        )  # fmt: skip
        with RecordReader(simulation.paths) as reader:
            view = msgspec.json.decode(reader.meta("view") or "", type=m.RunView)
            committed = [(step, tuple(reader.rank_steps(step.step))) for step in reader.steps(0, steps)[0]]
            evaluations = {row.step: row.loss for row in reader.evaluations()}
            return Simulated(view, committed, tuple(reader.events(0, 500)[0]), evaluations)


def make(directory: Path, nodes: int = NODES, *, faults: bool = False) -> Path:
    """160 steps, three of them missing, with a metric of the run's own, and a log for each rank."""
    paths = RunPaths(directory)
    paths.logs.mkdir(parents=True)
    found, run = simulated(nodes, faults=faults), directory.name
    with RunDb(paths, resumable=False) as recorder:
        for step, (first, *others) in found.steps:
            if step.step in AWAY:
                continue
            first = msgspec.structs.replace(first, values={**first.values, "reward": step.step / STEPS})
            parts = [msgspec.structs.replace(part, run=run) for part in (first, *others)]
            recorder.commit(msgspec.structs.replace(step, run=run), parts, step.committed_at)
            if (loss := found.evaluations.get(step.step)) is not None:
                at = step.committed_at
                recorder.evaluation(step.step, at, loss, 100.0, 0.5, {"eval/kl": step.step / 1000})
                recorder.sample(sample(run, step.step, at))
        end = found.steps[-1][0].committed_at
        for event in found.events:
            if not isinstance(event.data, RunStateChanged):
                more = {"step": event.step or None, "verb": event.verb, "outcome": event.outcome}
                recorder.event(event.at, event.data, event.severity, event.by, **more)
        recorder.event(end, RunStateChanged("", "finished", step=STEPS), "good", "auto", step=STEPS)
        reading = m.HostReading(
            node=NAMES[0], read_at=end - 20, cpu_percent=91.0, memory_used_bytes=6 * 10**9,
            memory_total_bytes=25 * 10**9, disk_free_bytes=10**11,
        )  # fmt: skip
        recorder.host(reading)
        view = msgspec.structs.replace(found.view, run=run, name="demo", directory=str(directory), simulated=False)
        recorder.set_meta("view", msgspec.json.encode(view).decode(), own=True)
    for rank in range(nodes):
        paths.log(rank).write_text(f"rank {rank} began\nleaving: finished\n")
    return directory


def sample(run: str, step: int, at: float, prompt: str = "def", answer: str = "") -> m.Sample:
    return m.Sample(
        run=run, step=step, at=at, number=0, prompt=prompt, answer=answer or f"return {step}\n", tokens=4, ended=True,
        seconds=0.2, loss=2.0, eval_loss=None, max_tokens=8, temperature=0.0, top_p=1.0, seed=0, node="studio",
        by="auto",
    )  # fmt: skip
