"""A node that a cluster file only describes, for `trainctl simulate`: its figures in place of measured ones. Pure."""

from typing import Final

import msgspec

from trainctl.protocol.advice.advice_facts import NodeFacts
from trainctl.protocol.batch.device_table import device_named, device_of, no_such_device
from trainctl.protocol.batch.memory_model import MemoryModel
from trainctl.protocol.calibration.profile import DeviceProfile, LinkRate, Pass, ProfileKey
from trainctl.protocol.config.simulated_nodes import SimulatedNode

SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batches for which a described rate is written out."""
LINK_BYTES, LATENCY_SECONDS = 125e6, 2e-4
"""Of a link that isn't described: 1 Gbit/s and the round trip of a local network, as `trainctl simulate` takes it."""
DESCRIBED: Final = "as described for trainctl simulate"


def described_node(node: NodeFacts, settings: SimulatedNode, given: DeviceProfile | None) -> NodeFacts:
    """A node of the run file with its description. `given`: the profile that the description names."""
    memory = described_memory(settings, node.memory)
    profile = given if given is not None else described_profile(settings, memory)
    named = device_named(settings.device) if settings.device else None
    device = given.key.device if given is not None else named.title if named is not None else ""
    known = device_of(device)
    problem = no_such_device(settings.device) if settings.device else ""
    cap = None if settings.memory_gb is None else int(settings.memory_gb * 1e9)
    return msgspec.structs.replace(
        node, profiles=() if profile is None else (profile,), other_profile=given, device=device, cores=None,
        machine=f"simulated {node.name}", backend=settings.backend, cap_bytes=node.cap_bytes if cap is None else cap,
        memory=memory, watts=known.watts if known is not None else None, described=DESCRIBED,
        problem=problem if profile is None and known is None else "",
    )  # fmt: skip


def described_link(settings: SimulatedNode, given: DeviceProfile | None, lead: str) -> LinkRate:
    """To the lead's node: what the description says, else the slowest link of its profile, else a usual one."""
    links = given.links if given is not None else ()
    measured = min((min(one.sent_bytes_per_second, one.received_bytes_per_second) for one in links), default=None)
    rate = settings.link_gbit * 125e6 if settings.link_gbit is not None else measured or LINK_BYTES
    latency = LATENCY_SECONDS if settings.latency_ms is None else settings.latency_ms / 1e3
    return LinkRate(lead, rate, rate, latency or None)


def described_memory(settings: SimulatedNode, estimate: MemoryModel | None) -> MemoryModel | None:
    """Return what a described rank holds by its micro-batch: what the description says, and the estimate or the
    profile's line for the rest. None if neither says anything."""
    if settings.model_gb is None and settings.sample_gb is None:
        return estimate
    base, sample = estimate or MemoryModel(0.0, 0.0)
    return MemoryModel(
        base if settings.model_gb is None else settings.model_gb * 1e9,
        sample if settings.sample_gb is None else settings.sample_gb * 1e9,
    )


def described_profile(settings: SimulatedNode, memory: MemoryModel | None) -> DeviceProfile | None:
    """Return the profile that a calibration would make of described passes or of a described rate; None for a device
    that is only named."""
    passes = settings.passes or _at(settings)
    if not passes:
        return None
    key = ProfileKey(
        device="simulated", model_digest="none", sequence_length=1, dtype="none", backend=settings.backend,
        backend_version="none", trainctl_version="none",
    )  # fmt: skip
    peaks = {micro: None if memory is None else int(memory.peak(micro)) for micro, _ in passes}
    measured = tuple(Pass(micro, seconds, peaks[micro]) for micro, seconds in passes)
    return DeviceProfile(key=key, created_at=0.0, passes=measured, optimizer_seconds=settings.step_seconds or None)


def _at(settings: SimulatedNode) -> tuple[tuple[int, float], ...]:
    rate = settings.samples_per_second
    return () if rate is None else tuple((size, settings.pass_seconds + size / rate) for size in SIZES)
