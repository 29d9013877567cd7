"""Checks of the readings that an agent publishes while a rank trains: the machine's, power and heat, NVIDIA devices."""

import shutil
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.machine.check_outcome import CheckOutcome, absent, failed, judged
from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.machine.nvidia import capabilities
from trainctl.tui.selftest.shared_parts import SharedParts
from trainctl.tui.selftest.small_runs import MOST_STEPS, backend_table, run_tables

READINGS: Final = 4
"""Readings that are judged, one a second, while a rank trains."""
CELSIUS: Final = (1.0, 125.0)
WATTS: Final = (0.0, 2000.0)
MEGAHERTZ: Final = (0.0, 10_000.0)
PERCENT: Final = (0.0, 100.0)
"""Plausible ranges."""


async def readings(shared: SharedParts) -> CheckOutcome:
    """Processor, memory, disk and load."""
    return judge_host(await shared.once("readings", lambda: _taken(shared))) if shared.backends else _no_backend()


async def power(shared: SharedParts) -> CheckOutcome:
    """Power, temperature and thermal pressure."""
    if not shared.backends:
        return _no_backend()
    found = await shared.once("readings", lambda: _taken(shared))
    return judge_power(found, shared.facts.system, has_macmon=shutil.which("macmon") is not None)


async def nvml(shared: SharedParts) -> CheckOutcome:
    """NVIDIA devices, as their driver reports them."""
    if not capabilities():
        return absent("NVIDIA's driver finds no device")
    if installed_version("nvidia-ml-py") is None:
        return absent("NVML's Python module is missing (pip install nvidia-ml-py)")
    if not shared.backends:
        return _no_backend()
    return judge_nvml(await shared.once("readings", lambda: _taken(shared)))


def _no_backend() -> CheckOutcome:
    return absent("neither torch nor mlx is installed, so no rank can load the machine")


async def _taken(shared: SharedParts) -> tuple[m.HostReading, ...]:
    """Readings while a rank trains; the first ones, of rates since they began, are left out."""
    cluster = await shared.cluster()
    backend = "mlx" if sys.platform == "darwin" and "mlx" in shared.backends else shared.backends[0]
    view = await cluster.start(config=run_tables(shared.home.assets, {"a": backend_table(backend)}, MOST_STEPS))
    await cluster.until_step(1)
    found = list[m.HostReading]()
    async for item in cluster.client.attach(0, view.run):
        if isinstance(item, m.HostReading):
            found.append(item)
        if len(found) > READINGS:
            break
    await cluster.stop_run()
    return tuple(found[1:])


# ---------------------------------------------------------------- judged: pure


def judge_host(found: Sequence[m.HostReading]) -> CheckOutcome:
    """Whether the readings that every machine has are there and plausible."""
    if not found:
        return failed("the agent published no readings")
    last = found[-1]
    faults = [
        *_outside("cpu_percent", [one.cpu_percent for one in found], PERCENT),
        *_outside("memory_used_bytes", [one.memory_used_bytes for one in found], (1, last.memory_total_bytes or 0)),
        *_outside("disk_free_bytes", [one.disk_free_bytes for one in found], (1, last.disk_total_bytes or 0)),
        *_outside("load_1min", [one.load_1min for one in found], (0.0, 1e5)),
    ]
    roles = sorted({process.role for one in found for process in one.processes})
    if "trainer" not in roles or "agent" not in roles:
        faults.append(f"the processes of this program are {roles}, without the agent or the trainer")
    names = sorted({name for one in found for name in one.values})
    cpu = max((one.cpu_percent or 0.0 for one in found), default=0.0)
    return judged(
        faults, f"CPU up to {cpu:.0f} %, {len(names)} other readings, processes: {', '.join(roles)}",
        values=last.values, roles=roles, readings=[_plain(one) for one in found],
    )  # fmt: skip


def judge_power(found: Sequence[m.HostReading], system: str, *, has_macmon: bool) -> CheckOutcome:
    """Whether what the machine gives of power and heat is plausible. macOS gives its thermal pressure to everyone."""
    if not found:
        return failed("the agent published no readings")
    watts = [gpu.power_watts for one in found for gpu in one.gpus if gpu.power_watts is not None]
    heats = [gpu.temperature_celsius for one in found for gpu in one.gpus if gpu.temperature_celsius is not None]
    heats += [one.temperature_celsius for one in found if one.temperature_celsius is not None]
    pressure = [one.values["thermal_pressure"] for one in found if "thermal_pressure" in one.values]
    faults = [*_beyond("power, W", watts, WATTS), *_beyond("temperature, °C", heats, CELSIUS)]
    if system == "Darwin" and not pressure:
        faults.append("macOS gave no thermal pressure")
    if system == "Darwin" and has_macmon and not watts:
        faults.append("macmon is installed, but the agent has no power readings of the GPU")
    figures: dict[str, Any] = {"watts": watts, "celsius": heats, "thermal_pressure": pressure}
    figures["energy_joules"] = found[-1].energy_joules
    if not (watts or heats or pressure or faults):
        return absent("this machine has no sensor of power or temperature that a user may read", **figures)
    notes = ["macmon is not on PATH: no use, clock, power or temperature of the GPU (brew install macmon)"]
    said = [f"{len(watts)} readings of power, {len(heats)} of temperature, {len(pressure)} of thermal pressure"]
    return judged(faults, *said, *(notes if system == "Darwin" and not has_macmon else []), **figures)


def judge_nvml(found: Sequence[m.HostReading]) -> CheckOutcome:
    """Whether each NVIDIA device gives all that is read of it."""
    devices = [gpu for one in found for gpu in one.gpus]
    if not devices:
        return failed("the driver knows an NVIDIA device, but the agent has no readings of it")
    most = max(gpu.memory_total_bytes or 0 for gpu in devices)
    faults = [
        *_outside("utilization_percent", [gpu.utilization_percent for gpu in devices], PERCENT),
        *_outside("clock_mhz", [gpu.clock_mhz for gpu in devices], MEGAHERTZ),
        *_outside("power_watts", [gpu.power_watts for gpu in devices], WATTS),
        *_outside("temperature_celsius", [gpu.temperature_celsius for gpu in devices], CELSIUS),
        *_outside("memory_used_bytes", [gpu.memory_used_bytes for gpu in devices], (0, most)),
    ]
    others = max(len(gpu.others) for gpu in devices)
    limits = sorted({limit for gpu in devices for limit in gpu.clock_limits})
    gpu = devices[-1]
    return judged(
        faults, f"{gpu.name}: {gpu.power_watts} W, {gpu.temperature_celsius} °C, {gpu.clock_mhz} MHz",
        clock_limits=limits, other_processes=others, readings=[_plain_gpu(one) for one in devices],
    )  # fmt: skip


def _outside(name: str, values: Sequence[float | None], limits: tuple[float, float]) -> list[str]:
    """A fault if a value is missing or not plausible."""
    if any(value is None for value in values):
        return [f"{name} is missing in a reading"]
    return _beyond(name, [value for value in values if value is not None], limits)


def _beyond(name: str, values: Sequence[float], limits: tuple[float, float]) -> list[str]:
    odd = [value for value in values if not limits[0] <= value <= limits[1]]
    return [f"{name} is {odd[0]:g}, outside {limits[0]:g} to {limits[1]:g}"] if odd else []


def _plain(reading: m.HostReading) -> dict[str, Any]:
    """A reading without names and processes."""
    plain: dict[str, Any] = msgspec.to_builtins(reading)
    for name in ("node", "boot", "seq", "processes", "values", "read_at", "energy_since_at"):
        plain.pop(name, None)
    return {**plain, "gpus": [_plain_gpu(gpu) for gpu in reading.gpus]}


def _plain_gpu(gpu: m.GpuReading) -> dict[str, Any]:
    """A device without the names of others' processes and users."""
    plain: dict[str, Any] = msgspec.to_builtins(gpu)
    return {**plain, "others": len(gpu.others)}
