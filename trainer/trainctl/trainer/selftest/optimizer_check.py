"""Whether bitsandbytes' optimizers, moments in the host's memory and a base in nf4 learn as AdamW on whole weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from trainctl.protocol.config import run_file
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, combined, failed, judged
from trainctl.trainer.backends.torch_device import choose_device
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.selftest.short_training import Learned, changed, largest_difference, learn

LORA: Final = {"adapter": {"kind": "lora", "rank": 4}}


class Trial(NamedTuple):
    """A setting, and what its losses are compared with. `tables`: changes of the run file."""

    tables: Mapping[str, Mapping[str, Any]]
    against: Mapping[str, Mapping[str, Any]]
    tolerance: float  # largest relative difference of a loss
    rounds: bool = False  # whether the losses must differ: it rounds numbers that the other one doesn't


TRIALS: Final[Mapping[str, Trial]] = {
    "adamw-8bit": Trial({"optimizer": {"kind": "adamw-8bit"}}, {}, 1e-3, rounds=True),
    "paged-adamw": Trial({"optimizer": {"kind": "paged-adamw"}}, {}, 1e-4),
    "paged-adamw-8bit": Trial({"optimizer": {"kind": "paged-adamw-8bit"}}, {}, 1e-3, rounds=True),
    "offload": Trial({"optimizer": {"offload": True}}, {}, 1e-4),
    "nf4": Trial(LORA | {"model": {"base": "nf4"}}, LORA, 1e-2, rounds=True),
}


def check_optimizers(file: Path, node: str) -> CheckOutcome:
    """The losses of a few steps with each, on the device of `node` in a run file."""
    config = run_file.read(file)
    device, known = choose_device(config.nodes[node].device, "self-test"), dict[str, Learned]()

    def learned(tables: Mapping[str, Mapping[str, Any]]) -> Learned:
        key = repr(tables)
        if key not in known:
            known[key] = learn(changed(config, tables), node, file.parent)
        return known[key]

    return combined([(name, _tried(name, trial, device, learned)) for name, trial in TRIALS.items()])


def _tried(name: str, trial: Trial, device: torch.device, learned: Any) -> CheckOutcome:
    """A failure ends only this trial."""
    if name == "offload" and device.type != "cuda":
        return absent(f"moments leave the memory of an NVIDIA GPU, and this rank's device is {device}")
    try:
        found, exact = learned(trial.tables), learned(trial.against)
    except InvalidInputError as error:
        return absent(str(error))
    except (TrainctlError, RuntimeError, NotImplementedError, ImportError) as error:
        return failed(f"{type(error).__name__}: {first_line(error)}")
    apart = largest_difference(found.losses, exact.losses)
    faults = []
    if not apart <= trial.tolerance:
        faults.append(f"a loss differs by {apart:.1e} from that without; at most {trial.tolerance:g} is expected")
    if trial.rounds and not apart:
        faults.append("the losses are the same bits as without: it has no effect")
    return judged(
        faults, f"{found.device}: losses differ by {apart:.1e} from those without", difference=apart,
        tolerance=trial.tolerance, losses=found.losses, losses_without=exact.losses, step_seconds=found.step_seconds,
    )  # fmt: skip
