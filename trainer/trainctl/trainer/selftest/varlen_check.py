"""Whether packed samples learn by torch's varlen_attn as they do with a mask."""

from pathlib import Path
from typing import Final

import torch

from trainctl.protocol.config import run_file
from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, judged
from trainctl.trainer.attention import torch_varlen
from trainctl.trainer.attention.document_bounds import VARLEN
from trainctl.trainer.backends.torch_device import choose_device
from trainctl.trainer.selftest.short_training import Learned, changed, largest_difference, learn
from trainctl.trainer.selftest.small_assets import make_rows

TOLERANCE: Final = 2e-3
"""Largest relative difference of a loss from that with a mask, in bfloat16."""


def check_varlen(file: Path, node: str) -> CheckOutcome:
    """The losses of a few steps on packs, on the device of `node` in a run file."""
    config = run_file.read(file)
    device = choose_device(config.nodes[node].device, "self-test")
    if (fault := torch_varlen.device_fault(device, torch.bfloat16)) is not None:
        return absent(f'attention = "{VARLEN}" {fault}')
    rows = make_rows(file.parent / "rows")
    data = {"path": str(rows), "kind": "rows", "packing": "best-fit"}

    def learned(attention: str) -> Learned:
        tables = {"data": data, "model": {"dtype": "bfloat16", "attention": attention}}
        return learn(changed(config, tables), node, file.parent)

    found, masked = learned(VARLEN), learned("auto")
    apart = largest_difference(found.losses, masked.losses)
    faults = [] if apart <= TOLERANCE else [
        f"a loss differs by {apart:.1e} from that with a mask; at most {TOLERANCE:g} is expected"
    ]  # fmt: skip
    return judged(
        faults, f"{found.device}: losses of packs differ by {apart:.1e} from those with a mask", difference=apart,
        tolerance=TOLERANCE, losses=found.losses, losses_masked=masked.losses, step_seconds=found.step_seconds,
        step_seconds_masked=masked.step_seconds,
    )  # fmt: skip
