"""Whether a rank that computes in each data type learns as one in float32 does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainctl.protocol.config import run_file
from trainctl.protocol.machine.check_outcome import CheckOutcome, judged
from trainctl.trainer.selftest.short_training import Learned, changed, largest_difference, learn

TOLERANCES: Final[Mapping[str, float]] = {"bfloat16": 1e-2, "bf16-sr": 2e-2, "float16": 2e-3}
"""Largest relative difference of a loss from that in float32."""
LEAST_DECLINE: Final = 0.02
"""By how much of itself float32's loss must fall."""


def check_precision(file: Path, node: str) -> CheckOutcome:
    """The losses of a few steps in each data type, on the backend and device of `node` in a run file."""
    config = run_file.read(file)

    def learned(dtype: str) -> Learned:
        return learn(changed(config, {"model": {"dtype": dtype}}), node, file.parent)

    exact, device, *_ = learned("float32")
    faults = [] if exact[-1] < exact[0] * (1 - LEAST_DECLINE) else [f"float32: the loss doesn't fall: {exact}"]
    figures: dict[str, Any] = {"float32": {"losses": exact}}
    for dtype, tolerance in TOLERANCES.items():
        losses = learned(dtype).losses
        apart = largest_difference(losses, exact)
        figures[dtype] = {"losses": losses, "difference": apart, "tolerance": tolerance}
        if not apart <= tolerance:
            faults.append(f"{dtype}: a loss differs by {apart:.1e} from float32's; at most {tolerance:g} is expected")
    said = ", ".join(f"{dtype} {figures[dtype]['difference']:.1e}" for dtype in TOLERANCES)
    return judged(faults, f"{device}: losses differ from float32's by {said}", device=device, dtypes=figures)
