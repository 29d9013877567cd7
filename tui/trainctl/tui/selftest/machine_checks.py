"""Checks of the machine itself: versions, devices, what one rank computes, and network interfaces."""

import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, combined, failed, judged
from trainctl.protocol.machine.devices import read_devices
from trainctl.protocol.machine.nvidia import capabilities
from trainctl.protocol.machine.visible_devices import without_cards
from trainctl.tui.selftest.shared_parts import SharedParts
from trainctl.tui.selftest.small_runs import backend_table, run_tables, write_tables

MOST_INTERFACES: Final = 5
"""Interfaces that are tried: a machine with containers may have dozens."""


async def versions(shared: SharedParts) -> CheckOutcome:
    """The program, its libraries, the system and the devices that it reports."""
    facts, devices = shared.facts, without_cards(read_devices())
    faults = [] if shared.backends else ["neither torch nor mlx is installed here, so this machine can't train"]
    titles = ", ".join(f"{one.backend} {one.device}" for one in devices) or "none"
    return judged(
        faults, f"{facts.system} {facts.release} {facts.machine}, Python {facts.python}; devices: {titles}",
        libraries=facts.libraries, environment=sorted(facts.environment), cpu_count=facts.cpu_count,
        cpu_quota=facts.cpu_quota, memory_total_bytes=facts.memory_total_bytes,
        memory_limit_bytes=facts.memory_limit_bytes, open_files=facts.open_files, on_battery=facts.on_battery,
        lid_closed=facts.lid_closed, compute_capabilities=[list(one) for one in capabilities()],
        devices=[{"backend": one.backend, "device": one.device, "types": list(one.types)} for one in devices],
    )  # fmt: skip


async def processor(shared: SharedParts) -> CheckOutcome:
    """Products on the CPU, by each backend."""
    parts = [(backend, await shared.rank_check("device", backend, "cpu")) for backend in shared.backends]
    return combined(parts) if parts else absent("neither torch nor mlx is installed")


async def cuda(shared: SharedParts) -> CheckOutcome:
    """NVIDIA devices."""
    if "torch" not in shared.backends:
        return absent("torch is not installed")
    return await shared.rank_check("device", "torch", "cuda")


async def mlx_gpu(shared: SharedParts) -> CheckOutcome:
    """MLX on an Apple GPU by Metal, or on an NVIDIA device where MLX is built for CUDA."""
    if "mlx" not in shared.backends:
        return absent("mlx is not installed")
    return await shared.rank_check("device", "mlx", "gpu")


async def mps(shared: SharedParts) -> CheckOutcome:
    """torch on an Apple GPU."""
    if sys.platform != "darwin" or "torch" not in shared.backends:
        return absent("mps needs macOS and torch")
    return await shared.rank_check("device", "torch", "mps")


async def precision(shared: SharedParts) -> CheckOutcome:
    """Each data type, on each backend's default device."""
    if not shared.backends:
        return absent("neither torch nor mlx is installed")
    return combined([
        (backend, await _training(shared, "precision", backend_table(backend))) for backend in shared.backends
    ])  # fmt: skip


async def compiled(shared: SharedParts) -> CheckOutcome:
    """Compiled layers."""
    return await _on_torch(shared, "compile")


async def varlen(shared: SharedParts) -> CheckOutcome:
    """Packs by varlen_attn."""
    return await _on_torch(shared, "varlen")


async def optimizers(shared: SharedParts) -> CheckOutcome:
    """bitsandbytes' optimizers and weights, and offloaded moments."""
    return await _on_torch(shared, "optimizers")


async def _on_torch(shared: SharedParts, check: str) -> CheckOutcome:
    """With the kernels that are the default, as people run it."""
    if "torch" not in shared.backends:
        return absent("torch is not installed")
    return await _training(shared, check, {"backend": "torch"})


async def _training(shared: SharedParts, check: str, table: dict[str, Any]) -> CheckOutcome:
    """A check that trains one rank for a few steps. `table`: of its node in the run file."""
    await shared.assets()
    file = shared.home.folder / f"{check}-{table['backend']}" / "run.toml"
    file.parent.mkdir()
    write_tables(file, training_tables(shared.home.assets, table))
    return await shared.rank_check(check, str(file), "a")


def training_tables(assets: Path, table: dict[str, Any]) -> dict[str, Any]:
    """The run file of such a check, with small steps, for a rank on node `a`."""
    return run_tables(assets, {"a": table}, steps=10) | {"batch": {"global": 4, "micro": 4}}


async def interfaces(shared: SharedParts) -> CheckOutcome:
    """Sums of two ranks through each network interface that is up and has an IPv4 address."""
    usable = [one.name for one in shared.facts.interfaces if one.is_up and one.addresses]
    if not shared.backends:
        return absent("neither torch nor mlx is installed")
    if not usable:
        return failed("no network interface has an IPv4 address, not even loopback")
    found = await shared.rank_check("interfaces", *usable[:MOST_INTERFACES])
    if left_out := usable[MOST_INTERFACES:]:
        found = msgspec.structs.replace(found, figures={**found.figures, "left_out": left_out})
    return found
