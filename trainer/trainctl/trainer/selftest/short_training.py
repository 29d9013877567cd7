"""A few updates of one rank alone, on the same samples: what the self-test's checks compare."""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from trainctl.protocol.config.run_tables import RunFile
from trainctl.trainer.backends.load import load
from trainctl.trainer.calibration.step_runner import StepRunner
from trainctl.trainer.data.dataset import open_dataset

STEPS: Final = 5
"""Updates, all on the same samples."""
_MOST_SKIPPED: Final = 12
"""Steps that float16's loss scale may skip before the first update: it begins at 2^16, and halves each time."""


class Learned(NamedTuple):
    """The loss before each update and after the last one. A skipped step isn't counted."""

    losses: list[float]
    device: str  # backend and device
    step_seconds: list[float]  # wall time of each step
    compile_seconds: float  # of the model's compiler, over all steps
    graphs: int  # that it compiled


def changed(config: RunFile, tables: Mapping[str, Mapping[str, Any]]) -> RunFile:
    """The run file with other values in some tables, by their names."""
    replaced = {name: msgspec.structs.replace(getattr(config, name), **fields) for name, fields in tables.items()}
    return msgspec.structs.replace(config, **replaced)


def learn(config: RunFile, node: str, folder: Path) -> Learned:
    """Train on the backend and device of `node`; `folder` is for temporary files. Raises what loading raises."""
    data = open_dataset(config, folder / "caches", "self-test")
    try:
        backend = load(config, config.nodes[node], "self-test")
        with tempfile.TemporaryDirectory(dir=folder) as work:
            runner = StepRunner(config, node, backend, data, Path(work), config.optimizer.learning_rate)
            try:
                losses, seconds = _train(runner, config)
            finally:
                runner.close()
    finally:
        data.close()
    meter = backend.compile_meter
    return Learned(losses, f"{backend.name} {backend.device}", seconds, meter.seconds, meter.graphs)


def _train(runner: StepRunner, config: RunFile) -> tuple[list[float], list[float]]:
    losses, seconds = list[float](), list[float]()
    for _ in range(STEPS + 1 + _MOST_SKIPPED):
        begun = time.perf_counter()
        report = runner.train(config.batch.micro, config.batch.global_)  # type: ignore[arg-type]
        if report.skipped is None:
            losses.append(report.loss_sum / report.weight)
            seconds.append(time.perf_counter() - begun)
        if len(losses) > STEPS:
            break
    return losses, seconds


def largest_difference(losses: list[float], exact: list[float]) -> float:
    """Of two curves, relative to the second; infinite if a loss is not finite or the lengths differ."""
    if len(losses) != len(exact):
        return float("inf")
    found = [abs(one - other) / abs(other) for one, other in zip(losses, exact, strict=True)]
    return max(one if one == one else float("inf") for one in found)
