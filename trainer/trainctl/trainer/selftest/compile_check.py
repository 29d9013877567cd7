"""Whether compiled layers learn as uncompiled ones do, and how long the first step takes."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import Compile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, judged
from trainctl.protocol.machine.devices import resolve_alone
from trainctl.trainer.backends.torch_compile import check_compiler
from trainctl.trainer.backends.torch_device import choose_device
from trainctl.trainer.selftest.short_training import Learned, changed, largest_difference, learn

TOLERANCES: Final[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 5e-3, "float16": 2e-3}
"""Largest relative difference of a loss from that without compilation, in the same data type."""
_MODES: Final[Mapping[Compile, str]] = {"default": "float32", "reduce-overhead": "auto"}
"""Modes that are tried, and their data types; the second one differs only on CUDA, where it records graphs."""


def check_compile(file: Path, node: str) -> CheckOutcome:
    """The losses of a few steps with compiled layers, on the device of `node` in a run file."""
    config = run_file.read(file)
    device = choose_device(config.nodes[node].device, "self-test")
    try:
        check_compiler(device, "self-test")
    except InvalidInputError as error:
        return absent(str(error))
    faults, said, figures = list[str](), list[str](), dict[str, Any]()
    for mode, dtype in _MODES.items():
        if mode == "default" or device.type == "cuda":
            resolved = resolve_alone(changed(config, {"model": {"dtype": dtype}}), node, "self-test")
            settings = [changed(resolved, {"model": {"compile": one}}) for one in ("off", mode)]
            plain, compiled = (learn(one, node, file.parent) for one in settings)
            found = _compared(plain, compiled, TOLERANCES[resolved.model.computed])
            figures[mode] = {"dtype": resolved.model.dtype, **found}
            said.append(f"{mode} {found['difference']:.1e}, first step {found['first_step_seconds']:.1f} s")
            faults += _faults(mode, found)
    return judged(faults, f"torch {device}: losses differ from those uncompiled by {'; '.join(said)}", modes=figures)


def _compared(plain: Learned, compiled: Learned, tolerance: float) -> dict[str, Any]:
    return {
        "losses": compiled.losses, "losses_uncompiled": plain.losses, "tolerance": tolerance,
        "difference": largest_difference(compiled.losses, plain.losses), "compile_seconds": compiled.compile_seconds,
        "graphs": compiled.graphs,
        "first_step_seconds": compiled.step_seconds[0], "first_step_seconds_uncompiled": plain.step_seconds[0],
        "later_step_seconds": statistics.median(compiled.step_seconds[1:]),
        "later_step_seconds_uncompiled": statistics.median(plain.step_seconds[1:]),
    }  # fmt: skip


def _faults(mode: str, found: dict[str, Any]) -> list[str]:
    faults = []
    if not found["difference"] <= found["tolerance"]:
        faults.append(
            f"{mode}: a loss differs by {found['difference']:.1e} from that uncompiled; at most "
            f"{found['tolerance']:g} is expected"
        )
    if not found["graphs"]:
        faults.append(f"{mode}: nothing was compiled")
    return faults
