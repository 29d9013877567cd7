"""Whether a rank that computes in each data type learns as one in float32 does."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.machine.check_outcome import CheckOutcome, judged
from trainctl.trainer.backends.load import load
from trainctl.trainer.calibration.step_runner import StepRunner
from trainctl.trainer.data.dataset import open_dataset

STEPS: Final = 5
"""Updates, all on the same samples."""
TOLERANCES: Final[Mapping[str, float]] = {"bfloat16": 1e-2, "bf16-sr": 2e-2, "float16": 2e-3}
"""Largest relative difference of a loss from that in float32."""
LEAST_DECLINE: Final = 0.02
"""By how much of itself float32's loss must fall."""
_MOST_SKIPPED: Final = 12
"""Steps that float16's loss scale may skip before the first update: it begins at 2^16, and halves each time."""


def check_precision(file: Path, node: str) -> CheckOutcome:
    """The losses of a few steps in each data type, on the backend and device of `node` in a run file."""
    config = run_file.read(file)
    exact, device = _losses(config, node, "float32", file.parent)
    faults = [] if exact[-1] < exact[0] * (1 - LEAST_DECLINE) else [f"float32: the loss doesn't fall: {exact}"]
    figures: dict[str, Any] = {"float32": {"losses": exact}}
    for dtype, tolerance in TOLERANCES.items():
        losses, _ = _losses(config, node, dtype, file.parent)
        apart = largest_difference(losses, exact)
        figures[dtype] = {"losses": losses, "difference": apart, "tolerance": tolerance}
        if not apart <= tolerance:
            faults.append(f"{dtype}: a loss differs by {apart:.1e} from float32's; at most {tolerance:g} is expected")
    said = ", ".join(f"{dtype} {figures[dtype]['difference']:.1e}" for dtype in TOLERANCES)
    return judged(faults, f"{device}: losses differ from float32's by {said}", device=device, dtypes=figures)


def largest_difference(losses: list[float], exact: list[float]) -> float:
    """Of two curves, relative to the second; infinite if a loss is not finite or the lengths differ."""
    if len(losses) != len(exact):
        return float("inf")
    found = [abs(one - other) / abs(other) for one, other in zip(losses, exact, strict=True)]
    return max(one if one == one else float("inf") for one in found)


def _losses(config: RunFile, node: str, dtype: Any, folder: Path) -> tuple[list[float], str]:
    """The loss before each update and after the last one, and the device. A skipped step isn't counted."""
    model = msgspec.structs.replace(config.model, dtype=dtype)
    config = msgspec.structs.replace(config, model=model)
    data = open_dataset(config, folder / "caches", "self-test")
    backend = load(config, config.nodes[node], "self-test")
    with tempfile.TemporaryDirectory(dir=folder) as work:
        runner = StepRunner(config, node, backend, data, Path(work), config.optimizer.learning_rate)
        try:
            losses = list[float]()
            for _ in range(STEPS + 1 + _MOST_SKIPPED):
                report = runner.train(config.batch.micro, config.batch.global_)  # type: ignore[arg-type]
                if report.skipped is None:
                    losses.append(report.loss_sum / report.weight)
                if len(losses) > STEPS:
                    break
            return losses, f"{backend.name} {backend.device}"
        finally:
            runner.close()
            data.close()
