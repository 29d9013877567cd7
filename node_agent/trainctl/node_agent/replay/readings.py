"""Readings of a played node's machine: the recorded ones in turn, and the scripted heat of its device."""

import random

from trainctl.node_agent.replay.faults import ScriptedFaults
from trainctl.node_agent.replay.format import RecordedMachine, Recording
from trainctl.protocol import messages as m

UNREAD = RecordedMachine(None, None, None, None, None)
OFFSET = 13
"""Readings between the places of two neighbouring nodes in the recording."""
WATTS = 38.0


def reading(recording: Recording, script: ScriptedFaults, node: str, rank: int, number: int, step: int, at: float) -> (
    m.HostReading
):  # fmt: skip
    """The `number`-th reading of a node, taken `at` (Unix seconds) while the run is at `step`."""
    machines = recording.machines or (UNREAD,)
    found = machines[(number + OFFSET * rank) % len(machines)]
    wander = random.Random(hash((rank, number))).random()
    return m.HostReading(
        node=node, read_at=at, cpu_percent=_less(found.cpu_percent, 6 * wander),
        memory_used_bytes=found.memory_used_bytes, memory_total_bytes=found.memory_total_bytes,
        disk_free_bytes=found.disk_free_bytes, load_1min=found.load_1min,
        temperature_celsius=round(script.heat(rank, step).celsius + wander, 1),
        gpus=(_device(script, rank, step, wander),),
    )  # fmt: skip


def _less(value: float | None, by: float) -> float | None:
    return None if value is None else max(value - by, 0.0)


def _device(script: ScriptedFaults, rank: int, step: int, wander: float) -> m.GpuReading:
    """No device was recorded: these readings are the script's, and their name says so."""
    heat = script.heat(rank, step)
    busy = 0.0 if script.is_lost(rank, step) else 93.0 + 6 * wander
    return m.GpuReading(
        name=m.SCRIPTED_DEVICE, utilization_percent=round(busy), clock_mhz=round(heat.clock_mhz - 12 * wander),
        power_watts=round(WATTS * heat.clock_mhz / 1620 + 2 * wander, 1),
        temperature_celsius=round(heat.celsius + wander, 1),
    )  # fmt: skip
