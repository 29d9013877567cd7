"""The checks of `trainctl selftest`, in the order in which they run."""

import os
from typing import Final

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.check_outcome import CheckOutcome
from trainctl.tui.selftest import machine_checks, profile_check, raw_outputs, reading_checks, training_checks
from trainctl.tui.selftest.check_runner import Check
from trainctl.tui.selftest.shared_parts import SharedParts

SERVICE_LEAVE_SECONDS: Final = 200.0
"""Time in which the service is removed: launchd waits up to 120 s for its end, and 40 s pass until it is forgotten.
A trial that is killed before leaves a service that is restarted for ever."""


async def service(shared: SharedParts) -> CheckOutcome:
    """An agent under the user's service manager. It needs this user's real runtime folder."""
    own = {name: value for name, value in os.environ.items() if name in ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")}
    environment = {name: value for name, value in shared.home.environment.items() if name != "XDG_RUNTIME_DIR"} | own
    words = ("--folder", str(shared.home.folder / "service"), "--runtime", str(shared.home.runtime))
    module = "trainctl.node_agent.services.service_trial"
    return await shared.home.outcome_of(module, *words, environment=environment, leave_seconds=SERVICE_LEAVE_SECONDS)


CHECKS: Final = (
    Check("versions", "the program, its libraries, the system and its devices", 20, machine_checks.versions),
    Check("cpu", "products on the CPU, by each backend", 40, machine_checks.processor),
    Check("cuda", "torch on an NVIDIA GPU: products, memory counters, a failed allocation", 40, machine_checks.cuda),
    Check("mlx-gpu", "MLX on a GPU by Metal or CUDA: products, memory counters, a failed allocation", 40,
          machine_checks.mlx_gpu),
    Check("mps", "torch on an Apple GPU: products, memory counters, a failed allocation", 40, machine_checks.mps),
    Check("readings", "the agent's readings of processor, memory and disk while a rank trains", 60,
          reading_checks.readings),
    Check("power", "readings of power, temperature and thermal pressure", 60, reading_checks.power),
    Check("nvml", "readings of NVIDIA devices: power, temperature, clocks, processes", 60, reading_checks.nvml),
    Check("service", "an agent under launchd or systemd --user: started, killed, restarted, removed", 60, service),
    Check("interfaces", "a sum of two ranks through each network interface", 60, machine_checks.interfaces),
    Check("precision", "five steps in each data type, compared with float32", 120, machine_checks.precision),
    Check("checkpoint", "a checkpoint in the background; the losses after resuming are the same bits", 120,
          training_checks.checkpoint),
    Check("group", "the losses of two ranks on this machine, compared with one rank", 120, training_checks.group),
    Check("command", "a command takes effect at one step on both ranks", 90, training_checks.command),
    Check("profile", "a profile of three steps: phases, kernels of a GPU, a Metal capture", 90, profile_check.profile),
    Check("optimizers", "bitsandbytes' optimizers, offloaded moments and a base in nf4, compared with AdamW", 90,
          machine_checks.optimizers),
    Check("varlen", "packed samples by varlen_attn on an NVIDIA GPU, compared with a mask", 60, machine_checks.varlen),
    Check("recordings", "outputs of the system's own programs, for tests to replay", 40, raw_outputs.recordings),
    Check("compile", "compiled layers: the first step's time, and the losses compared with uncompiled ones", 150,
          machine_checks.compiled),
)  # fmt: skip


def chosen(names: list[str]) -> tuple[Check, ...]:
    """The checks of these names, in their order here; all without names. Raises InvalidInputError."""
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise InvalidInputError("--only", f"no check {name!r}; the checks are {', '.join(known)}")
    return tuple(check for check in CHECKS if not names or check.name in names)
